"""A run from the command line: the resolved config first, the result last."""

from __future__ import annotations

import os
from typing import Any

from asfp.train.config import TrainConfig
from asfp.train.loop import train


def run(config: TrainConfig) -> None:
    """Train, with the config printed before and the result after it, by the first process alone."""
    quiet = config.engine.progress == "none" or not first_process()
    if not quiet:
        print(config.to_toml(), flush=True)
    record = train(config)
    if not quiet:
        print(summary(record), f"record: {config.folder / 'record.json'}", sep="\n", flush=True)


def first_process() -> bool:
    """Whether this is the first of the processes of a run, by what their launcher set; true without one.

    >>> first_process()
    True
    """
    if "RANK" in os.environ:  # torchrun
        return os.environ["RANK"] == "0"
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "NODE_RANK"))


def summary(record: dict[str, Any]) -> str:
    """The result of a run in two lines.

    >>> result = {
    ...     "accuracy": 0.9277,
    ...     "accuracy_before_last_pruning": 0.9281,
    ...     "test_images": 10000,
    ...     "accuracy_compact": 0.9277,
    ...     "predictions_that_differ": 0,
    ... }
    >>> sizes = {"macs_dense": 200, "macs": 100, "max_abs_diff": 1e-6}
    >>> print(summary({"result": result, "compact": sizes, "seconds": {"train": 60.0, "median_epoch": 1.5}}))
    accuracy 92.77 % of 10,000 test images after the last pruning, 92.77 % by the compact model (0 predictions differ)
    compact model: 200 -> 100 MACs (-50.0 %), largest difference 1e-06; 1.50 s an epoch
    """
    result, sizes = record["result"], record["compact"]
    saved = 100 * (1 - sizes["macs"] / sizes["macs_dense"])
    return (
        f"accuracy {100 * result['accuracy']:.2f} % of {result['test_images']:,} test images after the last pruning, "
        f"{100 * result['accuracy_compact']:.2f} % by the compact model "
        f"({result['predictions_that_differ']} predictions differ)\n"
        f"compact model: {sizes['macs_dense']:,} -> {sizes['macs']:,} MACs (-{saved:.1f} %), "
        f"largest difference {sizes['max_abs_diff']:.3g}; {record['seconds']['median_epoch']:.2f} s an epoch"
    )
