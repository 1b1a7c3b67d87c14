"""What the demo trains and what it records of it; no output here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asfp.data import ImageData, batches
from asfp.errors import AsfpError
from asfp.models import create_model
from asfp.pruner import SoftPruner
from asfp.schedule import AsymptoticSchedule, ConstantSchedule, check_epochs, check_rate

MODEL = "resnet20"
# The paper's recipe for CIFAR-10 in a sixtieth of its steps, so the learning rate falls on a cosine to zero and the
# weight decay is ten times as large: with 5e-4, filters that grow back have no time to fade, and the last pruning costs
# 10 to 50 points of accuracy.
IMAGE_SIZE = 12
BATCH = 32
LEARNING_RATE = 0.1
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-3

Schedule = Callable[[float], float]
METHODS: dict[str, Callable[[float, int], Schedule] | None] = {
    "dense": None,
    "SFP": lambda rate, epochs: ConstantSchedule(rate),
    "ASFP": AsymptoticSchedule,
}


@dataclass(frozen=True)
class DemoSettings:
    """What a user can choose; wrong values raise before anything is trained.

    >>> DemoSettings(rate=1.5)
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: rate=1.5 is not a pruning rate: it must lie strictly between 0 and 1, e.g. rate=0.4
    """

    epochs: int = 30
    rate: float = 0.4
    seed: int = 0
    output: Path = Path("demo")

    def __post_init__(self) -> None:
        check_epochs(self.epochs)
        check_rate("rate", self.rate)
        if not 0 <= self.seed < 2**32:
            raise AsfpError(f"seed={self.seed} is not a seed: it must be an int from 0 to 2^32 - 1, e.g. seed=0")


@dataclass(frozen=True)
class EpochRecord:
    """One epoch in the paper's order: train, evaluate (`before`), prune to `rate`, evaluate again (`after`)."""

    epoch: int
    rate: float
    before: float
    after: float
    zeroed: int
    regrown: float


@dataclass(frozen=True)
class MethodResult:
    """All epochs of one method; the properties are what its row of the table shows."""

    method: str
    filters: int
    epochs: tuple[EpochRecord, ...]
    seconds: float

    @property
    def before(self) -> float:
        """The accuracy in front of the last pruning."""
        return self.epochs[-1].before

    @property
    def after(self) -> float:
        """The accuracy after the last pruning: the one to report."""
        return self.epochs[-1].after

    @property
    def zeroed(self) -> int:
        """Filters that are zero at the end."""
        return self.epochs[-1].zeroed

    @property
    def regrown(self) -> float:
        """The share of zeroed filters that were non-zero again one epoch later, averaged over the epochs."""
        shares = [e.regrown for e in self.epochs[1:]]
        return sum(shares) / len(shares) if shares else 0.0


@dataclass(frozen=True)
class CompactResult:
    """A pruned network before (`masked`: full width, full of zeros) and after compaction."""

    method: str
    masked_accuracy: float
    compact_accuracy: float
    masked_macs: int
    compact_macs: int
    masked_parameters: int
    compact_parameters: int
    max_abs_diff: float
    relative: float
    file: Path
    file_bytes: int


@dataclass(frozen=True)
class DemoResult:
    """What the demo measured, and where it wrote it."""

    settings: DemoSettings
    methods: tuple[MethodResult, ...]
    record: Path
    picture: Path
    compact: CompactResult | None = None


def train_method(
    method: str, settings: DemoSettings, data: ImageData, on_epoch: Callable[[EpochRecord], None] = lambda _: None
) -> tuple[nn.Module, MethodResult]:
    """A ResNet-20 trained on `data`, soft-pruned after each epoch as `method` says; all start and shuffle alike.

    >>> from asfp.data import digits
    >>> model, result = train_method("ASFP", DemoSettings(epochs=1), digits(size=8))
    >>> result.zeroed, result.filters
    (264, 688)
    """
    if method not in METHODS:
        raise AsfpError(f"method={method!r} is unknown: use one of {', '.join(METHODS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = create_model(MODEL, num_classes=data.classes, in_channels=data.train_images.shape[1])
    model = model.to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(
        model.parameters(), LEARNING_RATE, momentum=MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY
    )
    steps = settings.epochs * math.ceil(len(data.train_labels) / BATCH)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    order = torch.Generator().manual_seed(settings.seed)
    make_schedule = METHODS[method]
    pruner = None
    if make_schedule is not None:
        schedule = make_schedule(settings.rate, settings.epochs)
        pruner = SoftPruner(model, settings.rate, settings.epochs, schedule=schedule)

    records = []
    start = time.perf_counter()
    for epoch in range(1, settings.epochs + 1):
        _train_epoch(model, optimiser, decay, batches(data.train_images, data.train_labels, BATCH, order))
        before = accuracy(model, data)
        if pruner is None:
            record = EpochRecord(epoch, rate=0.0, before=before, after=before, zeroed=0, regrown=0.0)
        else:
            step = pruner.step(epoch)
            record = EpochRecord(epoch, step.rate, before, accuracy(model, data), step.zeroed, step.regrown)
        records.append(record)
        on_epoch(record)
    filters = sum(m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d))
    return model, MethodResult(method, filters, tuple(records), time.perf_counter() - start)


def _train_epoch(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    decay: torch.optim.lr_scheduler.LRScheduler,
    data: Iterable[tuple[Tensor, Tensor]],
) -> None:
    model.train()
    for images, labels in data:
        loss = F.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        decay.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: ImageData) -> float:
    """The share of test images whose highest logit is that of their label.

    >>> from asfp.data import digits
    >>> 0 <= accuracy(create_model(MODEL, in_channels=1), digits(size=8)) <= 1
    True
    """
    model.eval()
    return (model(data.test_images).argmax(1) == data.test_labels).float().mean().item()
