"""The command line: help, version, and mistakes that end in one line and an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from asfp import __version__
from asfp.cli import app


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})


def asfp(*arguments: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asfp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **kwargs)  # type: ignore[call-overload]


def test_version_by_module_and_by_script() -> None:
    script = Path(sys.executable).with_name("asfp")
    for command in ([sys.executable, "-m", "asfp"], [str(script)]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"asfp {__version__}\n"
        assert done.stderr == ""


def test_help_names_every_command() -> None:
    done = call("--help")
    assert done.exit_code == 0
    assert "demo" in done.output
    assert "--version" in done.output


def test_no_arguments_show_the_help() -> None:
    assert "Usage: " in call().output


def test_help_of_demo_states_the_defaults() -> None:
    output = call("demo", "--help").output
    for default in ("30", "0.4", "demo"):
        assert f"default: {default}" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1.5"], "rate=1.5 is not a pruning rate: it must lie strictly between 0 and 1, e.g. rate=0.4"),
        (["--epochs", "0"], "epochs=0 is not a count of epochs"),
        (["--seed", "-3"], "seed=-3 is not a seed"),
        (["--rate", "much"], "Invalid value for '--rate'"),
        (["--speed", "9"], "No such option"),
    ],
)
def test_wrong_options_end_at_once(tmp_path: Path, arguments: list[str], message: str) -> None:
    output = tmp_path / "out"
    done = call("demo", "--output", str(output), *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert not output.exists()


def test_output_that_is_a_file_ends_before_training(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    done = asfp("demo", "--output", str(taken))
    assert done.returncode == 2
    assert done.stderr.startswith("Error: output=")
    assert "cannot be written to" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert taken.read_text() == "mine"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_one_line_and_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "demo.png").symlink_to("/dev/full")
    done = asfp("demo", "--output", str(tmp_path), "--epochs", "1")
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


INTERRUPTED_IN_EXEC = """
import os, runpy, signal, sys
import asfp.cli

def version():
    exec("os.kill(os.getpid(), signal.SIGINT)\\nwhile True: pass", {"os": os, "signal": signal})

asfp.cli.main = version
runpy.run_module("asfp", run_name="__main__")
"""


@pytest.mark.skipif(os.name == "nt", reason="interrupts are sent differently there")
def test_an_interrupt_within_exec_exits_130_too(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_IN_EXEC)
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.skipif(os.name == "nt", reason="interrupts are sent differently there")
def test_an_interrupt_exits_130_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "asfp", "demo", "--epochs", "1000", "--output", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "to test on" in line:  # training is about to begin
                break
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert stderr.strip() == "Stopped."
