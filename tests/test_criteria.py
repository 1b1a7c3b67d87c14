"""Each criterion against a loop in float64 that knows nothing of tensors' layouts, stacks or norms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asfp import AsfpError
from asfp.criteria import CRITERIA, bn_scale, geometric_median, l1, l2, lp, random, resolve


def naive_norm(weight: Tensor, p: float) -> list[float]:
    scores = []
    for filter_ in weight.double():
        values = [abs(v) for v in filter_.reshape(-1).tolist()]
        scores.append(max(values) if p == math.inf else math.fsum(v**p for v in values) ** (1 / p))
    return scores


def naive_distances(weight: Tensor) -> list[float]:
    rows = [filter_.reshape(-1).tolist() for filter_ in weight.double()]
    return [math.fsum(math.dist(a, b) for b in rows) for a in rows]


def weights(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(5, 3, 3, 3), (7, 4, 1, 1), (4, 2, 3), (3, 2, 2, 2, 2), (1, 6, 1, 1), (6, 1, 5, 5)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("criterion", "p"), [(l1, 1), (l2, 2), (lp(3), 3), (lp(0.5), 0.5), (lp(math.inf), math.inf)])
def test_norms(criterion: object, p: float, dtype: torch.dtype) -> None:
    for weight in weights(dtype):
        scores = resolve(criterion)(weight)  # type: ignore[arg-type]
        assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert scores.tolist() == pytest.approx(naive_norm(weight, p), rel=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_geometric_median(dtype: torch.dtype) -> None:
    for weight in weights(dtype):
        assert geometric_median(weight).tolist() == pytest.approx(naive_distances(weight), rel=TOLERANCE[dtype])


def test_geometric_median_prefers_the_replaceable() -> None:
    weight = torch.tensor([[10.0, 0.0], [10.0, 0.1], [10.0, -0.1], [-9.0, 0.0]])
    assert geometric_median(weight).argsort().tolist() == [0, 1, 2, 3]
    assert l2(weight).argmin() == 3


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), min_size=1, max_size=6))
def test_norms_of_any_numbers(rows: list[list[float]]) -> None:
    weight = torch.tensor(rows, dtype=torch.float64)
    assert l1(weight).tolist() == pytest.approx(naive_norm(weight, 1), rel=1e-12)
    assert l2(weight).tolist() == pytest.approx(naive_norm(weight, 2), rel=1e-12)
    assert geometric_median(weight).tolist() == pytest.approx(naive_distances(weight), rel=1e-12)


@pytest.mark.parametrize("name", CRITERIA)
def test_a_stack_is_scored_as_its_layers(name: str) -> None:
    stack = torch.randn(3, 5, 4, 3, 3)
    keys = ["a", "b", "c"]
    stack = stack[:, :, 0, 0, 0] if name == "bn_scale" else stack
    together = resolve(name).stacked(stack, keys)
    alone = torch.cat([resolve(name).stacked(w[None], [key]) for w, key in zip(stack, keys, strict=True)])
    torch.testing.assert_close(together, alone)
    assert together.shape == (3, 5)


def test_channels_last_changes_nothing() -> None:
    weight = torch.randn(8, 4, 3, 3)
    for criterion in (l1, l2, geometric_median):
        torch.testing.assert_close(criterion(weight.to(memory_format=torch.channels_last)), criterion(weight))


def test_bn_scale_is_the_size_of_gamma() -> None:
    assert bn_scale(torch.tensor([-2.0, 0.5, 0.0])).tolist() == [2.0, 0.5, 0.0]


def test_random_depends_on_seed_and_key_only() -> None:
    stack = torch.randn(2, 50, 3)
    scores = random(3).stacked(stack, ["1:a", "1:b"])
    assert torch.equal(scores, random(3).stacked(-stack, ["1:a", "1:b"]))
    assert not torch.equal(scores[0], scores[1])
    assert not torch.equal(scores, random(4).stacked(stack, ["1:a", "1:b"]))
    assert not torch.equal(scores, random(3).stacked(stack, ["2:a", "2:b"]))
    state = torch.random.get_rng_state()
    random(3)(stack[0])
    assert torch.equal(state, torch.random.get_rng_state())


def test_any_callable() -> None:
    seen = []

    def smallest(weight: Tensor) -> Tensor:
        seen.append((tuple(weight.shape), weight.dtype))
        return weight.abs().flatten(1).amin(1)

    weight = torch.randn(6, 2, 3, 3, dtype=torch.bfloat16)
    torch.testing.assert_close(resolve(smallest)(weight), weight.float().abs().flatten(1).amin(1))
    assert seen == [((6, 2, 3, 3), torch.float32)]
    assert repr(resolve(smallest)).endswith("smallest")


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        ("l3", r"criterion='l3' is unknown.*l1, l2, geometric_median.*or a callable"),
        ("geometric", r"Did you mean geometric_median"),
        (2, r"criterion=2 is not a criterion.*criterion=\"l2\""),
        (lp, r"criterion=lp needs its parameter"),
        (random, r"criterion=random needs its parameter"),
    ],
)
def test_unknown_criteria(criterion: object, message: str) -> None:
    with pytest.raises(AsfpError, match=message):
        resolve(criterion)  # type: ignore[arg-type]


@pytest.mark.parametrize("result", [torch.ones(3), torch.ones(4, 1), torch.tensor(1.0), [1, 2, 3, 4], None])
def test_wrong_scores(result: object) -> None:
    with pytest.raises(AsfpError, match=r"shape \(4, 2, 3, 3\).*one score a filter.*shape \(4,\)"):
        resolve(lambda weight: result)(torch.randn(4, 2, 3, 3))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("p", [0, -1, math.nan, True, "2", None])
def test_p_is_checked(p: object) -> None:
    with pytest.raises(AsfpError, match=r"p=.*above 0.*lp\(2\)"):
        lp(p)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0.5, True, "0", None])
def test_seed_is_checked(seed: object) -> None:
    with pytest.raises(AsfpError, match=r"seed=.*int.*random\(0\)"):
        random(seed)  # type: ignore[arg-type]
