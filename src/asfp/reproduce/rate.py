"""The figure of the schedule: no runs, only Eq. 7."""

from __future__ import annotations

from asfp.reproduce.show import Sheet
from asfp.schedule import AsymptoticSchedule

GOAL, EPOCHS, D = 0.3, 200, 1 / 8
SAMPLES = (0, 1, 5, 10, 15, 20, 25, 30, 40, 60, 80, 100, 150, 200)


def schedule() -> AsymptoticSchedule:
    """The paper's example: 30 % in the end, three quarters of it after an eighth of the epochs.

    >>> round(schedule()(25), 4), schedule()(200)
    (0.225, 0.3)
    """
    return AsymptoticSchedule(GOAL, EPOCHS, d=D)


def rate_sheet() -> Sheet:
    """The rate after some epochs, with SFP's beside it.

    >>> rate_sheet().rows[1]
    ('1', '1.62', '30.00')
    """
    curve = schedule()
    rows = tuple((f"{epoch}", f"{100 * curve(epoch):.2f}", f"{100 * GOAL:.2f}") for epoch in SAMPLES)
    notes = (
        f"rate(e) = a exp(-k e) + b with a = {curve.a:.6f}, k = {curve.k:.6f}, b = {curve.b:.6f}: "
        f"0 at epoch 0, {75 * GOAL:g} % at epoch {D * EPOCHS:g}, {100 * GOAL:g} % at epoch {EPOCHS}.",
    )
    return Sheet("Percent of the filters pruned after each epoch", ("epoch", "ASFP", "SFP"), rows, notes)
