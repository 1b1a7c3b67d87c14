"""The curves of Eq. 7: golden values, the three points, shape, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asfp import AsfpError, AsymptoticSchedule, ConstantSchedule, CubicSchedule, LinearSchedule

rates = st.floats(1e-6, 1 - 1e-6)
counts = st.integers(1, 10_000)
shares = st.floats(1e-6, 1 - 1e-6)


@st.composite
def schedules(draw: st.DrawFn) -> AsymptoticSchedule:
    goal = draw(rates)
    start = draw(st.one_of(st.just(0.0), st.just(goal), st.floats(0.0, 0.7499).map(lambda share: share * goal)))
    return AsymptoticSchedule(goal, draw(counts), start, draw(st.one_of(st.sampled_from([1 / 8, 3 / 4]), shares)))


@pytest.mark.parametrize(
    ("goal", "epochs", "a", "k", "b"),
    [
        (0.4, 200, -0.400006, 0.0554499, 0.400006),
        (0.3, 200, -0.300005, 0.0554499, 0.300005),
        (0.4, 100, -0.400006, 0.110900, 0.400006),
        (0.3, 100, -0.300005, 0.110900, 0.300005),
    ],
)
def test_golden_parameters(goal: float, epochs: int, a: float, k: float, b: float) -> None:
    schedule = AsymptoticSchedule(goal, epochs)
    assert f"{schedule.a:.6g}" == f"{a:.6g}"
    assert f"{schedule.k:.6g}" == f"{k:.6g}"
    assert f"{schedule.b:.6g}" == f"{b:.6g}"


def test_k_does_not_depend_on_the_goal() -> None:
    assert AsymptoticSchedule(0.1, 200).k == pytest.approx(AsymptoticSchedule(0.9, 200).k, rel=1e-12)


@pytest.mark.parametrize("denominator", range(7, 17))
def test_the_ablation_over_d(denominator: int) -> None:
    schedule = AsymptoticSchedule(0.4, 200, d=1 / denominator)
    assert schedule(200 / denominator) == pytest.approx(0.3, abs=1e-12)


@given(schedules())
def test_passes_its_three_points(schedule: AsymptoticSchedule) -> None:
    assert schedule(0) == schedule.start
    assert schedule(schedule.epochs) == schedule.goal
    if schedule.start < schedule.goal:
        assert abs(schedule(schedule.d * schedule.epochs) - 0.75 * schedule.goal) <= 1e-9


@given(schedules(), st.lists(st.floats(0.0, 1.0), min_size=2, max_size=20))
def test_rises_and_stays_in_range(schedule: AsymptoticSchedule, moments: list[float]) -> None:
    values = [schedule(t * schedule.epochs) for t in sorted(moments)]
    assert all(schedule.start <= value <= schedule.goal for value in values)
    assert all(later >= earlier - 1e-15 for earlier, later in itertools.pairwise(values))


@given(schedules())
def test_bends_to_one_side(schedule: AsymptoticSchedule) -> None:
    values = [schedule(schedule.epochs * i / 16) for i in range(17)]
    bends = [a - 2 * b + c for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    side = math.copysign(1.0, schedule.k) if schedule.k else 0.0
    assert all(-side * bend >= -1e-14 if side else abs(bend) < 1e-12 for bend in bends)


@given(schedules().filter(lambda s: abs(s.k * s.epochs) > 1e-3 and abs(s.k * s.epochs) < 600))
def test_the_parameters_give_the_curve(schedule: AsymptoticSchedule) -> None:
    for epoch in (0.0, 0.3 * schedule.epochs, schedule.epochs):
        value = schedule.a * math.exp(-schedule.k * epoch) + schedule.b
        assert value == pytest.approx(schedule(epoch), abs=1e-11)


def test_the_cases_of_the_table() -> None:
    assert AsymptoticSchedule(0.4, 100).k > 0
    assert AsymptoticSchedule(0.4, 100, d=0.9).k < 0
    assert AsymptoticSchedule(0.4, 100, start=0.25).k > 0
    straight = AsymptoticSchedule(0.4, 100, d=0.75)
    assert (straight.k, straight.b) == (0.0, 0.0)
    assert straight.a == pytest.approx(0.004)
    assert straight(37) == pytest.approx(0.4 * 0.37, abs=1e-12)
    constant = AsymptoticSchedule(0.4, 100, start=0.4)
    assert (constant.a, constant.k, constant.b) == (0.0, 0.0, 0.4)
    assert {constant(epoch) for epoch in range(101)} == {0.4}


@pytest.mark.parametrize("d", [1e-12, 1e-3, 0.999, 1 - 1e-9])
@pytest.mark.parametrize("start", [0.0, 0.2999999])
def test_extremes_do_not_overflow(d: float, start: float) -> None:
    schedule = AsymptoticSchedule(0.4, 10_000, start, d)
    assert all(math.isfinite(v) for v in (schedule.a, schedule.k, schedule.b, schedule(1), schedule(9_999)))


@given(rates, counts, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_linear_and_cubic(goal: float, epochs: int, share: float, t: float) -> None:
    start = share * goal
    linear, cubic = LinearSchedule(goal, epochs, start), CubicSchedule(goal, epochs, start)
    for schedule in (linear, cubic):
        assert (schedule(0), schedule(epochs)) == (start, goal)
        assert start <= schedule(t * epochs) <= goal
    assert linear(t * epochs) == pytest.approx(start + t * (goal - start), abs=1e-12)
    assert cubic(t * epochs) == pytest.approx(goal - (goal - start) * (1 - t) ** 3, abs=1e-12)


def test_constant() -> None:
    schedule = ConstantSchedule(0.3)
    assert [schedule(e) for e in (0, 1, 0.5, 10**6)] == [0.3] * 4
    assert (schedule.a, schedule.k, schedule.b) == (0.0, 0.0, 0.3)


def test_frozen_and_readable() -> None:
    schedule = AsymptoticSchedule(0.4, 200)
    assert repr(schedule) == "AsymptoticSchedule(goal=0.4, epochs=200, start=0.0, d=0.125)"
    assert schedule == AsymptoticSchedule(0.4, 200)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.goal = 0.5  # type: ignore[misc]


@pytest.mark.parametrize("goal", [0, 1, -0.1, 1.5, math.nan, math.inf, True, "0.4", None])
@pytest.mark.parametrize(
    "make",
    [
        lambda goal: AsymptoticSchedule(goal, 10),
        lambda goal: LinearSchedule(goal, 10),
        lambda goal: CubicSchedule(goal, 10),
        ConstantSchedule,
    ],
)
def test_goal_is_checked(make: Callable[[object], object], goal: object) -> None:
    with pytest.raises(AsfpError, match=r"goal=.*(between 0 and 1|finite number).*goal=0\.4"):
        make(goal)


@pytest.mark.parametrize("epochs", [0, -3, 2.5, 10.0, math.nan, True, "10", None])
@pytest.mark.parametrize("kind", [AsymptoticSchedule, LinearSchedule, CubicSchedule])
def test_epochs_are_checked(kind: Callable[[float, object], object], epochs: object) -> None:
    with pytest.raises(AsfpError, match=r"epochs=.*at least 1.*epochs=200"):
        kind(0.4, epochs)


@pytest.mark.parametrize("start", [-0.1, 0.5, math.nan, True, "0"])
@pytest.mark.parametrize("kind", [AsymptoticSchedule, LinearSchedule, CubicSchedule])
def test_start_is_checked(kind: Callable[..., object], start: object) -> None:
    with pytest.raises(AsfpError, match=r"start="):
        kind(0.4, 10, start=start)


@pytest.mark.parametrize("start", [0.3, 0.35, 0.399])
def test_no_exponential_from_three_quarters_on(start: float) -> None:
    with pytest.raises(AsfpError, match=rf"start={start} .*goal=0\.4.*3/4.*LinearSchedule"):
        AsymptoticSchedule(0.4, 10, start=start)


@pytest.mark.parametrize("d", [0, 1, -0.5, 8, math.nan, True, "1/8"])
def test_d_is_checked(d: object) -> None:
    with pytest.raises(AsfpError, match=r"d="):
        AsymptoticSchedule(0.4, 10, d=d)  # type: ignore[arg-type]


@pytest.mark.parametrize("epoch", [-1, 10.5, 11, math.nan, math.inf, True, "1", None])
@pytest.mark.parametrize("kind", [AsymptoticSchedule, LinearSchedule, CubicSchedule])
def test_epoch_is_checked(kind: Callable[[float, int], Callable[[object], float]], epoch: object) -> None:
    with pytest.raises(AsfpError, match=r"epoch="):
        kind(0.4, 10)(epoch)


@pytest.mark.parametrize("epoch", [-1, math.nan, True, "1"])
def test_constant_checks_its_epoch(epoch: object) -> None:
    with pytest.raises(AsfpError, match=r"epoch="):
        ConstantSchedule(0.4)(epoch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: AsymptoticSchedule(10**400, 200),
        lambda: AsymptoticSchedule(0.4, 10**400),
        lambda: AsymptoticSchedule(0.4, 200, start=-(10**400)),
        lambda: AsymptoticSchedule(0.4, 200, d=10**400),
        lambda: AsymptoticSchedule(0.4, 200)(10**5000),
        lambda: ConstantSchedule(0.4)(10**400),
        lambda: LinearSchedule(0.4, 10**5000),
    ],
)
def test_ints_beyond_all_floats_are_refused_like_other_numbers(make: Callable[[], object]) -> None:
    with pytest.raises(AsfpError, match=r"=\(an int of [0-9]+ bits\) is (not a|more epochs)"):
        make()


@pytest.mark.parametrize("goal", [Fraction(10**5000), Fraction(1, 10**5000), Fraction(10**5000 + 1, 10**5000)])
def test_fractions_that_python_does_not_write_out_are_refused_too(goal: Fraction) -> None:
    said = r"=\(a Fraction of too many digits\) is not"
    with pytest.raises(AsfpError, match=said):
        AsymptoticSchedule(goal, 200)  # type: ignore[arg-type]
    with pytest.raises(AsfpError, match=said):
        ConstantSchedule(goal)  # type: ignore[arg-type]
