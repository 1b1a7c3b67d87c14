"""The networks of the paper, and one function from a name to a model."""

from asfp.models.cifar_resnet import CifarResNet, convert_akamaster
from asfp.models.cifar_vgg import CifarVgg
from asfp.models.registry import MODELS, create_model

__all__ = ["MODELS", "CifarResNet", "CifarVgg", "convert_akamaster", "create_model"]
