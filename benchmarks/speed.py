"""Time saved against MACs saved: by selection, alignment and layout, in one interleaved run.

    python benchmarks/speed.py                   # CPU, batch 1: ResNet-18/34/50 on ONNX Runtime and OpenVINO
    python benchmarks/speed.py --device cuda --batch 64 --engine torch
    python benchmarks/speed.py --device cuda --batch 64 --engine compile --precision bf16 --channels-last
    python benchmarks/speed.py --device cuda --batch 64 --engine fused --precision bf16 --channels-last

Rows: dense; independent, nested and coupled selection; and Torch-Pruning with its `round_to`, where it is installed.
Independent and nested are pruned by 30 %; coupled ones, which lose more MACs at the same rate, by the rate that
leaves the MACs of independent pruning, or saves `--macs`. "half streams" keeps half of each residual stream, or what
`--streams` leaves.
`best` takes the fastest engine for dense and for compact each. Weights are random. Fresh batch norms make no constants
of zero filters; with `--constants` every one does, and the compact networks pay for folding them, as `NAME@RATE` does
in `asfp bench`.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from bisect import bisect_left
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import asfp
from asfp.bench import Row, Setting, bench_models, environment
from asfp.targets import rate_for_macs

BARS = {"independent": 0.85, "nested": 0.95, "coupled": 1.0}
"""Time saved / MACs saved that we want on the CPU; the paper's own Table IV has 0.66 to 0.71."""


def ours(
    dense: nn.Module, x: Tensor, rate: float, selection: str, align: int, layout: str, streams: float | None = None
) -> asfp.CompactModule:
    model = copy.deepcopy(dense)
    asfp.SoftPruner(model, rate, 1, selection=selection, streams=streams, align=align, example_inputs=x).step(1)
    return asfp.compact(model, x, layout=layout, check=False).eval()


def narrow_streams(
    dense: nn.Module, x: Tensor, share: float, streams: float, align: int, layout: str
) -> asfp.CompactModule:
    """Coupled: `streams` of every residual stream, and of other layers the first rate that leaves `share` of the MACs.

    A stream is read and written by every block, so its width is memory traffic more than multiply-adds.
    """
    rate = rate_for_macs(dense, x, share, selection="coupled", streams=streams, align=align).rate
    return ours(dense, x, rate, "coupled", align, layout, streams=streams)


def theirs(dense: nn.Module, x: Tensor, share: float, align: int) -> tuple[str, nn.Module] | None:
    """Torch-Pruning at the first ratio in steps of 0.5 % that leaves at most this share of the MACs."""
    try:
        from importlib.metadata import version

        import torch_pruning as tp
    except ImportError:
        return None
    most = share * asfp.measure(dense, x).macs

    def pruned(step: int) -> nn.Module:
        model = copy.deepcopy(dense)
        pruner = tp.pruner.BasePruner(
            model,
            x,
            importance=tp.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=step / 200,
            ignored_layers=[m for m in model.modules() if isinstance(m, nn.Linear)],
            round_to=align,
        )
        pruner.step()
        return model.eval()

    step = bisect_left(range(20, 120), True, key=lambda step: asfp.measure(pruned(step), x).macs <= most)
    if step == 100:
        return None  # no ratio leaves so few
    return f"Torch-Pruning {version('torch-pruning')}, round_to {align}", pruned(20 + step)


def variants(name: str, options: argparse.Namespace, x: Tensor) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    dense = asfp.create_model(f"torchvision:{name}").eval()
    if options.constants:
        with torch.no_grad():
            for module in dense.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.bias.uniform_(-0.2, 0.2)
    layout = options.layout
    found: dict[str, nn.Module] = {"dense": dense}

    def wanted(name: str) -> bool:
        return not options.only or any(text in name for text in options.only)

    def add(name: str, *how: Any) -> None:
        if wanted(name):
            found[name] = ours(dense, x, *how)

    plain = ours(dense, x, options.rate, "independent", 1, "least")
    if wanted("independent, least"):
        found["independent, least"] = plain
    add("independent", options.rate, "independent", 1, layout)
    share = plain.plan.macs_after / plain.plan.macs_before if options.macs is None else 1 - options.macs
    for align in options.align:
        for selection in ("independent", "nested"):
            add(f"{selection}, align {align}", options.rate, selection, align, layout)
        if wanted(f"coupled, align {align}"):
            rate = rate_for_macs(dense, x, share, selection="coupled", align=align).rate
            add(f"coupled, align {align}", rate, "coupled", align, layout)
        narrow = "half streams" if options.streams == 0.5 else f"streams {options.streams:g}"
        if wanted(narrow := f"coupled, {narrow}, align {align}"):
            found[narrow] = narrow_streams(dense, x, share, options.streams, align, layout)
        if wanted(f"Torch-Pruning, round_to {align}") and (other := theirs(dense, x, share, align)):
            found[other[0]] = other[1]
    return found


def lines_of(name: str, rows: list[Row], engines: list[str]) -> list[str]:
    by: dict[str, dict[str, Row]] = {}
    for row in rows:
        by.setdefault(row.model, {})[row.setting.engine] = row
    fastest = {model: min(r.times.median for r in cells.values()) for model, cells in by.items()}
    lines = []
    for model, cells in by.items():
        if model == "dense":
            times = [f"{cells[e].times.median:.2f} ms" for e in engines]
            lines.append(f"| {name} | dense | | {' | '.join(times)} | {fastest[model]:.2f} ms | |")
            continue
        macs = next(iter(cells.values())).macs_saved or 0.0
        saved = 1 - fastest[model] / fastest["dense"]
        shown = [percent(cells[e]) for e in engines]
        lines.append(
            f"| {name} | {model} | {100 * macs:.1f} | {' | '.join(shown)} | {100 * saved:.1f} | {saved / macs:.2f} |"
        )
    return lines


def percent(row: Row) -> str:
    assert row.time_saved is not None
    middle, low, high = (100 * x for x in row.time_saved)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})" + (" *" if row.doubt else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="resnet18, resnet34, resnet50; may be repeated")
    parser.add_argument("--rate", type=float, default=0.3)
    parser.add_argument("--macs", type=float, help="MACs that coupled rows save at least [as many as independent]")
    parser.add_argument("--streams", type=float, default=0.5, help="the rate of residual streams in rows of their own")
    parser.add_argument("--align", type=int, action="append", help="may be repeated [32]")
    parser.add_argument("--layout", default=None, help="[auto on a CPU, zeros on a GPU]")
    parser.add_argument("--only", action="append", help="text in the names of the rows to time; may be repeated")
    parser.add_argument("--constants", action="store_true", help="batch norms with shifts, so that zero filters show")
    parser.add_argument("--engine", action="append")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("results/speed"))
    options = parser.parse_args()
    options.align = options.align or [32]
    options.layout = options.layout or ("zeros" if options.device == "cuda" else "auto")
    engines = options.engine or (["torch"] if options.device == "cuda" else ["onnxruntime", "openvino"])
    settings = [
        Setting(e, options.batch, options.device, options.precision, options.channels_last, options.threads)
        for e in engines
    ]
    head = " | ".join(f"time saved, {engine}, %" for engine in engines)
    lines = [f"| | | MACs saved, % | {head} | time saved, best, % | time / MACs |", "|---" * (5 + len(engines)) + "|"]
    arguments = [a for a in sys.argv[1:] if not a.startswith("--output") and a != str(options.output)]
    record: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/speed.py", *arguments]),
        "environment": environment(),
        "rate": options.rate,
        "layout": options.layout,
        "bars": BARS,
        "models": {},
    }
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    options.output.mkdir(parents=True, exist_ok=True)
    stem = "-".join(
        [options.device, f"batch{options.batch}", options.precision, *(engines if len(engines) == 1 else [])]
    )
    stem += "-constants" * options.constants
    for name in options.model or ["resnet18", "resnet34", "resnet50"]:
        models = variants(name, options, x)
        done = bench_models(models, x, settings, repeats=options.repeats)
        record["models"][name] = [row.to_dict() for row in done.rows]
        new = lines_of(name, list(done.rows), engines)
        lines += new
        print("\n".join(new), flush=True)
        (options.output / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (options.output / f"{stem}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"written to {options.output}/{stem}.json and .md")


if __name__ == "__main__":
    main()
