"""Which models train by the kernels of `stage`, and their pass through them: CIFAR ResNets on a CUDA GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from asfp.models.cifar_resnet import BasicBlock, CifarResNet, PaddedShortcut
from asfp.train.cuda.geometry import WIDTHS, Geometry, launcher
from asfp.train.cuda.runtime import Launcher, nvrtc
from asfp.train.stage import Stage


class FusedResNet:
    """model(x) under bfloat16 autocast, its stages by `Stage`; parameters, buffers and the mode are the model's own."""

    def __init__(self, model: CifarResNet, kernels: Callable[[int, int, int], Launcher] = launcher) -> None:
        self.model = model
        self.stages = []
        for stage in (model.layer1, model.layer2, model.layer3):
            blocks: list[BasicBlock] = list(stage)  # type: ignore[arg-type]
            convs = [conv for block in blocks for conv in (block.conv1, block.conv2)]
            norms = [norm for block in blocks for norm in (block.bn1, block.bn2)]
            whole = stage is model.layer1
            self.stages.append(Stage(convs if whole else convs[1:], [model.bn1, *norms] if whole else norms, kernels))

    def __call__(self, x: Tensor) -> Tensor:
        model, (first, *others) = self.model, self.stages
        x = first(model.conv1(x), None)
        for stage, layers in zip(others, (model.layer2, model.layer3), strict=True):
            block: BasicBlock = layers[0]  # type: ignore[assignment]
            x = stage(block.conv1(x), block.shortcut(x))
        return model.linear(model.avgpool(x).flatten(1))


def fused_forward(model: nn.Module, shape: tuple[int, ...]) -> FusedResNet | None:
    """The model's pass by the kernels, or None where they are not for it or for its device.

    >>> fused_forward(CifarResNet(20), (3, 32, 32)) is None  # not on a GPU
    True
    """
    if not isinstance(model, CifarResNet) or not _can_run(model.linear.weight.device, shape) or not fits(model, shape):
        return None
    try:
        for size in _sizes(shape):
            launcher(*size)
    except (RuntimeError, OSError) as error:
        warnings.warn(f"training without fused blocks, which is slower: {error}", stacklevel=2)
        return None
    return FusedResNet(model)


def _can_run(device: torch.device, shape: tuple[int, ...]) -> bool:
    """Whether this is the current GPU, multiplies bfloat16, has a compiler and shared memory enough."""
    if device.type != "cuda" or device.index not in (None, torch.cuda.current_device()) or nvrtc() is None:
        return False
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 << 10)
    return torch.cuda.get_device_capability(device) >= (8, 0) and all(
        Geometry(*size).weight_bytes <= room for size in _sizes(shape)
    )


def _sizes(shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Channels, height and width of each stage's maps."""
    return [(width, shape[1] >> i, shape[2] >> i) for i, width in enumerate(WIDTHS)]


def fits(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether the kernels are for this model: a CIFAR ResNet as it was built, on images of a size that tiles divide.

    >>> model = CifarResNet(20).to(memory_format=torch.channels_last)
    >>> fits(model, (3, 32, 32)), fits(model, (3, 30, 30)), fits(nn.Sequential(model), (3, 32, 32))
    (True, False, False)
    """
    if type(model) is not CifarResNet:
        return False
    if any(side % 4 for side in shape[1:]) or not all(Geometry(*size).fits for size in _sizes(shape)):
        return False
    norms = [module for name, module in model.named_modules() if "bn" in name]
    if any(type(n) is not nn.BatchNorm2d or not n.affine or not n.track_running_stats for n in norms):
        return False
    if len({(norm.momentum, norm.eps) for norm in norms}) > 1 or norms[0].momentum is None:
        return False
    stages = (model.layer1, model.layer2, model.layer3)
    return all(map(_usual, (block for stage in stages for block in stage))) and not any(map(_hooked, model.modules()))


def _usual(block: nn.Module) -> bool:
    """A basic block whose layers are as it was built with, its weights float32 in channels-last memory."""
    if type(block) is not BasicBlock or type(block.shortcut) not in (nn.Identity, PaddedShortcut):
        return False
    for i, conv in enumerate((block.conv1, block.conv2)):
        strides = ((1, 1), (2, 2)) if i == 0 and conv.in_channels != conv.out_channels else ((1, 1),)
        usual = type(conv) is nn.Conv2d and conv.bias is None and conv.padding_mode == "zeros" and conv.groups == 1
        same = (conv.kernel_size, conv.padding, conv.dilation) == ((3, 3), (1, 1), (1, 1)) and conv.stride in strides
        last = conv.weight.dtype is torch.float32 and conv.weight.is_contiguous(memory_format=torch.channels_last)
        if not usual or not same or not last:
            return False
    return block.conv1.out_channels == block.conv2.in_channels == block.conv2.out_channels


def _hooked(module: nn.Module) -> bool:
    """Whether something looks on, or changes what a module gives: the kernels would pass it by."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)
