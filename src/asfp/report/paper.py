"""What the paper printed, as reference points: Tables I and II, accuracy in percent after pruning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Printed:
    """One row of the paper's tables; `deviation` is 0 where none was printed, `cut` 0 for the dense network."""

    method: str
    rate: float
    pretrained: bool
    cut: float
    accuracy: float
    deviation: float = 0.0


TABLES: dict[tuple[str, str], tuple[Printed, ...]] = {
    ("cifar10", "resnet56"): (
        Printed("none", 0.0, False, 0.0, 93.59, 0.58),
        Printed("sfp", 0.4, False, 52.6, 92.26, 0.31),
        Printed("asfp", 0.4, False, 52.6, 92.44, 0.07),
        Printed("sfp", 0.4, True, 52.6, 93.35, 0.31),
        Printed("asfp", 0.4, True, 52.6, 93.12, 0.20),
    ),
    ("cifar10", "resnet110"): (
        Printed("none", 0.0, False, 0.0, 93.68, 0.32),
        Printed("sfp", 0.4, False, 52.3, 92.62, 0.60),
        Printed("asfp", 0.2, False, 28.2, 93.94, 0.56),
        Printed("asfp", 0.4, False, 52.3, 93.20, 0.10),
        Printed("sfp", 0.3, True, 40.8, 93.86, 0.21),
        Printed("sfp", 0.4, True, 52.3, 92.90, 0.18),
        Printed("asfp", 0.3, True, 40.8, 93.37, 0.12),
        Printed("asfp", 0.4, True, 52.3, 93.10, 0.06),
    ),
    ("imagefolder", "resnet18"): (
        Printed("none", 0.0, False, 0.0, 70.23, 0.06),
        Printed("sfp", 0.3, False, 41.8, 67.25, 0.13),
        Printed("asfp", 0.3, False, 41.8, 67.41),
        Printed("sfp", 0.3, True, 41.8, 60.79),
        Printed("asfp", 0.3, True, 41.8, 68.02),
    ),
    ("imagefolder", "resnet34"): (
        Printed("none", 0.0, False, 0.0, 73.92),
        Printed("sfp", 0.3, False, 41.1, 71.83),
        Printed("asfp", 0.3, False, 41.1, 71.72),
        Printed("sfp", 0.3, True, 41.1, 72.29),
        Printed("asfp", 0.3, True, 41.1, 72.53),
    ),
    ("imagefolder", "resnet50"): (
        Printed("none", 0.0, False, 0.0, 76.15),
        Printed("sfp", 0.3, False, 41.8, 74.61),
        Printed("asfp", 0.3, False, 41.8, 74.88),
        Printed("sfp", 0.3, True, 41.8, 62.14),
        Printed("asfp", 0.3, True, 41.8, 75.53),
    ),
}
"""By data set and network. An `imagefolder` is ImageNet only if it has a thousand classes."""


def printed(data: str, model: str, classes: int | None = None) -> tuple[Printed, ...]:
    """The paper's rows for a network on a data set; none where it has not run it.

    >>> [row.accuracy for row in printed("cifar10", "resnet56") if row.method == "asfp"]
    [92.44, 93.12]
    >>> printed("imagefolder", "torchvision:resnet50", classes=10)
    ()
    """
    if data == "imagefolder" and classes != 1000:
        return ()
    return TABLES.get((data, model.removeprefix("torchvision:")), ())
