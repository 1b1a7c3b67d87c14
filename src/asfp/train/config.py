"""What a run is: frozen dataclasses, read from TOML with `key=value` on top; an unknown key is an error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asfp.checks import check_streams
from asfp.errors import AsfpError, nearest
from asfp.schedule import check_epochs, check_rate
from asfp.train.reading import build, merge, parse_override, read_tables

METHODS = ("none", "sfp", "asfp", "hard")
SELECTIONS = ("independent", "nested", "coupled")
SCHEDULES = ("auto", "constant", "asymptotic", "linear", "cubic")
DATASETS = ("cifar10", "digits", "imagefolder")
AUGMENTATIONS = ("auto", "none", "crop-flip")
WARMUPS = ("flat", "ramp")
LR_SCHEDULES = ("step", "cosine", "constant")
COMPILE = ("auto", "eager", "compile", "graph")
CORRUPT = ("fatal", "skip")
PROGRESS = ("auto", "rich", "plain", "none")
MOMENTUM = ("keep", "zero")
NORM = ("keep", "reset")
GRAPH_PRECISIONS = ("auto", "32-true", "32", "bf16-mixed", "bf16")
"""Those of a captured step, which goes around lightning.fabric: no scaled loss, no weights of another type."""


@dataclass(frozen=True)
class ModelConfig:
    """`name` as in `asfp.create_model`; `options` are its keyword arguments; `weights` a file to start from."""

    name: str = "resnet56"
    options: dict[str, Any] = field(default_factory=dict)
    weights: str = ""


@dataclass(frozen=True)
class DataConfig:
    """`batch` is the global batch of all processes together."""

    name: str = "cifar10"
    root: str = "data"
    batch: int = 128
    test_batch: int = 1000
    augment: str = "auto"
    """auto is crop-flip, for digits none. Of folders, crop-flip is a random crop, resized, and a flip."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    """Of 255, one a channel, to normalise by; empty for the data set's own."""
    size: int = 0
    """Side of the images: 0 for the data set's own (CIFAR 32, digits 16, folders 224)."""
    workers: int = 8
    download: bool = False
    corrupt: str = "fatal"

    def __post_init__(self) -> None:
        _one_of("data.name", self.name, DATASETS)
        _one_of("data.augment", self.augment, AUGMENTATIONS)
        _one_of("data.corrupt", self.corrupt, CORRUPT)
        _at_least("data.batch", self.batch, 2)
        _at_least("data.test_batch", self.test_batch, 1)
        _at_least("data.workers", self.workers, 0)
        _at_least("data.size", self.size, 0)
        if self.name == "digits" and (self.mean or self.std):
            raise AsfpError("data.mean and data.std are not for digits, which are normalised already: leave them out")
        for key in ("mean", "std"):
            values = getattr(self, key)
            if values and not (len(values) == 3 and all(0.0 <= v <= 255.0 and (v or key == "mean") for v in values)):
                raise AsfpError(
                    f"data.{key}={list(values)}: it must be 3 numbers of 255, one a channel"
                    f"{', above 0' if key == 'std' else ''}, or left out for the data set's own"
                )


@dataclass(frozen=True)
class OptimizerConfig:
    """SGD. The rate of an epoch: lr, times gamma at each milestone. In the first `warmup_epochs` it is `warmup_lr`, or
    with `warmup="ramp"` it rises from step to step, from near zero to lr."""

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    schedule: str = "step"
    milestones: tuple[int, ...] = (60, 120, 160)
    gamma: float = 0.2
    warmup_epochs: int = 0
    warmup_lr: float = 0.01
    warmup: str = "flat"

    def __post_init__(self) -> None:
        _one_of("optimizer.schedule", self.schedule, LR_SCHEDULES)
        _one_of("optimizer.warmup", self.warmup, WARMUPS)
        if self.warmup == "ramp" and self.warmup_epochs == 0:
            raise AsfpError('optimizer.warmup="ramp" needs epochs to rise in: set optimizer.warmup_epochs=5')
        for key in ("lr", "warmup_lr"):
            if not 0.0 < getattr(self, key) < 1e3:
                raise AsfpError(
                    f"optimizer.{key}={getattr(self, key)!r} is not a learning rate: use a number above 0, e.g. 0.1"
                )
        _at_least("optimizer.warmup_epochs", self.warmup_epochs, 0)
        if not 0.0 <= self.momentum < 1.0:
            raise AsfpError(f"optimizer.momentum={self.momentum}: it must be at least 0 and below 1, e.g. 0.9")
        if not 0.0 <= self.weight_decay < math.inf:
            raise AsfpError(f"optimizer.weight_decay={self.weight_decay}: it must be at least 0, e.g. 5e-4")
        if not 0.0 < self.gamma <= 1.0:
            raise AsfpError(f"optimizer.gamma={self.gamma}: it must lie above 0 and at most at 1, e.g. 0.1")
        if any(b <= a for a, b in zip((0, *self.milestones), self.milestones, strict=False)):
            raise AsfpError(f"optimizer.milestones={list(self.milestones)}: they must be epochs from 1 on, rising")
        if self.nesterov and self.momentum == 0.0:
            raise AsfpError("optimizer.nesterov=true needs momentum: set optimizer.momentum=0.9 or nesterov=false")


@dataclass(frozen=True)
class PruningConfig:
    """`method` none, sfp (constant rate), asfp (rising rate), hard (filters stay zero); the rest as `SoftPruner`."""

    method: str = "asfp"
    rate: float = 0.4
    schedule: str = "auto"
    start: float = 0.0
    d: float = 0.125
    criterion: str = "l2"
    interval: int = 1
    layers: dict[str, float] = field(default_factory=dict)
    """Rates by the convolution's name; `*` in a name stands for any part: {"layer*.conv1" = 0.3}. Empty: all."""
    zero_maps: bool = False
    selection: str = "independent"
    streams: float = -1.0
    """The rate of layers that write a residual stream with others; 0 leaves these alone, -1 is the same as `rate`."""
    align: int = 1
    momentum: str = "keep"
    """zero: at each pruning the optimiser's momentum of pruned filters is set to zero. keep: as the paper's code."""
    norm: str = "keep"
    """reset: after each pruning but the last, the batch norm behind a pruned filter restarts with the scale 1 and the
    shift `norm_shift`: above 0, so that a ReLU behind it lets gradients through to the zero filter."""
    norm_shift: float = 0.01
    soften: float = 0.0
    """Filters pruned after epoch e restart not from zero but from alpha(e) times what they were, with
    alpha(e) = soften * (1 - e / n), up to epoch n = soften_epochs (0: half of the run); from then on from zero."""
    soften_epochs: int = 0
    freeze_epochs: int = 0
    """In the last n epochs no filter is exchanged or grows back. The rate's goal is reached n epochs earlier."""

    def __post_init__(self) -> None:
        _one_of("pruning.method", self.method, METHODS)
        _one_of("pruning.selection", self.selection, SELECTIONS)
        _at_least("pruning.align", self.align, 1)
        if self.streams != -1.0:
            check_streams(self.streams, bool(self.layers), "pruning.streams")
        _one_of("pruning.momentum", self.momentum, MOMENTUM)
        _one_of("pruning.norm", self.norm, NORM)
        _at_least("pruning.soften_epochs", self.soften_epochs, 0)
        _at_least("pruning.freeze_epochs", self.freeze_epochs, 0)
        if not 0.0 <= self.soften <= 1.0:
            raise AsfpError(f"pruning.soften={self.soften}: it must lie between 0 (off) and 1")
        if self.norm == "reset" and not self.norm_shift > 0.0:
            raise AsfpError(
                f"pruning.norm_shift={self.norm_shift}: it must be above 0, e.g. 0.01, or no gradient flows"
            )
        for key in ("momentum", "norm", "soften", "freeze_epochs"):
            if self.method in ("none", "hard") and getattr(self, key) not in ("keep", 0):
                raise AsfpError(
                    f"pruning.{key}={getattr(self, key)} is for soft pruning, where filters grow back: use "
                    f"pruning.method=sfp or asfp, or leave it out with method={self.method}"
                )
        _one_of("pruning.schedule", self.schedule, SCHEDULES)
        check_rate("pruning.rate", self.rate)
        check_epochs(self.interval, "pruning.interval")


@dataclass(frozen=True)
class DistillConfig:
    """Learn from a trained network, too: loss = (1 - alpha) CE(y, z) + alpha T^2 KL(softmax(t / T) || softmax(z / T)).

    z are the logits of the network in training, t those of the teacher in evaluation mode. Off without `weights`.
    """

    weights: str = ""
    """The teacher's weights, e.g. the model.pt of a dense run."""
    model: str = ""
    """The teacher's name as in `asfp.create_model`; empty for the network that is trained."""
    alpha: float = 0.5
    temperature: float = 4.0

    def __post_init__(self) -> None:
        if self.model and not self.weights:
            raise AsfpError(f"distill.model={self.model!r} without weights teaches nothing: set distill.weights, too")
        if not 0.0 < self.alpha <= 1.0:
            raise AsfpError(f"distill.alpha={self.alpha}: it must lie above 0 and at most at 1, e.g. 0.5")
        if not 0.0 < self.temperature < 1e3:
            raise AsfpError(f"distill.temperature={self.temperature}: it must be above 0, e.g. 4")


@dataclass(frozen=True)
class EngineConfig:
    """Where and how it runs; none of it changes what is trained, beyond rounding."""

    accelerator: str = "auto"
    devices: int = 1
    nodes: int = 1
    precision: str = "auto"
    """As in lightning.fabric, e.g. "32-true", "bf16-mixed"; auto is bf16-mixed on a GPU that has it, else 32-true."""
    compile: str = "auto"
    """eager; compile: torch.compile; graph: that, or in bfloat16 the fused blocks of CIFAR ResNets, and a CUDA graph of
    the whole step. auto: graph on one GPU, in the precisions that it is for (32-true and bf16-mixed), else eager."""
    channels_last: bool = True
    sync_bn: bool = False
    deterministic: bool = False
    checkpoint_epochs: int = 1
    checkpoint_steps: int = 0
    """Also within an epoch, every so many steps; 0 for never."""
    progress: str = "auto"

    def __post_init__(self) -> None:
        _one_of("engine.compile", self.compile, COMPILE)
        if self.compile == "graph" and self.precision not in GRAPH_PRECISIONS:
            raise AsfpError(
                f"engine.compile=graph is not for engine.precision={self.precision}: use bf16-mixed or 32-true, or "
                "engine.compile=auto"
            )
        _one_of("engine.progress", self.progress, PROGRESS)
        _at_least("engine.devices", self.devices, 1)
        _at_least("engine.nodes", self.nodes, 1)
        _at_least("engine.checkpoint_epochs", self.checkpoint_epochs, 1)
        _at_least("engine.checkpoint_steps", self.checkpoint_steps, 0)


@dataclass(frozen=True)
class TrainConfig:
    """A whole run: the same config on the same machine gives the same run.

    >>> config = TrainConfig(epochs=10, pruning=PruningConfig(method="sfp", rate=0.3))
    >>> config.pruning.rate, config.folder.as_posix()
    (0.3, 'runs/run-seed0')
    """

    name: str = "run"
    output: str = ""
    seed: int = 0
    epochs: int = 200
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    pruning: PruningConfig = field(default_factory=PruningConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        check_epochs(self.epochs)
        if not 0 <= self.seed < 2**32:
            raise AsfpError(f"seed={self.seed} is not a seed: it must be an int from 0 to 2^32 - 1, e.g. seed=0")
        pruning, last = self.pruning, self.epochs - self.pruning.freeze_epochs
        if pruning.freeze_epochs >= self.epochs:
            raise AsfpError(f"pruning.freeze_epochs={pruning.freeze_epochs}: it must be less than epochs={self.epochs}")
        if pruning.freeze_epochs and last % pruning.interval:
            raise AsfpError(
                f"pruning.freeze_epochs={pruning.freeze_epochs}: the epoch before, {last}, must be one with a pruning, "
                f"a multiple of pruning.interval={pruning.interval}"
            )

    @property
    def folder(self) -> Path:
        """Where the run is written: `output`, or runs/NAME-seedN."""
        return Path(self.output) if self.output else Path("runs") / f"{self.name}-seed{self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        result: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return result

    def to_toml(self) -> str:
        """The resolved config as TOML, which `load_config` reads back to an equal one."""
        tables = self.to_dict()
        lines = [f"{key} = {_toml(value)}" for key, value in tables.items() if not isinstance(value, dict)]
        for name, table in tables.items():
            if isinstance(table, dict):
                lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
        return "\n".join(lines) + "\n"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The config of a TOML file, with `key=value` overrides on top; `base = "other.toml"` names what it builds on.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "mine.toml"
    >>> _ = file.write_text("epochs = 30" + chr(10) + "[model]" + chr(10) + 'name = "resnet20"')
    >>> config = load_config(file, ["pruning.rate=0.3", "seed=1"])
    >>> config.name, config.epochs, config.model.name, config.pruning.rate, config.seed
    ('mine', 30, 'resnet20', 0.3, 1)
    >>> load_config(file, ["prunning.rate=0.3"])
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: prunning is no setting. Did you mean pruning? Known: name, output, seed, epochs, model, data,
    optimizer, pruning, distill, engine
    """
    path = Path(path)
    tables = {"name": path.stem} | read_tables(path)
    for text in overrides:
        tables = merge(tables, parse_override(text))
    return config_from(tables)


def config_from(tables: Mapping[str, Any]) -> TrainConfig:
    """The config of nested tables, strictly: unknown keys and wrong types are errors.

    >>> config_from({"optimizer": {"lr": 1}}).optimizer.lr
    1.0
    """
    result = build(TrainConfig, tables)
    assert isinstance(result, TrainConfig)
    return result


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise AsfpError(f"{key}={value!r} is unknown: use one of {', '.join(allowed)}.{nearest(value, allowed, n=1)}")


def _at_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise AsfpError(f"{key}={value} is too small: it must be at least {least}")
