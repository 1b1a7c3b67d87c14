"""The paper's Table IV on this machine: MACs saved, and time saved by engine, for networks pruned by 30 %.

Every network and its compact twin are timed in one interleaved run. Weights are random, with a shift in every batch
norm, so that every compact network has constants to fold. Prints the table and writes it, with the record of all runs,
into a folder.

    python benchmarks/speedup.py                                        # CPU: torch, ONNX Runtime, OpenVINO; batch 1
    python benchmarks/speedup.py --device cuda --batch 64               # GPU: torch
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import asfp
from asfp.bench import Row, Setting, bench, environment
from asfp.reproduce.speedup import ENGINES

PAPER = {"resnet18": (41.8, 27.4), "resnet34": (41.1, 29.4), "resnet50": (41.8, 29.8)}
"""Table IV: theoretical and realistic speed-up in percent, GTX 1080, batch 64."""


def saved(row: Row) -> str:
    assert row.time_saved is not None
    middle, low, high = (100 * share for share in row.time_saved)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})" + (" *" if row.doubt else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="resnet18, resnet34, resnet50; may be repeated")
    parser.add_argument("--rate", type=float, default=0.3)
    parser.add_argument("--engine", action="append", choices=ENGINES)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--layout", help="of residual additions [auto on a CPU, zeros on a GPU]")
    parser.add_argument("--output", type=Path, default=Path("results/speedup"))
    options = parser.parse_args()
    layout = options.layout or ("zeros" if options.device == "cuda" else "auto")
    engines = options.engine or (["torch"] if options.device == "cuda" else ["torch", "onnxruntime", "openvino"])
    settings = [
        Setting(engine, options.batch, options.device, options.precision, options.channels_last, options.threads)
        for engine in engines
    ]
    lines = [
        "| | paper: MACs | paper: time | MACs, paper's count | MACs, compact model | "
        + " | ".join(f"time, {ENGINES[engine]}" for engine in engines)
        + " |",
        "|---" * (5 + len(engines)) + "|",
    ]
    arguments = [a for a in sys.argv[1:] if not a.startswith("--output") and a != str(options.output)]
    record: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/speedup.py", *arguments]),
        "layout": layout,
        "environment": environment(),
        "load_average_before": os.getloadavg()[0],
        "models": {},
    }
    for short in options.model or list(PAPER):
        name = f"torchvision:{short}"
        found = asfp.measure(asfp.create_model(name), torch.zeros(1, 3, 224, 224), rate=options.rate)
        assert found.pruned is not None
        pruned = f"{name}@{options.rate}:{layout}"
        done = bench([name, pruned], settings, repeats=options.repeats, warmup=10, progress=show)
        print("\r" + " " * 79, end="\r", file=sys.stderr)
        print(done, flush=True)
        record["models"][short] = {"measure": found.to_dict(), "bench": done.to_dict()["rows"]}
        paper = PAPER.get(short, ("", ""))
        cells = [short.replace("resnet", "ResNet-"), *(str(x) for x in paper)]
        theoretical = found.cut_percent(found.pruned.macs_paper), 100 * (done.rows[1].macs_saved or 0.0)
        cells += [f"{percent:.2f}" for percent in theoretical]
        lines.append("| " + " | ".join(cells + [saved(row) for row in done.rows[1::2]]) + " |")
    record["load_average_after"] = os.getloadavg()[0]
    options.output.mkdir(parents=True, exist_ok=True)
    stem = f"{options.device}-batch{options.batch}-{options.precision}" + "-nhwc" * options.channels_last
    (options.output / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.output / f"{stem}.md").write_text(page(lines, record, options))
    print("\n".join(lines))


def page(lines: list[str], record: dict[str, Any], options: argparse.Namespace) -> str:
    where = ", ".join(f"{name} {value}" for name, value in record["environment"].items())
    load = f"{record['load_average_before']:.1f} before and {record['load_average_after']:.1f} after"
    return (
        f"# Saved by pruning {100 * options.rate:g} % of the filters, in percent\n\n"
        + "\n".join(lines)
        + f"\n\nBatch {options.batch}, {options.precision}, {options.threads} threads, {options.repeats} interleaved "
        f"runs of each; median of the pairs and its 95 % interval.\n"
        f"A star: too noisy to conclude. The paper's times are a GTX 1080's at batch 64.\n\n"
        f"{where}. Load average {load}.\n\n    {record['command']}\n"
    )


def show(message: str, share: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{100 * share:3.0f} % {message:70}", end="", file=sys.stderr)


if __name__ == "__main__":
    main()
