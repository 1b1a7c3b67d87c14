"""Each example runs to its end and prunes what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(path), "--epochs", "2"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if "skipped: " in done.stdout:
        pytest.skip(done.stdout.strip())
    assert "epoch 2: rate 0." in done.stdout
    if path.stem != "huggingface_trainer":
        assert "MACs -> " in done.stdout
        right = next(line for line in done.stdout.splitlines() if "right with zeros in it" in line).split()
        assert right[0] == right[-3], done.stdout  # the compact model gets the same number right
