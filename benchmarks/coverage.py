"""Which networks compact, and how far: writes `docs/coverage.md`. `python benchmarks/coverage.py [--only resnet]`.

Every convolutional classifier and segmentation network of torchvision and one network of each of timm's
convolutional families: 30 % of each convolution's filters zeroed at random, batch norms with random statistics, then
`asfp.compact` in float64, compared with the original at two batch sizes and, where the network takes it, at another
image size.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import asfp
from asfp.compaction.verify import compare

TESTS = Path(__file__).parent.parent / "tests" / "compaction"
OUT = Path(__file__).parent.parent / "docs" / "coverage.md"


def row(name: str) -> str:
    """One line of the table."""
    from networks import zero_filters

    torch.manual_seed(0)
    library, _, short = name.partition(":")
    model: nn.Module
    if library == "torchvision":
        from test_zoo import make

        model = make(short)
    else:
        model = zero_filters(asfp.create_model(name)).eval()
    exact = sum(p.numel() for p in model.parameters()) < 3e8  # the largest takes too much memory in float64
    dtype = torch.float64 if exact else torch.float32
    model.to(dtype)
    size = 128 if any(k in short for k in ("inception", "nasnet", "xception", "nfnet")) else 64
    try:
        small = asfp.compact(model, torch.randn(2, 3, size, size, dtype=dtype), check=False).eval()
    except asfp.AsfpError as error:
        return f"| {name} | not compacted: {str(error)[:80]} | | | |"
    cases = [((torch.randn(n, 3, size, size, dtype=dtype),), {}) for n in (1, 3)]
    larger = torch.randn(1, 3, size + 32, size + 32, dtype=dtype)
    try:
        with torch.no_grad():
            model(larger)
        cases.append(((larger,), {}))
    except (RuntimeError, ValueError, AssertionError):
        pass  # takes one image size only
    found = compare(model, small, cases)
    plan = small.plan
    saved = 100 * (1 - plan.macs_after / max(1, plan.macs_before))
    kinds = Counter(b.operation.split(" ")[-1].strip("()") for b in plan.barriers)
    barriers = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common(4)) or "-"
    verdict = "equal" if found.ok else "**WRONG**"
    return f"| {name} | {verdict}, {found.relative:.0e} | {len(cases)} | {saved:.1f} % | {barriers} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names that contain this; the file is not written then")
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from test_zoo import TIMM, ZOO

    names = [n for n in (*(f"torchvision:{n}" for n in ZOO), *(f"timm:{n}" for n in TIMM)) if options.only in n]
    head = [
        "# Which networks compact, and how far",
        "",
        "Made by `python benchmarks/coverage.py`, which says what is done and compared. *Equal* gives the largest",
        "difference in float64 (float32 for the largest network), relative to the range of the original's output;",
        "*inputs* how many batch and image sizes were compared; *saved* the multiply-adds that went, of 30 % zero",
        "filters at random places; *barriers* the operations that keep inputs at full width. Grouped convolutions",
        "save little here: zeros at random places leave their groups uneven, and constants in front of a zero-padded",
        "grouped convolution have to stay.",
        "",
        f"torch {torch.__version__.split('+')[0]}, {len(names)} networks.",
        "",
        "| network | against the original | inputs | saved | barriers |",
        "|---|---|---|---|---|",
    ]
    rows = []
    for name in names:
        rows.append(row(name))
        print(rows[-1], flush=True)
    if not options.only:
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text("\n".join([*head, *rows]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
