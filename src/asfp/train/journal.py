"""What a run tells while it runs: metrics.jsonl, filters.jsonl, TensorBoard, and lines or a progress bar for people."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from asfp.pruner import SoftPruner
from asfp.train.config import TrainConfig
from asfp.train.norms import FilterLog

METRICS = "metrics.jsonl"
HISTOGRAMS_EVERY = 10

Row = dict[str, Any]


class Journal:
    """Open from the first epoch to the last; on every process but the first (`quiet`) it does nothing."""

    def __init__(
        self, config: TrainConfig, history: list[Row], steps: int, pruner: SoftPruner | None, quiet: bool = False
    ) -> None:
        self.config, self.steps, self.pruner, self.quiet = config, steps, pruner, quiet
        if quiet:
            return
        from torch.utils.tensorboard import SummaryWriter

        self.file = config.folder / METRICS
        self.file.write_text(
            "".join(f"{json.dumps(row)}\n" for row in history)
        )  # what a killed run had beyond is redone
        self.filters = None if pruner is None else FilterLog(config.folder, pruner, len(history))
        board = str(config.folder / "tensorboard")
        self.hook, threading.excepthook = threading.excepthook, _without_writers(threading.excepthook)
        self.board: Any = SummaryWriter(board, purge_step=len(history) + 1)
        kind = config.engine.progress
        self.bar = _Bar(config, steps) if kind == "rich" or (kind == "auto" and sys.stdout.isatty()) else None
        self.lines = self.bar is None and kind != "none"

    def say(self, text: str) -> None:
        """A line for people."""
        if self.quiet or self.config.engine.progress == "none":
            return
        if self.bar is not None:
            self.bar.console.print(text, highlight=False)
        else:
            print(text, flush=True)

    def step(self, epoch: int, step: int) -> None:
        """Step `step` of the epoch is done; shown by the bar."""
        if not self.quiet and self.bar is not None:
            self.bar.show(epoch, step)

    def epoch(self, row: Row, norms: Mapping[str, Tensor]) -> None:
        """Write the row of an epoch, and its filters' norms from before the pruning, everywhere."""
        if self.quiet:
            return
        with self.file.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")
        for key, value in row.items():
            values = value if isinstance(value, dict) else {"": value}
            for name, number in values.items():
                if key != "epoch":
                    self.board.add_scalar(f"{key}/{name}".rstrip("/"), number, row["epoch"])
        last = row["epoch"] == self.config.epochs
        if self.filters is not None and self.pruner is not None:
            self.filters.epoch(row["epoch"], norms, self.pruner.masks)
        if last or row["epoch"] % HISTOGRAMS_EVERY == 0:
            for name, norm in norms.items():
                self.board.add_histogram(f"filter norms/{name}", norm, row["epoch"])
        if self.bar is not None:
            self.bar.row = row
        elif self.lines:
            self.say(describe(row, self.config.epochs))

    def close(self) -> None:
        """Flush everything; the journal is done."""
        if self.quiet:
            return
        with suppress(OSError):  # a full disk: what stopped the run says so, and pictures alone are no reason to fail
            self.board.close()
        threading.excepthook = self.hook
        if self.bar is not None:
            self.bar.close()


def _without_writers(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Tell what a thread died of, as ever, but an OSError in TensorBoard's: the next call to it raises that again."""

    def tell(problem: Any) -> None:
        ours = type(problem.thread).__module__.startswith("tensorboard.") and issubclass(problem.exc_type, OSError)
        if not ours:
            hook(problem)

    return tell


def describe(row: Row, epochs: int) -> str:
    """One epoch in one line.

    >>> describe(
    ...     {
    ...         "epoch": 3,
    ...         "loss": 0.52,
    ...         "lr": 0.1,
    ...         "rate": 0.06,
    ...         "accuracy_before": 0.81,
    ...         "accuracy_after": 0.7905,
    ...         "zeroed": 12,
    ...         "regrown": 0.25,
    ...         "seconds": {"train": 1.6, "prune": 0.01},
    ...     },
    ...     200,
    ... )
    'epoch   3/200  loss 0.5200  lr 0.1  rate 0.0600  accuracy 81.00 -> 79.05  regrown 25.0 %  1.61 s'
    """
    text = f"epoch {row['epoch']:3d}/{epochs}  loss {row['loss']:.4f}  lr {row['lr']:g}"
    if row["zeroed"]:
        text += f"  rate {row['rate']:.4f}  accuracy {100 * row['accuracy_before']:.2f} -> "
        text += f"{100 * row['accuracy_after']:.2f}  regrown {100 * row['regrown']:.1f} %"
    else:
        text += f"  accuracy {100 * row['accuracy_after']:.2f}"
    return f"{text}  {sum(row['seconds'].values()):.2f} s"


class _Bar:
    """Epochs, steps, time left, the rate and the accuracies, on one line of a terminal."""

    def __init__(self, config: TrainConfig, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console()
        self.row: Row | None = None
        self.steps, self.shown = steps, 0.0
        columns = (TextColumn("epoch {task.fields[epoch]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, TextColumn("{task.fields[note]}"), console=self.console)
        self.task = self.progress.add_task("", total=config.epochs * steps, epoch=1, note="")
        self.progress.start()

    def show(self, epoch: int, step: int) -> None:
        if time.monotonic() - self.shown < 0.1 and step < self.steps:
            return
        self.shown = time.monotonic()
        note = ""
        if self.row is not None:
            note = f"rate {self.row['rate']:.3f}  {100 * self.row['accuracy_before']:.2f}"
            note += f" -> {100 * self.row['accuracy_after']:.2f}"
        self.progress.update(self.task, completed=(epoch - 1) * self.steps + step, epoch=epoch, note=note)

    def close(self) -> None:
        self.progress.stop()


def read_metrics(folder: Path) -> list[Row]:
    """The rows of a run's metrics.jsonl.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / METRICS).write_text('{"epoch": 1}')
    >>> read_metrics(folder)
    [{'epoch': 1}]
    """
    return [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
