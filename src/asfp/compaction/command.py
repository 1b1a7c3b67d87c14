"""`asfp compact`: a checkpoint in, a compact artifact out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from asfp.artifact import save
from asfp.compaction import compact, verify
from asfp.errors import AsfpError
from asfp.models import create_model
from asfp.sources import input_shape, resize
from asfp.weights import load_weights


def compact_checkpoint(
    checkpoint: Path,
    output: Path,
    model: str,
    *,
    size: str | None = None,
    layout: str = "least",
    tune: str | None = None,
    table: bool = False,
    **options: Any,
) -> str:
    """Build `model` with `options`, load the checkpoint, compact, verify, save to `output`; the report for people.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> net = create_model("resnet8")
    >>> _ = net.conv1.weight.data[:4].zero_()
    >>> torch.save(net.state_dict(), folder / "model.pt")
    >>> print(compact_checkpoint(folder / "model.pt", folder / "small.safetensors", "resnet8"))
    CifarResNet: 12,239,488 MACs -> 11,539,072 (-5.72 %)...
    """
    if output.suffix != ".safetensors":
        raise AsfpError(
            f"--output {str(output)!r}: a compact model is a .safetensors file, e.g. {output.stem}.safetensors"
        )
    if not output.parent.is_dir():
        raise AsfpError(f"--output {str(output)!r}: there is no folder {str(output.parent)!r}; make it first")
    dense = create_model(model, **options).eval()
    load_weights(dense, checkpoint)
    example = torch.zeros(resize(input_shape(model, dense), size))
    small = compact(dense, example, layout=layout, tune=tune)
    found = verify(dense, small, example)
    save(small, output, model=model, **options)
    before, after = (sum(p.numel() for p in m.parameters()) for m in (dense, small))
    return "\n".join(
        [
            str(small.plan) if table else small.plan.summary(),
            f"  parameters: {before:,} -> {after:,}",
            f"  {found}",
            f"written to {output} ({output.stat().st_size / 1024:.0f} KiB)",
        ]
    )
