"""Runs of a plan as processes of their own, up to a budget: at its end all are asked to write a checkpoint and stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asfp.errors import AsfpError
from asfp.reproduce.plan import Planned
from asfp.reproduce.records import collect, read_record
from asfp.train.journal import METRICS
from asfp.train.record import RECORD
from asfp.train.stopping import stop_signals

LOG = "train.log"
GRACE_S = 120.0  # for the checkpoint; a process that is still there after it is killed
POLL_S = 0.2
TELL_EVERY_S = 60.0
STOPPED = (130, -signal.SIGTERM, 128 + signal.SIGTERM)

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}


def parse_budget(text: str) -> float:
    """Seconds of "25m", "90s", "1h30m".

    >>> parse_budget("25m"), parse_budget("1h30m"), parse_budget("1.5h")
    (1500.0, 5400.0, 5400.0)
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text.strip().lower():
        raise AsfpError(f"--budget {text!r} is not a time: write hours, minutes or seconds, e.g. 25m, 1h30m, 90s")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if seconds <= 0:
        raise AsfpError(f"--budget {text!r} is no time at all: write e.g. 25m, or leave it out to run everything")
    return seconds


@dataclass
class Outcome:
    """What became of a plan's queue, by the names of the runs."""

    finished: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """With the reason, from the log or of the signal that ended it."""
    left: list[str] = field(default_factory=list)
    """Not begun: the budget was spent, or what they need failed."""
    spent: bool = False
    """The budget ended it."""
    interrupted: bool = False


def check_jobs(jobs: int) -> None:
    """Refuse fewer than one run at a time.

    >>> check_jobs(2)
    """
    if jobs < 1:
        raise AsfpError(f"--jobs {jobs}: it must be at least 1")


def execute(
    queue: Sequence[Planned],
    results: Path,
    *,
    budget: float | None = None,
    jobs: int = 1,
    settings: Sequence[str] = (),
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run the queue in order, `jobs` at once, copying each record to `results`; stop all after `budget` seconds.

    A run is `asfp train` in a process of its own, with its output in train.log in the run's folder. At the budget, or
    at Ctrl-C or SIGTERM, each gets one SIGTERM: it writes a checkpoint after the step it is in, and the next call goes
    on from there. `settings` are added to every run, e.g. engine.accelerator=cpu. Where CUDA MPS shares the GPU out, a
    run that others wait for goes before the rest; the cores are shared out, unless OMP_NUM_THREADS is set.
    """
    check_jobs(jobs)
    outcome, begin, told = Outcome(), clock(), clock()
    waiting = [planned for planned in queue if planned.state not in ("done", "blocked")]
    active: list[_Process] = []
    with stop_signals(patient=True) as stop:
        try:
            while waiting or active:
                outcome.spent = not stop and budget is not None and clock() - begin >= budget
                if stop or outcome.spent:
                    break
                for process in [p for p in active if p.done()]:
                    active.remove(process)
                    process.close(outcome, results, say)
                while len(active) < jobs and (following := _next(waiting, active, outcome)) is not None:
                    waiting.remove(following)
                    needed = any(planned.needs == following.name for planned in waiting)
                    active.append(_Process(following, settings, say, needed, jobs))
                if not active:
                    break  # what is left needs a run that failed
                if clock() - told > TELL_EVERY_S:
                    told = clock()
                    say("; ".join(process.progress() for process in active))
                time.sleep(POLL_S)
        finally:
            _stop_all(active, outcome, results, say)
        outcome.interrupted = bool(stop)
        outcome.spent = outcome.spent and not stop and bool(outcome.stopped or waiting)
    outcome.left = [planned.name for planned in waiting]
    return outcome


class _Process:
    """One run: its process and its log."""

    def __init__(
        self, planned: Planned, settings: Sequence[str], say: Callable[[str], None], needed: bool, jobs: int
    ) -> None:
        self.planned, self.folder, self.begin = planned, planned.config.folder, time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log, self.killed = (self.folder / LOG).open("ab"), False
        self.log_begin = self.log.seek(0, os.SEEK_END)
        command = [sys.executable, "-m", "asfp", "train", *planned.arguments, "engine.progress=plain", *settings]
        source = Path(__file__).resolve().parents[2]
        paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
        priority = {"CUDA_MPS_CLIENT_PRIORITY": "0" if needed else "1"}  # 0: normal, 1: below
        threads = {} if jobs == 1 else {"OMP_NUM_THREADS": f"{max(1, (os.cpu_count() or 1) // jobs)}"}
        environment = threads | os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | priority
        # a session of its own: Ctrl-C reaches the runs through us, once
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=environment, start_new_session=True
        )
        resumed = planned.state == "started"
        say(f"{planned.name}: {f'going on from epoch {planned.epoch}' if resumed else 'started'}")

    def done(self) -> bool:
        return self.process.poll() is not None

    def progress(self) -> str:
        return f"{self.planned.name}: epoch {_epochs(self.folder)} of {self.planned.config.epochs}"

    def close(self, outcome: Outcome, results: Path, say: Callable[[str], None]) -> None:
        """Take down what became of the run."""
        code, name = self.process.wait(), self.planned.name
        self.log.close()
        if code == 0 and collect(self.folder, results) is not None:
            accuracy = 100 * read_record(self.folder / RECORD)["result"]["accuracy_compact"]
            say(f"{name}: {accuracy:.2f} % in {(time.monotonic() - self.begin) / 60:.1f} minutes")
            outcome.finished.append(name)
        elif code in STOPPED or self.killed:
            say(f"{name}: stopped after epoch {_epochs(self.folder)} of {self.planned.config.epochs}")
            outcome.stopped.append(name)
        else:
            with (self.folder / LOG).open("rb") as log:
                log.seek(self.log_begin)  # an earlier attempt may have failed for another reason
                outcome.failed[name] = reason(code, log.read().decode("utf-8", errors="replace"))
            say(f"{name}: failed: {outcome.failed[name]}")

    def kill(self) -> None:
        """After it was asked to stop, and did not."""
        self.killed = True
        self.process.kill()


def reason(code: int, log: str) -> str:
    """Why a process failed: the signal that ended it, or the last error in its log, or its last line.

    >>> reason(-signal.SIGKILL, "epoch 3"), reason(2, "Error: no data" + chr(10) + "left: 1 file"), reason(3, "")
    ('killed, perhaps for want of memory', 'no data', 'exit code 3')
    """
    if code < 0:
        known = {-number.value: number.name for number in signal.Signals}
        killed = code == -getattr(signal, "SIGKILL", 0)
        return "killed, perhaps for want of memory" if killed else f"ended by {known.get(code, f'signal {-code}')}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("Error: ") for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    if code == 0:
        return "it ended without a record"
    return (errors or lines or [f"exit code {code}"])[-1]


def _next(waiting: Sequence[Planned], active: Sequence[_Process], outcome: Outcome) -> Planned | None:
    """The first run whose weights are there or that needs none."""
    pending = {planned.name for planned in waiting} | {process.planned.name for process in active}
    gone = {*outcome.failed, *outcome.stopped}
    return next((p for p in waiting if not p.needs or p.needs not in pending | gone), None)


def _stop_all(active: list[_Process], outcome: Outcome, results: Path, say: Callable[[str], None]) -> None:
    running = [process for process in active if not process.done()]
    for process in running:
        process.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + GRACE_S
    for process in running:
        try:
            process.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            say(
                f"{process.planned.name}: did not stop within {GRACE_S:.0f} s and was killed; its last checkpoint stays"
            )
    for process in active:
        process.close(outcome, results, say)


def _epochs(folder: Path) -> int:
    file = folder / METRICS
    return len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0
