"""What the paper printed, as reference points for a network: accuracy in percent after pruning."""

from __future__ import annotations

from dataclasses import dataclass

from asfp.reproduce import imagenet, tables


@dataclass(frozen=True)
class Printed:
    """One row of the paper's tables; `deviation` is 0 where none was printed, `cut` 0 for the dense network."""

    method: str
    rate: float
    pretrained: bool
    cut: float
    accuracy: float
    deviation: float = 0.0


def printed(data: str, model: str, classes: int | None = None) -> list[Printed]:
    """The paper's rows for a network on a data set; none where it has not run it, or not printed it.

    An `imagefolder` is ImageNet only if it has a thousand classes.

    >>> [row.accuracy for row in printed("cifar10", "resnet56") if row.method == "asfp"]
    [92.44, 93.12]
    >>> [row.accuracy for row in printed("imagefolder", "torchvision:resnet50", classes=1000) if row.pretrained]
    [62.14, 75.53]
    >>> printed("imagefolder", "torchvision:resnet50", classes=10)
    []
    """
    name = model.removeprefix("torchvision:")
    if data == "cifar10" and name in tables.BASELINES and tables.BASELINES[name].printed:
        found = {(start, method, rate): v for (net, start, method, rate), v in tables.PAPER.items() if net == name}
        base, cuts = tables.BASELINES[name], tables.CUTS[name]
    elif data == "imagefolder" and classes == 1000 and name in imagenet.BASELINES:
        found = {(start, method, 0.3): v[0] for (net, start, method), v in imagenet.PAPER.items() if net == name}
        base, cuts = imagenet.BASELINES[name], {0.3: imagenet.CUTS[name]}
    else:
        return []
    rows = [Printed("none", 0.0, False, 0.0, base.mean, base.deviation or 0.0)]
    for (start, method, rate), value in found.items():
        if value.printed:
            pretrained = start == "pretrained"
            rows.append(Printed(method, rate, pretrained, cuts[rate], value.mean, value.deviation or 0.0))
    return rows
