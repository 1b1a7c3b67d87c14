"""What `asfp.compact` promises beyond equality: a plain, trainable, exportable module, and a plan that can be kept."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import assert_equal, conv_macs, zero_filters
from torch import Tensor, fx, nn
from torch.nn.utils import prune

import asfp
from asfp.compaction import CompactModule, apply
from asfp.compaction.layers import BorderBias

DEPTHS = (20, 32, 56, 110)


def soft_pruned(name: str, rate: float, *, zero_maps: bool = False) -> nn.Module:
    """A network as soft pruning leaves it, with batch norm statistics as training leaves them."""
    torch.manual_seed(0)
    model = zero_filters(asfp.create_model(name), rate=0)
    asfp.SoftPruner(model, rate, epochs=1, zero_maps=zero_maps).step(1)
    return model.eval()


def integer_macs(depth: int, rate: float) -> int:
    """The notes' real integer model: kept = ceil, blocks read the whole stream, the first one what conv1 leaves."""

    def kept(n: int) -> int:
        return n - math.floor(n * rate + 1e-9)

    total, size, stream = 3 * kept(16) * 9 * 32 * 32, 32, kept(16)
    for width in (16, 32, 64):
        for block in range((depth - 2) // 6):
            if width > 16 and block == 0:
                size //= 2
            total += 9 * size * size * kept(width) * (stream + kept(width))
            stream = width
    return total


def written_macs(model: nn.Module, depth: int) -> int:
    """Where fewer comes from: a block reads only the stream channels that something before it has written."""
    alive = {n: m.weight.flatten(1).any(1) for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    total, size, stream = 3 * int(alive["conv1"].sum()) * 9 * 32 * 32, 32, alive["conv1"]
    for stage, width in enumerate((16, 32, 64), 1):
        for block in range((depth - 2) // 6):
            if width > 16 and block == 0:
                size //= 2
                stream = torch.cat([stream, torch.zeros(width - len(stream), dtype=torch.bool)])
            first, second = (alive[f"layer{stage}.{block}.conv{i}"] for i in (1, 2))
            total += 9 * size * size * int(first.sum()) * (int(stream.sum()) + int(second.sum()))
            stream = stream | second
    return total


@pytest.fixture(scope="module")
def resnet20() -> tuple[nn.Module, CompactModule]:
    model = soft_pruned("resnet20", 0.4)
    return model, asfp.compact(model, torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.3, 0.4])
@pytest.mark.parametrize("depth", DEPTHS)
def test_macs_are_those_of_the_integer_model_or_fewer(depth: int, rate: float) -> None:
    model, x = soft_pruned(f"resnet{depth}", rate), torch.randn(2, 3, 32, 32)
    small = asfp.compact(model, x, check=False)
    macs = conv_macs(small, x)
    assert macs <= integer_macs(depth, rate)
    assert macs == written_macs(model, depth)
    dense = conv_macs(model, x)
    assert conv_macs(small, x) == sum(layer.macs_after for layer in small.plan.layers if layer.kind == "Conv2d")
    assert dense == sum(layer.macs_before for layer in small.plan.layers if layer.kind == "Conv2d")


@pytest.mark.parametrize(
    ("depth", "rate", "cut"),
    [(56, 0.1, 12.28), (56, 0.2, 26.77), (56, 0.3, 38.05), (56, 0.4, 50.41), (110, 0.3, 37.81), (110, 0.4, 50.11)],
)
def test_the_integer_model_is_the_notes(depth: int, rate: float, cut: float) -> None:
    assert 100 * (1 - integer_macs(depth, rate) / integer_macs(depth, 0)) == pytest.approx(cut, abs=0.005)


def test_zero_constants_cost_nothing() -> None:
    model = soft_pruned("resnet20", 0.4, zero_maps=True)
    small = asfp.compact(model, torch.randn(1, 3, 32, 32))
    assert small.plan.folded == ()
    assert not any(isinstance(m, BorderBias) for m in small.modules())
    assert all(m.bias is None for m in small.modules() if isinstance(m, nn.Conv2d))


def test_the_original_is_left_alone(resnet20: tuple[nn.Module, CompactModule]) -> None:
    model = soft_pruned("resnet20", 0.4).train()
    model.bn1.eval()  # type: ignore[union-attr]
    before = copy.deepcopy(model.state_dict())
    modes = {name: m.training for name, m in model.named_modules()}
    small = asfp.compact(model, torch.randn(2, 3, 32, 32))
    assert small.training  # a model in training mode is handled, and the result is in the same mode
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert modes == {name: m.training for name, m in model.named_modules()}
    with torch.no_grad():
        assert not any(p.data_ptr() == q.data_ptr() for p in small.parameters() for q in model.parameters())


def test_names_follow_the_original(resnet20: tuple[nn.Module, CompactModule]) -> None:
    model, small = resnet20
    ours, theirs = small.state_dict(), model.state_dict()
    new = {name for name in ours if name not in theirs}
    assert all(name.endswith((".bias", "_border.integral", "_wide.index", "_wide.fill", "_pick.index")) for name in new)
    assert set(theirs) <= set(ours)
    assert ours["layer1.0.conv1.weight"].shape[0] == 10


def test_it_is_an_ordinary_module(resnet20: tuple[nn.Module, CompactModule]) -> None:
    model, small = resnet20
    x = torch.randn(2, 3, 32, 32)
    assert isinstance(small, fx.GraphModule)
    twin = copy.deepcopy(small)
    assert torch.equal(twin(x), small(x))
    assert twin.plan == small.plan
    assert_equal(model, twin, (1, 3, 40, 24))
    assert twin.half().conv1.weight.dtype == torch.float16  # type: ignore[union-attr]


def test_compile_and_export(resnet20: tuple[nn.Module, CompactModule]) -> None:
    _, small = resnet20
    small = copy.deepcopy(small).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = small(x)
        compiled = torch.compile(small, backend="aot_eager")
        assert torch.allclose(compiled(x), expected, atol=1e-5)
        batch = torch.export.Dim("batch", min=2)
        exported = torch.export.export(small, (x,), dynamic_shapes=({0: batch},)).module()
        y = torch.randn(5, 3, 32, 32)
        assert torch.allclose(exported(y), small(y), atol=1e-5)


def test_fine_tuning_works(resnet20: tuple[nn.Module, CompactModule]) -> None:
    small = copy.deepcopy(resnet20[1]).train()
    torch.manual_seed(1)
    x, y = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))
    mean = small.get_submodule("layer2.0.bn1").running_mean.clone()  # type: ignore[operator, union-attr]
    optimizer = torch.optim.SGD(small.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(small(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert not torch.equal(mean, small.get_submodule("layer2.0.bn1").running_mean)  # type: ignore[arg-type]


def test_compacting_twice_changes_nothing_more(resnet20: tuple[nn.Module, CompactModule]) -> None:
    _, small = resnet20
    again = asfp.compact(small, torch.randn(2, 3, 32, 32))
    assert again.plan.macs_after == small.plan.macs_after
    assert again.plan.barriers == ()


def test_a_compact_model_can_be_pruned_and_compacted_again() -> None:
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    first = asfp.compact(soft_pruned("resnet20", 0.4, zero_maps=True).double(), x)
    asfp.SoftPruner(first, 0.3, epochs=1, zero_maps=True).step(1)
    second = asfp.compact(first, x)
    assert second.plan.macs_after < 0.7 * first.plan.macs_after
    assert second.plan.barriers == ()
    assert_equal(first, second, (2, 3, 24, 40))


def test_plan_goes_to_json_and_back_and_rebuilds(resnet20: tuple[nn.Module, CompactModule]) -> None:
    model, small = resnet20
    plan = asfp.Plan.from_json(small.plan.to_json())
    assert plan == small.plan
    again = apply(plan, model)
    x = torch.randn(3, 3, 32, 32)
    assert torch.equal(again.eval()(x), small.eval()(x))
    blank = apply(plan, asfp.create_model("resnet20"))
    blank.load_state_dict(small.state_dict())
    assert torch.equal(blank.eval()(x), small(x))
    with pytest.raises(asfp.AsfpError, match="another architecture"):
        apply(plan, asfp.create_model("resnet32"))
    with pytest.raises(asfp.AsfpError, match="not a compaction plan"):
        asfp.Plan.from_json('{"format": 1, "model": 3}')
    with pytest.raises(asfp.AsfpError, match="not a compaction plan"):
        asfp.Plan.from_json("[]")


def test_plan_prints(resnet20: tuple[nn.Module, CompactModule]) -> None:
    text = str(resnet20[1].plan)
    assert "layer1.0.conv1" in text
    assert "16 -> 10" in text
    assert "border" in text
    assert "gather" in text


class Branch(nn.Module):
    def __init__(self, *, zero_norm: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Conv2d(8, 4, 3, padding=1)
        nn.init.zeros_(self.conv.weight)
        if not zero_norm:
            nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.norm(self.conv(x)))


@pytest.mark.parametrize("zero_norm", [True, False])
def test_a_constant_branch_becomes_its_shortcut(zero_norm: bool) -> None:
    model = Branch(zero_norm=zero_norm).double().eval()
    small = asfp.compact(model, torch.randn(1, 3, 6, 6, dtype=torch.float64))
    assert not any(name.startswith(("conv", "norm")) for name, _ in small.named_modules())
    assert [x.out_after for x in small.plan.layers if x.name == "conv"] == [0]
    assert_equal(model, small, (2, 3, 9, 4))


def test_a_constant_network_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    model = asfp.create_model("resnet20").eval()
    zero_filters(model, 1.0)
    small = asfp.compact(model, torch.randn(1, 3, 32, 32))
    assert small.plan.constant_outputs == 10
    assert "no longer depend on the input" in str(small.plan)
    assert_equal(model, small, (4, 3, 32, 32))


def test_borders_are_exact_for_every_size_and_stride() -> None:
    g = torch.Generator().manual_seed(0)
    for k, stride, padding, dilation, size in [
        (3, 1, 1, 1, 5),
        (3, 2, 1, 1, 6),
        (5, 1, 2, 1, 2),
        (3, 1, 2, 2, 3),
        (4, 3, 2, 1, 7),
    ]:
        model = nn.Sequential(
            nn.Conv2d(2, 6, 1), nn.Sigmoid(), nn.Conv2d(6, 3, k, stride, padding, dilation, bias=False)
        )  # fmt: skip
        with torch.no_grad():
            model[0].weight[::2] = 0  # type: ignore[index]
        model.double().eval()
        small = asfp.compact(model, torch.randn(1, 2, size, size, generator=g, dtype=torch.float64))
        assert small.plan.corrections == 1
        assert [f.additions for f in small.plan.folded] == [model(torch.zeros(1, 2, size, size).double()).numel()]
        assert_equal(model, small, *((1, 2, h, w) for h in range(size, size + 5) for w in (size, size + 3)))


def test_prefix_sets_are_added_with_padding() -> None:
    model = Branch(zero_norm=True).double().eval()
    nn.init.normal_(model.conv.weight)
    with torch.no_grad():
        model.conv.weight[5:] = 0
    small = asfp.compact(model, torch.randn(1, 3, 6, 6, dtype=torch.float64))
    assert list(small.plan.layouts.values()) == ["pad"]
    assert_equal(model, small, (2, 3, 9, 9))


def test_equal_sets_are_added_plainly() -> None:
    model = Branch(zero_norm=True).double().eval()
    nn.init.normal_(model.conv.weight)
    with torch.no_grad():
        model.conv.weight[::2] = 0
        model.stem.weight[::2] = 0
        model.stem.bias[::2] = 0  # type: ignore[index]
    small = asfp.compact(model, torch.randn(1, 3, 6, 6, dtype=torch.float64))
    assert list(small.plan.layouts.values()) == ["plain"]
    assert small.head.in_channels == 4  # type: ignore[union-attr]


def test_what_ln_structured_zeroed_compacts_too() -> None:
    model = asfp.create_model("resnet20").eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            prune.ln_structured(module, "weight", amount=0.5, n=2, dim=0)
            prune.remove(module, "weight")
    small = asfp.compact(model, torch.randn(1, 3, 32, 32))
    assert small.plan.macs_after < 0.5 * small.plan.macs_before


def test_pruning_still_attached_is_a_barrier_not_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    prune.ln_structured(model[0], "weight", amount=0.5, n=2, dim=0)
    small = asfp.compact(model, torch.randn(1, 3, 8, 8))
    assert "hooks" in small.plan.barriers[0].reason


def test_the_self_check_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = soft_pruned("resnet20", 0.4)
    right = BorderBias.contribution
    monkeypatch.setattr(BorderBias, "contribution", lambda self, y, x: right(self, y, x) * 1.5)
    with pytest.raises(asfp.VerificationError, match=r"NOT equal.*first at layer1_0_conv1"):
        asfp.compact(model, torch.randn(1, 3, 32, 32))


def test_the_self_check_names_the_layer_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = soft_pruned("resnet20", 0.4)
    monkeypatch.setattr(BorderBias, "contribution", lambda self, y, x: y.new_zeros(7, 7, 7))
    with pytest.raises(
        asfp.VerificationError,
        match=r"the compact model does not run on inputs of shape \(1, 3, 32, 32\): RuntimeError: .* at layer1_0_conv1",
    ):
        asfp.compact(model, torch.randn(1, 3, 32, 32))


def test_verify_says_what_does_not_run_or_fit() -> None:
    x = torch.randn(1, 3, 8, 8)
    good, other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 5, 3)
    with pytest.raises(asfp.VerificationError, match="the original model does not run"):
        asfp.verify(nn.Conv2d(4, 4, 3), good, x)
    with pytest.raises(asfp.AsfpError, match=r"got Tensor: asfp.verify\(model, compact, example_inputs\)"):
        asfp.verify(good, x, other)  # type: ignore[arg-type]

    class Halved(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).half()

    for compact, said in (
        (nn.Conv2d(4, 4, 3), r"the compact model does not run on inputs.*expected input"),
        (other, r"differ in shape: \(1, 4, 6, 6\) and \(1, 5, 6, 6\)$"),
        (Halved(3, 4, 3), r"differ in type: float32 and float16; torch.autocast"),
    ):
        found = asfp.verify(good, compact, x)
        assert (found.ok, found.max_abs_diff, found.relative) == (False, math.inf, math.inf)
        assert re.search(said, str(found))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:UserWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_models_that_keep_a_computed_weight_can_be_measured_and_compacted(norm: Any) -> None:
    model = nn.Sequential(norm(nn.Conv2d(3, 8, 3)), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1))
    x = torch.randn(1, 3, 8, 8)
    model(x)
    with torch.no_grad():
        model[2].weight[:2] = 0
    small = asfp.compact(model, x)
    assert asfp.verify(model, copy.deepcopy(small), x).ok
    assert asfp.measure(model, x).macs_conv == small.plan.macs_before


def test_verify_says_how_far_apart(resnet20: tuple[nn.Module, CompactModule]) -> None:
    model, small = resnet20
    x = torch.randn(2, 3, 32, 32)
    good = asfp.verify(model, small, x)
    assert good.ok
    assert good.cases == 3
    other = copy.deepcopy(small)
    with torch.no_grad():
        other.linear.bias += 1  # type: ignore[union-attr, operator]
    bad = asfp.verify(model, other, x)
    assert not bad.ok
    assert bad.max_abs_diff == pytest.approx(1, abs=1e-4)
    assert "NOT equal" in str(bad)


@pytest.mark.parametrize("call", [asfp.compact, asfp.measure, lambda m, x: asfp.verify(m, m, x)])
def test_an_example_without_a_sample_compares_nothing_and_is_refused(call: Any) -> None:
    with pytest.raises(asfp.AsfpError, match="the example has no sample in it"):
        call(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)), torch.zeros(0, 3, 8, 8))
