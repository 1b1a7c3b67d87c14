"""What the compaction tests share: zeroing at random, statistics that matter, and the comparison itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asfp.compaction import CompactModule
from asfp.compaction.verify import compare

NORMS = nn.modules.batchnorm._BatchNorm


def zero_filters(model: nn.Module, rate: float = 0.3, seed: int = 0) -> nn.Module:
    """Zero a share of every convolution's filters; fresh batch norms hide constants, so give them statistics."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                order = torch.randperm(module.out_channels, generator=g)
                module.weight[order[: int(module.out_channels * rate)]] = 0
            elif isinstance(module, NORMS) and module.running_mean is not None:
                n = module.num_features
                module.running_mean.copy_(torch.randn(n, generator=g) * 0.3)
                module.running_var.copy_(torch.rand(n, generator=g) + 0.5)
                if module.weight is not None:
                    module.weight.copy_(torch.rand(n, generator=g) + 0.5)
                    module.bias.copy_(torch.randn(n, generator=g) * 0.3)
    return model


def assert_equal(model: nn.Module, compact: CompactModule, *shapes: tuple[int, ...]) -> None:
    """The two agree on random inputs of these shapes, within 1e-10 (float64) or 1e-5 (float32) of the range."""
    dtype = next(model.parameters()).dtype
    cases: list[tuple[tuple[Tensor, ...], dict[str, object]]] = [((torch.randn(s, dtype=dtype),), {}) for s in shapes]
    found = compare(model.eval(), compact.eval(), cases)
    assert found.ok, str(found)


def conv_macs(module: nn.Module, x: Tensor) -> int:
    """Multiply-adds of convolutions, counted by hooks: independent of the plan's own figures."""
    total = 0

    def count(layer: nn.Module, _: object, out: Tensor) -> None:
        nonlocal total
        assert isinstance(layer, nn.Conv2d)
        total += layer.weight.numel() * out.shape[2] * out.shape[3]

    handles = [m.register_forward_hook(count) for m in module.modules() if isinstance(m, nn.Conv2d)]
    with torch.no_grad():
        module.eval()(x[:1])
    for handle in handles:
        handle.remove()
    return total
