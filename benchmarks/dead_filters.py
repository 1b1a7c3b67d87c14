"""Filters of trained networks that do nothing: their norm, or the scale of the batch norm behind them, is nearly zero.

    python benchmarks/dead_filters.py runs/resnet56-seed0 runs/resnet56-seed1 runs/resnet20-seed0

Each argument is a run folder with model.pt; its record is in results/cifar10, or in `--records`. Weight decay brings
what gets no gradient down to zero, so a filter is counted as dead below 0.001; how many lie just above is counted too.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import asfp
from asfp.weights import load_weights

NEARLY_ZERO = 1e-3


def strengths(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """For each convolution, the smaller of each filter's norm and of the scale of the batch norm behind it."""
    model = asfp.create_model(name)
    load_weights(model, folder / "model.pt")
    modules = dict(model.named_modules())
    return {
        name: torch.minimum(
            conv.weight.detach().flatten(1).norm(dim=1), modules[name.replace("conv", "bn")].weight.detach().abs()
        )
        for name, conv in modules.items()
        if isinstance(conv, nn.Conv2d)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--records", type=Path, default=Path("results/cifar10"))
    parser.add_argument("--output", type=Path, default=Path("results/dead-filters.json"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for folder in options.runs:
        record = json.loads((options.records / f"{folder.name}.json").read_text(encoding="utf-8"))
        found = strengths(folder, record["config"]["model"]["name"])
        dead = {name: int((s < NEARLY_ZERO).sum()) for name, s in found.items()}
        faint = sum(int(((s >= NEARLY_ZERO) & (s < 10 * NEARLY_ZERO)).sum()) for s in found.values())
        rows.append(
            {
                "run": folder.name,
                "accuracy": record["result"]["accuracy_compact"],
                "loss_of_epoch_1": record["epochs"]["loss"][0],
                "filters": sum(map(len, found.values())),
                "dead": sum(dead.values()),
                "between_0.001_and_0.01": faint,
                "dead_by_layer": dead,
            }
        )
        print({key: value for key, value in rows[-1].items() if key != "dead_by_layer"})
    command = " ".join(["python", "benchmarks/dead_filters.py", *sys.argv[1:]])
    options.output.write_text(json.dumps({"command": command, "runs": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
