"""How long an epoch takes, by the records."""

from __future__ import annotations

from collections.abc import Iterable

from asfp.reproduce.records import Record
from asfp.train.config import TrainConfig

ASSUMED_SECONDS = {"resnet20": 0.66, "resnet32": 1.0, "resnet56": 1.68, "resnet110": 3.2, "vgg16": 2.0}
"""An epoch on one H200 by itself, where no record says it. ResNet-20 and 56 were measured (2.2 and 5.6 minutes for 200
epochs), 32 and 110 lie on the line through them, VGG-16 is a guess."""

DISTILLED = 4 / 3  # a forward pass more, beside a forward and a backward one


def seconds_of(config: TrainConfig, records: Iterable[Record]) -> float:
    """An epoch of this network on one GPU: as the fastest epoch of any record of it says, or else as assumed.

    Not the mean, because runs that share a GPU are slower, each by itself.

    >>> seconds_of(TrainConfig(), [])
    1.68
    """
    measured = [
        _fastest_epoch(record)
        for record in records
        if record["config"]["model"]["name"] == config.model.name
        and not any(name in record["hardware"]["device"] for name in ("CPU", "not recorded"))
    ]
    base = min(measured, default=ASSUMED_SECONDS.get(config.model.name, ASSUMED_SECONDS["resnet56"]))
    return base * (DISTILLED if config.distill.weights else 1.0)


def _fastest_epoch(record: Record) -> float:
    """Evaluation and pruning count with the share of an epoch that they had on the whole."""
    seconds, trained = record["seconds"], record["epochs"].get("train_seconds")
    total = sum(seconds.get(phase, 0.0) for phase in ("train", "evaluate", "prune"))
    if not trained:
        return float(total / record["config"]["epochs"])
    # not the very fastest: of an epoch that was cut off, `trained` has the rest alone
    return float(sorted(trained)[len(trained) // 20] * total / seconds["train"])
