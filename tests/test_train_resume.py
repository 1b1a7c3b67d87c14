"""A run that is killed, torn, interrupted or out of space goes on and ends as if nothing had happened."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision

from asfp import AsfpError
from asfp.data import ResidentData
from asfp.train import TrainConfig, config_from, loop, train
from asfp.train.assemble import assemble, set_learning_rate, start_fabric
from asfp.train.checkpoint import (
    CURRENT,
    PREVIOUS,
    gather_ranks,
    load_checkpoint,
    read_newest,
    save_checkpoint,
    write_state,
)
from asfp.train.identity import settings
from asfp.train.journal import read_metrics
from asfp.train.norms import FILTERS
from asfp.weights import CHECKPOINT, read_weights

SETTINGS: dict[str, Any] = {
    "epochs": 4,
    "model": {"name": "resnet8"},
    "data": {"name": "digits", "size": 8, "batch": 64, "augment": "crop-flip"},
    "optimizer": {"lr": 0.05, "milestones": [2, 3]},
    "pruning": {"method": "asfp", "rate": 0.3},
    "engine": {"accelerator": "cpu", "progress": "none", "checkpoint_steps": 5},
}


@pytest.fixture(scope="module")
def processes() -> Iterator[Any]:
    """Children that have everything imported already; single-threaded, as the suite."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["asfp.train.loop", "lightning.fabric", "torch.utils.tensorboard", "sklearn.datasets"]
    )
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    yield context
    os.environ.pop("OMP_NUM_THREADS")
    if before is not None:
        os.environ["OMP_NUM_THREADS"] = before


def config_in(folder: Path, **changes: Any) -> TrainConfig:
    return config_from(SETTINGS | {"output": str(folder)} | changes)


def results(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in read_metrics(folder)]
    return rows, torch.load(folder / "model.pt", weights_only=True)


def assert_same(folder: Path, other: Path) -> None:
    (rows, weights), (other_rows, other_weights) = results(folder), results(other)
    assert rows == other_rows
    assert (folder / FILTERS).read_text() == (other / FILTERS).read_text()
    assert weights.keys() == other_weights.keys()
    assert [name for name in weights if not torch.equal(weights[name], other_weights[name])] == []


def run_child(processes: Any, config: TrainConfig, seconds: float | None = None) -> float:
    """Train in another process, killed without warning after `seconds`; returns how long it took."""
    child = processes.Process(target=train, args=(config,))
    start = time.monotonic()
    child.start()
    child.join(seconds)
    if child.is_alive():
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    elif seconds is None:
        assert child.exitcode == 0
    return time.monotonic() - start


def kill_and_compare(processes: Any, tmp_path: Path, kills: int, seed: int) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_child(processes, config_in(tmp_path / "warm", epochs=1))  # the server starts
    seconds = run_child(processes, config_in(whole))
    moments = random.Random(seed)
    for _ in range(kills):
        run_child(processes, config_in(cut), moments.uniform(0.2, 0.9) * seconds)
    run_child(processes, config_in(cut))
    assert len(results(cut)[0]) == 4
    assert_same(whole, cut)


def test_killed_three_times_it_ends_with_the_same_bits(processes: Any, tmp_path: Path) -> None:
    kill_and_compare(processes, tmp_path, kills=3, seed=1)


@pytest.mark.slow
def test_killed_twenty_times_it_ends_with_the_same_bits(processes: Any, tmp_path: Path) -> None:
    for seed in range(4):
        kill_and_compare(processes, tmp_path / str(seed), kills=5, seed=seed)


class CrashError(Exception):
    pass


def cut_off_after(monkeypatch: pytest.MonkeyPatch, config: TrainConfig, saves: int) -> None:
    """Run until so many checkpoints are written, then stop as a crash would."""
    import asfp.train.loop as loop

    real, count = loop.save_checkpoint, [0]

    def save(*arguments: Any) -> None:
        real(*arguments)
        count[0] += 1
        if count[0] == saves:
            raise CrashError

    monkeypatch.setattr(loop, "save_checkpoint", save)
    with pytest.raises(CrashError):
        train(config)
    monkeypatch.undo()


def test_within_an_epoch_and_from_a_torn_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train(config_in(tmp_path / "whole"))
    config = config_in(tmp_path / "cut")
    cut_off_after(monkeypatch, config, saves=7)  # 5, 10, 15, 20, the end, then 5 and 10 steps into the second epoch
    state = read_newest(config.folder)
    assert state is not None
    assert (state["progress"]["epoch"], state["progress"]["step"]) == (1, 10)
    newest = config.folder / CURRENT
    newest.write_bytes(newest.read_bytes()[:-100])
    state = read_newest(config.folder)  # the one before
    assert state is not None
    assert (state["progress"]["epoch"], state["progress"]["step"]) == (1, 5)
    train(config)
    assert_same(tmp_path / "whole", config.folder)


def elsewhere(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """As if this were another machine."""
    from asfp.train import record

    real = record.hardware
    monkeypatch.setattr(record, "hardware", lambda parts: real(parts) | {"device": device})


def test_the_record_says_where_each_part_was_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_in(tmp_path, epochs=3, engine=SETTINGS["engine"] | {"checkpoint_steps": 0})
    elsewhere(monkeypatch, "the first")
    cut_off_after(monkeypatch, config, saves=1)
    elsewhere(monkeypatch, "the second")
    cut_off_after(monkeypatch, config, saves=2)
    elsewhere(monkeypatch, "the third")
    record = train(config)
    assert record["hardware"]["device"] == "the second"  # which trained the last epoch
    before = [(place["from_epoch"], place["hardware"]["device"]) for place in record["trained_before_on"]]
    assert before == [(1, "the first")]
    assert record["from_epoch"] == 2
    assert record["finished_on"]["hardware"]["device"] == "the third"
    assert record["finished_on"]["versions"] == record["versions"]


def test_a_checkpoint_that_does_not_say_where_it_was_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_in(tmp_path, epochs=2, engine=SETTINGS["engine"] | {"checkpoint_steps": 0})
    cut_off_after(monkeypatch, config, saves=2)
    state = read_newest(tmp_path)
    assert state is not None
    del state["progress"]["places"]
    write_state(tmp_path, state)
    record = train(config)
    assert record["hardware"] == {"device": "not recorded"}
    assert "CPU" in record["finished_on"]["hardware"]["device"]


def test_the_scale_of_float16_losses_is_kept(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    scales = []
    for scale in (1234.0, 7.0):
        parts = assemble(config, start_fabric(config))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)  # on a CPU fabric itself has none
        parts.fabric._precision = MixedPrecision("16-mixed", "cuda", scaler)
        progress = load_checkpoint(tmp_path, settings(config), parts)
        scales.append(scaler.get_scale())
        save_checkpoint(tmp_path, settings(config), parts, progress, gather_ranks(parts, progress))
    assert scales == [1234.0, 1234.0]


def test_a_rate_that_rises_step_by_step_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rates: list[float] = []

    def counted(optimizer: torch.optim.Optimizer, rate: float) -> None:
        rates.append(rate)
        set_learning_rate(optimizer, rate)

    optimizer = {"lr": 0.05, "warmup_epochs": 2, "warmup": "ramp", "milestones": [2]}
    monkeypatch.setattr(loop, "set_learning_rate", counted)
    train(config_in(tmp_path / "whole", optimizer=optimizer))
    steps = len(rates) // 2 - 2  # and once at the start of each epoch
    rising = [0.05 * (step + 1) / (2 * steps) for step in range(2 * steps)]
    assert rates[1 : steps + 1] + rates[steps + 2 : 2 * steps + 2] == pytest.approx(rising)
    config = config_in(tmp_path / "cut", optimizer=optimizer)
    cut_off_after(monkeypatch, config, saves=2)
    train(config)
    assert_same(tmp_path / "whole", config.folder)


def test_foreign_or_all_torn_checkpoints_are_errors_not_a_new_start(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    torch.save({"model": {}}, tmp_path / CURRENT)
    with pytest.raises(AsfpError, match="is not a checkpoint of asfp train"):
        train(config)
    (tmp_path / PREVIOUS).write_bytes(b"asfp checkpoint 1 00\nnothing")
    with pytest.raises(AsfpError, match="is damaged: its digest is another one"):
        train(config)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_run_goes_on_with_another_accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_in(tmp_path)
    cut_off_after(monkeypatch, config, saves=1)
    elsewhere = replace(config, engine=replace(config.engine, accelerator="auto"))
    record = train(elsewhere)
    assert len(record["epochs"]["loss"]) == config.epochs
    assert train(config)["result"] == record["result"]  # finished, whichever asks


def test_another_config_in_the_same_folder_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_in(tmp_path)
    cut_off_after(monkeypatch, config, saves=1)
    with pytest.raises(AsfpError, match=r"holds a run with other settings \(epochs: 4 there, 5 here\)"):
        train(replace(config, epochs=5))
    with pytest.raises(AsfpError, match=r"pruning: rate 0.3 there, 0.4 here"):
        train(config_in(tmp_path, pruning={"method": "asfp", "rate": 0.4}))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_in(tmp_path, epochs=2)
    cut_off_after(monkeypatch, config, saves=5)
    (tmp_path / f"{CURRENT}.new").symlink_to("/dev/full")
    with pytest.raises(
        AsfpError, match=r"No space left on device; the last good checkpoint was written after epoch 1. Make room"
    ):
        train(config)
    train(config)
    train(config_in(tmp_path / "whole", epochs=2))
    assert_same(tmp_path / "whole", tmp_path)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_interrupt_saves_and_says_how_to_go_on(tmp_path: Path, number: int, code: int) -> None:
    recipe = tmp_path / "recipe.toml"
    config = config_in(tmp_path / "run", epochs=500, engine={"accelerator": "cpu", "progress": "plain"})
    recipe.write_text(config.to_toml())
    command = [sys.executable, "-m", "asfp", "train", str(recipe)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("epoch   2/500"):
            assert process.poll() is None
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("Stopped after epoch ")
    assert last.endswith("run the same command again to go on from there.")
    assert "Traceback" not in stderr
    state = read_newest(tmp_path / "run")
    assert state is not None
    assert state["progress"]["epoch"] >= 2


@pytest.mark.parametrize(
    ("every", "what"), [(0, "the loss is (nan|inf)"), (5, "there are weights that are not finite")]
)
def test_nan_stops_with_epoch_step_and_checkpoint(tmp_path: Path, every: int, what: str) -> None:
    engine = SETTINGS["engine"] | {"checkpoint_steps": every}
    config = config_in(tmp_path, optimizer={"lr": 999.0, "momentum": 0.99, "milestones": []}, engine=engine)
    with pytest.raises(AsfpError, match=rf"{what} in epoch 1, step \d+: training has diverged. The last good"):
        train(config)
    state = read_newest(tmp_path)
    assert state is None or all(bool(w.isfinite().all()) for w in state["model"].values())


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    config = config_in(tmp_path, epochs=1)
    record = train(config)
    before = (tmp_path / "model.pt").stat().st_mtime_ns
    assert train(config) == record
    assert (tmp_path / "model.pt").stat().st_mtime_ns == before
    with pytest.raises(AsfpError, match=r"holds a finished run with other settings .*there, .* here\)"):
        train(replace(config, seed=1))


def test_a_torn_checkpoint_does_not_take_the_place_of_the_good_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = config_in(tmp_path, epochs=1)
    for saves, step in ((2, 5), (1, 5)):  # 10 steps; torn, so again from 5, and 10; torn again
        cut_off_after(monkeypatch, config, saves)
        newest = tmp_path / CURRENT
        newest.write_bytes(newest.read_bytes()[:-100])
        state = read_newest(tmp_path)
        assert state is not None
        assert state["progress"]["step"] == step
    assert train(config)["result"]["test_images"] == 360


def test_checkpoints_of_before_go_on_with_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those hold nothing about the data, the single processes or the steps without an image."""
    train(config_in(tmp_path / "whole", epochs=2))
    config = config_in(tmp_path / "cut", epochs=2)
    cut_off_after(monkeypatch, config, saves=6)
    state = read_newest(config.folder)
    assert state is not None
    del state["ranks"], state["data"], state["progress"]["seen"]
    write_state(config.folder, state)
    train(config)
    assert_same(tmp_path / "whole", config.folder)


def test_steps_without_an_image_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = ResidentData.train_batches

    def train_batches(self: ResidentData, epoch: int, start: int = 0) -> Iterator[Any]:
        for step, (images, labels) in enumerate(real(self, epoch, start), start):
            yield (images[:0], labels[:0]) if step in (1, 7) else (images, labels)

    with pytest.MonkeyPatch.context() as data:
        data.setattr(ResidentData, "train_batches", train_batches)
        train(config_in(tmp_path / "whole", epochs=1))
        config = config_in(tmp_path / "cut", epochs=1)
        cut_off_after(monkeypatch, config, saves=1)
        train(config)
    assert_same(tmp_path / "whole", config.folder)


def test_a_checkpoint_with_other_content(tmp_path: Path) -> None:
    write_state(tmp_path, {"config": {}, "progress": {"epoch": 1}})
    with pytest.raises(AsfpError, match=r"is not a checkpoint of asfp train: it has no history, losses, model"):
        train(config_in(tmp_path))
    payload = b"nothing that torch can read"
    (tmp_path / CURRENT).write_bytes(CHECKPOINT + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
    with pytest.raises(AsfpError, match=r"is not a checkpoint of asfp train \(.* in reading it\)"):
        train(config_in(tmp_path))


def test_other_data_in_the_same_folder_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from PIL import Image

    def add(half: str, label: str, number: int) -> None:
        (tmp_path / "images" / half / label).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20)).save(tmp_path / "images" / half / label / f"{number}.png")

    for number in range(4):
        for half in ("train", "val"):
            for label in ("cat", "dog"):
                add(half, label, number)
    data = {"name": "imagefolder", "root": str(tmp_path / "images"), "batch": 4, "size": 16, "workers": 0}
    config = config_in(tmp_path / "run", data=data)
    cut_off_after(monkeypatch, config, saves=1)
    add("train", "cat", 9)
    with pytest.raises(AsfpError, match=r"holds a run on other data \(train_size: 8 there, 9 here\): set data.root to"):
        train(config)
    for half in ("train", "val"):
        add(half, "fish", 0)
    with pytest.raises(AsfpError, match=r"holds a run on other data \(classes: 2 there, 3 here\)"):
        train(config)
    state = read_newest(config.folder)
    assert state is not None
    del state["data"]
    write_state(config.folder, state)
    with pytest.raises(AsfpError, match=r"does not fit the model \(size mismatch for linear.weight"):
        train(config)


def test_a_line_that_is_torn_in_the_middle_of_filters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train(config_in(tmp_path / "whole", epochs=2))
    config = config_in(tmp_path / "cut", epochs=2)
    cut_off_after(monkeypatch, config, saves=6)
    with (config.folder / FILTERS).open("a") as file:
        file.write('{"epoch": 2, "norms": "AA\x00\x00}\n{}\n3\n')
    train(config)
    assert_same(tmp_path / "whole", config.folder)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
@pytest.mark.parametrize("name", ["metrics.jsonl", f"{FILTERS}.new", "model.pt.new", "record.json.new"])
def test_a_full_disk_anywhere_keeps_what_was_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    config = config_in(tmp_path, epochs=1)
    cut_off_after(monkeypatch, config, saves=5)
    before = (tmp_path / FILTERS).read_text()
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(
        AsfpError, match=r"No space left on device; the last good checkpoint was written after epoch 1. Make room and"
    ):
        train(config)
    assert (tmp_path / FILTERS).read_text() == before
    assert (tmp_path / "model.pt").exists() == (name == "record.json.new")
    (tmp_path / name).unlink(missing_ok=True)
    assert train(config)["result"]["test_images"] == 360


def test_a_full_disk_in_tensorboards_thread_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(self: Any, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told: list[Any] = []
    monkeypatch.setattr(RecordWriter, "write", full)
    monkeypatch.setattr(threading, "excepthook", told.append)
    with pytest.raises(AsfpError, match="No space left on device; the last good checkpoint was not written yet"):
        train(config_in(tmp_path, epochs=1))
    assert told == []


def test_divergence_names_the_step_of_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import asfp.train.loop as loop

    config = config_in(tmp_path)
    cut_off_after(monkeypatch, config, saves=1)
    monkeypatch.setattr(loop, "share_buffers", lambda parts: next(parts.model.parameters()).data.fill_(float("inf")))
    with pytest.raises(
        AsfpError,
        match=r"weights that are not finite in epoch 1, step 23: .* was written after epoch 0 and 20 steps; lower",
    ):
        train(config)


def test_a_checkpoint_as_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_in(tmp_path / "a", epochs=1)
    train(config)
    found, expected = read_weights(config.folder / CURRENT), torch.load(config.folder / "model.pt", weights_only=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    model = {"name": "resnet8", "weights": str(config.folder / CURRENT)}
    cut_off_after(monkeypatch, config_in(tmp_path / "b", model=model), saves=1)
    (config.folder / CURRENT).write_bytes((config.folder / CURRENT).read_bytes()[:-100])
    with pytest.raises(AsfpError, match=r"checkpoint.pt is damaged: its digest is another one"):
        read_weights(config.folder / CURRENT)
