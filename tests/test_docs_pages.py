"""The documentation: its Python and its commands run, recipes and links exist, the site builds strictly."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import asfp
from asfp.cli import app

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^( *)```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHORTER = ["epochs=2", "model.name=resnet8", "data.size=8", "data.batch=64", "engine.progress=none"]
"""What is put behind `asfp train` here: the same command, on a smaller network for two epochs."""


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Language, title and content of each fenced block."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = []
    for indent, language, title, content in BLOCK.findall(text):
        found.append((language, title, re.sub(f"^{indent}", "", content, flags=re.MULTILINE)))
    return found


def commands(content: str) -> list[list[str]]:
    lines = content.replace("\\\n", " ").splitlines()
    return [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if line.strip()]


def a_training_loop() -> dict[str, Any]:
    """What a reader already has: a model, a number of epochs, and a way to train for one of them."""
    model = asfp.create_model("resnet8")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(8, 3, 8, 8), torch.arange(8)

    def train_one_epoch(trained: nn.Module) -> None:
        trained.train()
        optimiser.zero_grad()
        nn.functional.cross_entropy(trained(images), labels).backward()
        optimiser.step()

    return {"model": model, "epochs": 3, "train_one_epoch": train_one_epoch, "example_inputs": images[:1]}


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one, so that DistributedDataParallel can be made."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def run_page(page: str, folder: Path, timings: bool = True) -> int:
    """Run all blocks of a page in order, in `folder`, with or without what times models; how many did something."""
    names, count = a_training_loop(), 0
    for language, title, content in blocks(page):
        if title:
            (folder / title).write_text(content)
        elif language == "python":
            exec(compile(content, f"docs/{page}", "exec"), names)
            count += 1
        elif language == "console":
            for command in commands(content):
                assert command[0] == "asfp", f"{page}: {command} is not an asfp command; use `sh` for others"
                if not timings and {"bench", "--bench"} & set(command):
                    continue
                more = SHORTER if command[1] == "train" else []
                done = CliRunner().invoke(app, [*command[1:], *more])
                assert done.exit_code == 0, f"{' '.join(command)}\n{done.output}\n{done.exception!r}"
                count += 1
    return count


FAST = [p for p in PAGES if p not in ("start.md", "report.md", "distributed.md")]


@pytest.mark.parametrize("page", FAST)
def test_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    count = run_page(page, tmp_path, timings=False)
    expected = any(language in ("python", "console") for language, _, _ in blocks(page))
    assert (count > 0) == expected


@pytest.mark.slow
def test_snippets_that_time_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page("choosing.md", tmp_path) > run_page("choosing.md", tmp_path, timings=False)


def test_snippets_of_a_distributed_run(tmp_path: Path, one_process: None) -> None:
    assert run_page("distributed.md", tmp_path) == 1


@pytest.mark.parametrize("timings", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_start_here_and_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timings: bool) -> None:
    for package in ("plotly", "onnxruntime", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'asfp[onnx,report]'")
    monkeypatch.chdir(tmp_path)
    at_12 = [setting for setting in SHORTER if setting != "data.size=8"]  # what the page's code goes on with
    monkeypatch.setattr(f"{__name__}.SHORTER", at_12)
    assert run_page("start.md", tmp_path, timings) == 8 + timings
    assert (tmp_path / "report.html").stat().st_size > 4_000_000
    assert (tmp_path / "compact.onnx").exists()
    assert run_page("report.md", tmp_path, timings) == 3 + timings  # on the runs of the page before
    assert (tmp_path / "figures" / "accuracy.svg").exists()
    assert (tmp_path / "runs" / "digits-seed0" / "bench.json").exists() == timings


def _asfp_command(words: list[str]) -> list[str] | None:
    """The words behind `asfp` or `-m asfp`."""
    if words[:1] == ["asfp"]:
        return words[1:]
    for i in range(len(words) - 1):
        if words[i : i + 2] == ["-m", "asfp"]:
            return words[i + 2 :]
    return None


@pytest.mark.parametrize("page", PAGES)
def test_commands_for_other_machines_are_real(page: str) -> None:
    """What cannot be run here names commands and options that exist, and recipes that can be read."""
    from asfp.train import load_config

    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    for language, _, content in blocks(page):
        if language != "sh":
            continue
        for words in commands(content):
            called = _asfp_command(words)
            if called is None:
                assert words[0] in ("git", "pip", "tensorboard", "make", "python"), f"{page}: {words}"
                continue
            command = group.commands[called[0]]  # type: ignore[attr-defined]
            known = {option for parameter in command.params for option in parameter.opts}
            assert {w.partition("=")[0] for w in called[1:] if w.startswith("-")} <= known
            if called[0] == "train":
                load_config(ROOT / called[1], called[2:])


@pytest.mark.parametrize("page", PAGES)
def test_links_go_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target and not target.startswith("#"):
            assert (ROOT / "docs" / target.partition("#")[0]).exists(), f"docs/{page} links to {target}"


def test_every_page_is_reached_from_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2].partition("theme:")[0]
    assert sorted(re.findall(r"[\w-]+\.md", menu)) == PAGES


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    own = {"AsfpError", "TraceError", "VerificationError"}  # by their module
    types = {"Measurement", "Plan", "Verification", "__version__"}  # what functions return
    assert {name for name in asfp.__all__ if f"::: asfp.{name}" not in text} <= own | types


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'asfp[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "site" / "hooks.py").exists()
    reference = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    for name in ("SoftPruner", "compact", "AsymptoticSchedule", "rate_for_macs", "PruningConfig"):
        assert f"{name}</" in reference or f"{name}(" in reference, name
    for page in (tmp_path / "site").glob("*.html"):  # nothing is fetched from elsewhere
        outside = re.findall(
            r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?:[^\" >]+)", page.read_text(encoding="utf-8")
        )
        assert [url for url in outside if "canonical" not in url] == []
