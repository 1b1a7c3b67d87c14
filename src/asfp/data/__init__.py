"""Images and labels to train on: CIFAR-10, folders of images, and the digits that come with scikit-learn."""

from asfp.data.cifar import check_cifar10, cifar10, describe
from asfp.data.digits import ImageData, batches, digits
from asfp.data.resident import ResidentData, crop_flip

__all__ = ["ImageData", "ResidentData", "batches", "check_cifar10", "cifar10", "crop_flip", "describe", "digits"]
