"""Table IV: multiply-adds and time saved, from the records of benchmarks/speedup.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asfp.errors import AsfpError
from asfp.reproduce.show import Sheet

PAPER: dict[str, tuple[str, float, float, float, float]] = {
    "resnet18": ("ResNet-18", 37.10, 26.97, 27.4, 41.8),
    "resnet34": ("ResNet-34", 63.97, 45.14, 29.4, 41.1),
    "resnet50": ("ResNet-50", 135.01, 94.66, 29.8, 41.8),
}
"""Name, milliseconds dense and pruned, percent of time saved, of multiply-adds saved; GTX 1080 (Ti), batch 64."""

ENGINES = {
    "torch": "PyTorch",
    "compile": "torch.compile",
    "fused": "fused kernels",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
}
HEADS = (
    *("network", "device", "engine", "batch", "dense, ms", "compact, ms", "time saved", "95 % interval"),
    *("paper: time saved", "MACs saved, paper's count", "MACs saved, compact model", "paper: MACs saved"),
)


def speedup_sheet(results: Path) -> Sheet:
    """One row for each network, device, engine and batch in `results`/speedup.

    >>> speedup_sheet(Path("nowhere")).notes[0]
    'Nothing recorded yet: python benchmarks/speedup.py'
    """
    rows = [row for path in sorted((results / "speedup").glob("*.json")) for row in _rows(path)]
    notes = ["The paper: one GTX 1080 (Ti), batch 64. Weights are random; every compact network has constants to fold."]
    if any(row[6].endswith("*") for row in rows):
        notes.append("A star: too noisy to conclude.")
    if not rows:
        notes = ["Nothing recorded yet: python benchmarks/speedup.py"]
        rows = [(name, "-", "-", "-", "-", "-", "not yet run", "-", f"{time:.1f}", "-", "-", f"{macs:.1f}")
                for name, _, _, time, macs in PAPER.values()]  # fmt: skip
    return Sheet("Table IV: saved by pruning 30 % of the filters, in percent", HEADS, tuple(rows), tuple(notes))


def _rows(path: Path) -> list[tuple[str, ...]]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        device = {"cpu": record["environment"]["cpu"], "cuda": record["environment"].get("gpu", "GPU")}
        return [
            _row(name, dense, small, device, record["models"][name]["measure"]["cut_paper_percent"])
            for name in PAPER
            if name in record["models"]
            for dense, small in _pairs(record["models"][name]["bench"])
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise AsfpError(
            f"{path} is not a record of benchmarks/speedup.py ({error!r}): remove it, or make it again"
        ) from error


def _pairs(bench: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each pruned model with the dense one that it was timed beside."""
    dense = {(row["engine"], row["batch"], row["device"]): row for row in bench if "@" not in row["model"]}
    return [(dense[row["engine"], row["batch"], row["device"]], row) for row in bench if "@" in row["model"]]


def _row(
    name: str, dense: dict[str, Any], small: dict[str, Any], devices: dict[str, str], cut: float
) -> tuple[str, ...]:
    title, _, _, time, macs = PAPER[name]
    low, high = small["time_saved_interval"]
    threads = f", {small['threads']} threads" if small["device"] == "cpu" else ""
    return (
        title,
        f"{devices[small['device']]}{threads}, {small['precision']}",
        ENGINES.get(small["engine"], str(small["engine"])),
        f"{small['batch']}",
        f"{dense['latency_ms']:.2f}",
        f"{small['latency_ms']:.2f}",
        f"{small['time_saved_percent']:.1f}" + (" *" if small["doubt"] else ""),
        f"{low:.1f} to {high:.1f}",
        f"{time:.1f}",
        f"{cut:.1f}",
        f"{small['macs_saved_percent']:.1f}",
        f"{macs:.1f}",
    )
