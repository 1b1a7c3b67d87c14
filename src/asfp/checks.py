"""What a pruner may be given: each check returns the value, or says what is allowed and how to fix it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from asfp.errors import AsfpError, nearest
from asfp.schedule import check_rate

Schedule = Callable[[int], float]
"""epoch -> rate."""

SELECTIONS = {
    "independent": "each layer by itself, as in the paper",
    "nested": "the layers that write a residual stream by one common order of its channels",
    "coupled": "all that write a residual stream the same channels, so that the stream gets narrower",
}


def check_flag(name: str, value: object) -> bool:
    """`value`, when it is a bool.

    >>> check_flag("zero_maps", True)
    True
    """
    if not isinstance(value, bool):
        raise AsfpError(f"{name}={value!r} is not a choice: it must be True or False, e.g. {name}=True")
    return value


def check_selection(value: object) -> str:
    """`value`, when it is the name of a selection.

    >>> check_selection("nested")
    'nested'
    """
    if not isinstance(value, str) or value not in SELECTIONS:
        known = ", ".join(f'"{name}" ({what})' for name, what in SELECTIONS.items())
        raise AsfpError(f"selection={value!r} is unknown: use one of {known}.{nearest(str(value), SELECTIONS)}")
    return value


def check_align(value: object) -> int:
    """`value`, when it is a number of filters to round to.

    >>> check_align(16)
    16
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
        raise AsfpError(
            f"align={value!r} is not a number of filters: it must be an int of at least 1, e.g. align=16 to keep "
            "multiples of 16"
        )
    return int(value)


def check_epoch(value: object, epochs: int) -> int:
    """`value` as an int, when it is an epoch of the run.

    >>> check_epoch(3, epochs=200)
    3
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) <= epochs:
        raise AsfpError(
            f"epoch={value!r} is not an epoch of this run: it must be an int in 0..{epochs}; "
            "1 is after the first epoch, 0 before training"
        )
    return int(value)


def check_scheduled(schedule: Schedule, epoch: int) -> float:
    """schedule(epoch), when that is a rate.

    >>> check_scheduled(lambda epoch: epoch / 100, 20)
    0.2
    """
    rate: object = schedule(epoch)
    if isinstance(rate, Tensor) and rate.numel() == 1:
        rate = rate.item()
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real) or not 0.0 <= float(rate) < 1.0:
        raise AsfpError(
            f"schedule({epoch}) gave {rate!r}, which is not a rate: it must be a number of at least 0 and below 1"
        )
    return float(rate)


def schedule_goal(schedule: Schedule, epochs: int) -> float:
    """The rate that the schedule ends with.

    >>> schedule_goal(lambda epoch: 0.3, epochs=10)
    0.3
    """
    goal = check_scheduled(schedule, epochs)
    if goal == 0.0:
        raise AsfpError(f"schedule({epochs}) is 0, so nothing would be pruned: it must end above 0, e.g. with 0.4")
    return goal


def check_goal(rate: object, schedule: object, epochs: int, mapped: bool) -> float | None:
    """The rate to prune to: the one given, or else the schedule's; None where a mapping gives each layer its own.

    >>> check_goal(None, lambda epoch: 0.3, epochs=10, mapped=False)
    0.3
    """
    if schedule is not None and not callable(schedule):
        raise AsfpError(
            f"schedule={schedule!r} is not a schedule: it must be a callable epoch -> rate, "
            "e.g. asfp.ConstantSchedule(0.4), or None for asfp.AsymptoticSchedule(rate, epochs)"
        )
    planned = getattr(schedule, "epochs", epochs)
    if planned != epochs:
        raise AsfpError(f"epochs={epochs} and schedule.epochs={planned} differ: give both the same number of epochs")
    if rate is not None:
        return check_rate("rate", rate)
    if schedule is not None:
        return schedule_goal(schedule, epochs)
    if not mapped:
        raise AsfpError(
            "rate=None leaves open how much to prune: pass the share of filters, e.g. rate=0.4, or a schedule, "
            "or layers as a mapping name -> rate"
        )
    return None


def check_streams(value: object, mapped: bool, name: str = "streams") -> float | None:
    """The rate of residual streams, when it is None or a number from 0 to below 1 and the layers have no own rates.

    >>> check_streams(0.5, mapped=False)
    0.5
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0.0 <= float(value) < 1.0:
        raise AsfpError(
            f"{name}={value!r} is not a rate: it must be at least 0 (streams keep their width) and below 1, e.g. 0.5"
        )
    if mapped:
        raise AsfpError(
            f"{name}={value!r} does not go with layers that have rates of their own: give those that write a stream "
            "theirs among them, or leave one of the two out"
        )
    return float(value)


def checked_state(state: object, settings: Mapping[str, Any], filters: Mapping[str, int]) -> dict[str, Tensor]:
    """The masks of a pruner's state, when it comes from a pruner with these settings on layers of these sizes.

    >>> checked_state({"settings": {"epochs": 3}, "masks": {}}, {"epochs": 3}, {"conv": 8})
    {}
    """
    known = isinstance(state, Mapping) and set(state) == {"settings", "masks"} and state["settings"]
    if not isinstance(state, Mapping) or not isinstance(known, Mapping):
        raise AsfpError("this is not the state of a pruner: pass what pruner.state_dict() gave")
    known = {"align": 1, **known}  # states from before there was a choice
    for key, own in settings.items():
        if not _same(known.get(key), own):
            raise AsfpError(
                f"the state was saved with {key}={known.get(key)!r}, this pruner has {key}={own!r}: "
                "make the pruner with the same arguments and model"
            )
    masks = dict(state["masks"])
    for name, mask in masks.items():
        if name not in filters or mask.dtype != torch.bool or mask.shape != (filters[name],):
            raise AsfpError(
                f"the state's mask of {name!r}, {mask.dtype} of shape {tuple(mask.shape)}, does not fit the model: "
                "it must come from the same model"
            )
    if masks and masks.keys() != filters.keys():
        raise AsfpError(f"the state has no mask for {sorted(filters.keys() - masks.keys())}: use the same model")
    return masks


def _same(saved: object, own: object) -> bool:
    if isinstance(own, list) and isinstance(saved, list):
        return len(own) == len(saved) and all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(own, saved, strict=True))
    return saved == own
