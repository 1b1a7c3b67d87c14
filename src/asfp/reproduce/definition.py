"""What a table or figure is, as data: rows, the run behind each, and the paper's figure beside it."""

from __future__ import annotations

from dataclasses import dataclass

LAST = 13
"""The priority of what is run when all else is done."""


@dataclass(frozen=True)
class Run:
    """A recipe with changes, for any seed. `needs` is the run whose weights it starts from or learns from.

    >>> Run("cifar10/resnet56-asfp", ("pruning.rate=0.3",), "rate0.3").name(1)
    'resnet56-asfp-rate0.3-seed1'
    """

    recipe: str
    """Under recipes/, without .toml."""
    overrides: tuple[str, ...] = ()
    tag: str = ""
    """What the overrides are called in the run's name; a run without overrides has none."""
    needs: Run | None = None
    needs_for: tuple[str, ...] = ("model.weights",)
    """The settings that are given those weights."""

    @property
    def label(self) -> str:
        """The name without the seed."""
        return self.recipe.rpartition("/")[2] + (f"-{self.tag}" if self.tag else "")

    def name(self, seed: int) -> str:
        """The name of the run, of its folder and of its record."""
        return f"{self.label}-seed{seed}"


@dataclass(frozen=True)
class Value:
    """A figure of the paper in percent: mean, and deviation where it gives one.

    `printed` is False for figures that stand in the paper's source but were commented out: shown with a dagger.

    >>> print(Value(92.44, 0.07), Value(93.05, 0.19, printed=False), Value(93.5))
    92.44 ± 0.07 93.05 ± 0.19† 93.50
    """

    mean: float
    deviation: float | None = None
    printed: bool = True

    def __str__(self) -> str:
        spread = "" if self.deviation is None else f" ± {self.deviation:.2f}"
        return f"{self.mean:.2f}{spread}" + ("" if self.printed else "†")


@dataclass(frozen=True)
class Row:
    """One line: what it shows, the run behind it, and what the paper has."""

    cells: tuple[str, ...]
    run: Run
    paper: Value | None = None
    drop: float | None = None
    """The paper's accuracy drop against its own baseline."""
    cut: float | None = None
    """Percent of the multiply-adds saved by the paper's count."""
    dense: Run | None = None
    """The unpruned run that ours is compared with."""
    priority: int = 5
    """1 is run first."""
    seeds: int = 1
    """How many are planned unless the user says otherwise."""
    optional: bool = False
    """Run only when asked for by name; shown only then or once recorded."""


@dataclass(frozen=True)
class Definition:
    """A table or figure behind runs; `heads` are the names of the rows' cells."""

    name: str
    title: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    view: str = "accuracy"
    """Which columns: accuracy; short, the same without drops; gap, how far the accuracy falls at each pruning; latency,
    what was measured of the compact models."""
    picture: str = ""
    """How it is drawn, where it is a figure: a name in `pictures.PICTURES`."""


def dense(model: str) -> Run:
    """The unpruned run of a CIFAR-10 network.

    >>> dense("resnet56").name(0)
    'resnet56-seed0'
    """
    return Run(f"cifar10/{model}")


def pruned(
    model: str, method: str, rate: float = 0.4, *, start: str = "scratch", tag: str = "", changes: tuple[str, ...] = ()
) -> Run:
    """A pruned run of a CIFAR-10 ResNet; 40 % is what the recipes say, so it leaves no trace in the name.

    >>> pruned("resnet56", "asfp", 0.3, start="pretrained").name(2)
    'resnet56-asfp-pretrained-rate0.3-seed2'
    """
    trained = start == "pretrained"
    tags = ([] if rate == 0.4 else [f"rate{rate:g}"]) + ([tag] if tag else [])
    overrides = ((f"pruning.rate={rate:g}",) if rate != 0.4 else ()) + changes
    recipe = f"cifar10/{model}-{method}" + ("-pretrained" if trained else "")
    return Run(recipe, overrides, "-".join(tags), dense(model) if trained else None)
