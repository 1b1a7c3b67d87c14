"""One function from a name to a model: our CIFAR networks, torchvision's and timm's."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from asfp.errors import AsfpError, nearest
from asfp.models.cifar_resnet import CifarResNet
from asfp.models.cifar_vgg import CifarVgg

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "resnet8": partial(CifarResNet, 8),
    "resnet14": partial(CifarResNet, 14),
    "resnet20": partial(CifarResNet, 20),
    "resnet32": partial(CifarResNet, 32),
    "resnet44": partial(CifarResNet, 44),
    "resnet56": partial(CifarResNet, 56),
    "resnet110": partial(CifarResNet, 110),
    "resnet1202": partial(CifarResNet, 1202),
    "vgg16": CifarVgg,
}


def create_model(name: str, **kwargs: Any) -> nn.Module:
    """A new model: "resnet20" ... "resnet1202" and "vgg16" for CIFAR, "torchvision:NAME", or "timm:NAME".

    Ours take `num_classes=10`, `in_channels=3` and, for the ResNets, `shortcut_padding="after"`. The others get the
    keyword arguments as they are. Weights are random unless those ask for pre-trained ones (`weights="DEFAULT"` for
    torchvision, `pretrained=True` for timm); a segmentation model's backbone is random by default, too.

    >>> create_model("resnet20", num_classes=100).linear
    Linear(in_features=64, out_features=100, bias=True)
    >>> create_model("torchvision:resnet18", num_classes=3).fc
    Linear(in_features=512, out_features=3, bias=True)
    >>> create_model("resnet65")
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: no model is named 'resnet65'. Did you mean resnet56? Known: resnet8, resnet14, resnet20,
    resnet32, resnet44, resnet56, resnet110, resnet1202, vgg16, torchvision:NAME, timm:NAME
    """
    if not isinstance(name, str):
        raise AsfpError(f"a model is asked for by its name, got {name!r}: e.g. create_model('resnet56')")
    library, colon, rest = name.partition(":")
    if not colon:
        return _build(name, _ours(name), kwargs)
    if library == "torchvision":
        return _build(name, _torchvision(rest), kwargs)
    if library == "timm":
        return _build(name, _timm(rest), kwargs)
    raise AsfpError(
        f"{name!r} names the library {library!r}: use torchvision:NAME, timm:NAME or one of {', '.join(MODELS)}"
    )


def _ours(name: str) -> Callable[..., nn.Module]:
    if name in MODELS:
        return MODELS[name]
    if name in _torchvision_names():
        hint = f' torchvision has one: create_model("torchvision:{name}").'
    else:
        hint = nearest(name, MODELS, n=1)
    if os.path.isfile(name):  # noqa: PTH113  (False, and no error, for what is too long for a path)
        hint = " It is a file: what asfp saved ends in .safetensors; weights alone need asfp compact FILE --model NAME."
    known = ", ".join([*MODELS, "torchvision:NAME", "timm:NAME"])
    raise AsfpError(f"no model is named {name!r}.{hint} Known: {known}")


def _torchvision_names() -> list[str]:
    try:
        from torchvision import models
    except ImportError:
        return []
    return list(models.list_models())


def _torchvision(name: str) -> Callable[..., nn.Module]:
    known = _torchvision_names()
    if not known:
        raise AsfpError(f"torchvision:{name} needs torchvision, which is not installed: pip install torchvision")
    if name not in known:
        raise AsfpError(f"torchvision has no model named {name!r}.{nearest(name, known)}")
    from torchvision import models

    builder: Callable[..., nn.Module] = models.get_model_builder(name)
    if "weights_backbone" in inspect.signature(builder).parameters:  # would be downloaded even with weights=None
        return partial(builder, weights=None, weights_backbone=None)
    return partial(builder, weights=None)


def _timm(name: str) -> Callable[..., nn.Module]:
    try:
        import timm
    except ImportError as error:
        raise AsfpError(f"timm:{name} needs timm, which is not installed: pip install asfp[timm]") from error
    # "hf-hub:owner/name" and "local-dir:path" are addresses, which only timm can resolve
    if ":" not in name and not timm.is_model(name):
        raise AsfpError(f"timm has no model named {name!r}.{nearest(name, timm.list_models())}")
    return partial(timm.create_model, name)


def _build(name: str, builder: Callable[..., nn.Module], kwargs: Mapping[str, Any]) -> nn.Module:
    try:
        model = builder(**kwargs)
        model.created_as = (name, dict(kwargs))  # type: ignore[assignment]  # so that a saved file can say how
        return model
    except AsfpError:
        raise
    except (TypeError, ValueError, LookupError, RuntimeError, AssertionError, AttributeError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
        raise AsfpError(f"{name} cannot be built with ({given}): {error}") from error
