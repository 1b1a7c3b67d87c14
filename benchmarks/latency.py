"""Time of the compact models behind `asfp reproduce fig-selection`, beside the unpruned network.

    python benchmarks/latency.py                                    # CPU: ONNX Runtime and OpenVINO
    python benchmarks/latency.py --device cuda --batch 1024 --precision bf16 --channels-last
    python benchmarks/latency.py runs/resnet56-seed0 runs/resnet56-asfp-seed0 runs/resnet56-asfp-*-seed0

Without arguments every choice of the figure is made of the unpruned weights under results/weights, pruned in one step:
time depends on which filters are zero and which of them leave constants, hardly on how the others were trained. With
arguments, each a run folder with its config.toml and model.pt, the first one the unpruned network's, trained ones are
timed. All are timed in one interleaved run.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path

import torch
from torch import nn

import asfp
from asfp.bench import Setting, bench_models
from asfp.reproduce.records import kept_weights
from asfp.reproduce.selection import CHOICES, FIG_SELECTION, Choice
from asfp.train.config import load_config
from asfp.weights import load_weights


def compact_of(folder: Path, example: torch.Tensor, layout: str) -> nn.Module:
    config = load_config(folder / "config.toml", ())
    model = asfp.create_model(config.model.name, **config.model.options)
    load_weights(model, folder / "model.pt")
    return asfp.compact(model.eval(), example, layout=layout).eval()


def pruned_at_once(dense: nn.Module, choice: Choice, example: torch.Tensor, layout: str) -> nn.Module:
    model = copy.deepcopy(dense)
    asfp.SoftPruner(
        model, choice.rate, 1, selection=choice.selection, streams=choice.streams, align=choice.align,
        example_inputs=example,
    ).step(1)  # fmt: skip
    return asfp.compact(model, example, layout=layout).eval()


def all_at_once(weights: Path, example: torch.Tensor, layout: str) -> dict[str, nn.Module]:
    dense = asfp.create_model("resnet56").eval()
    load_weights(dense, weights)
    models = {FIG_SELECTION.rows[0].run.name(0): asfp.compact(dense, example, layout=layout).eval()}
    return models | {choice.run.name(0): pruned_at_once(dense, choice, example, layout) for choice in CHOICES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", help="folders of trained networks [none: pruned in one step]")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where weights/ is")
    parser.add_argument("--engine", action="append", help="may be repeated [onnxruntime and openvino, fused on a GPU]")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--layout", help="[least on a CPU, whose files are laid out anew, zeros on a GPU]")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("results/latency"))
    options = parser.parse_args()
    gpu = options.device == "cuda"
    engines = options.engine or (["fused"] if gpu else ["onnxruntime", "openvino"])
    settings = [Setting(e, options.batch, options.device, options.precision, options.channels_last) for e in engines]
    example = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    layout = options.layout or ("zeros" if gpu else "least")
    weights = kept_weights(options.results, FIG_SELECTION.rows[0].run.name(0))
    models = {folder.name: compact_of(folder, example, layout) for folder in options.runs}
    models = models or all_at_once(weights, example, layout)
    done = bench_models(models, example, settings, repeats=options.repeats)
    print(done)
    arguments = [a for a in sys.argv[1:] if not a.startswith("--output") and a != str(options.output)]
    record = {
        "command": " ".join(["python", "benchmarks/latency.py", *arguments]),
        "layout": layout,
        "trained": bool(options.runs),
        **done.to_dict(),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{options.device}-batch{options.batch}-{options.precision}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
