"""The demo's second half: cut the zero filters out, check that nothing changed, write the file to deploy."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from asfp.artifact import save
from asfp.compaction import CompactModule, Plan, Verification, compact, verify
from asfp.data import ImageData
from asfp.demo.training import MODEL, CompactResult, accuracy


def shrink(
    method: str, model: nn.Module, data: ImageData, folder: Path
) -> tuple[CompactModule, CompactResult, Plan, Verification]:
    """Compact a pruned model, verify it, test it on the same images, and save it into `folder`.

    >>> import tempfile
    >>> from asfp.data import digits
    >>> from asfp.demo.training import DemoSettings, train_method
    >>> images = digits(size=8)
    >>> model, _ = train_method("ASFP", DemoSettings(epochs=1), images)
    >>> _, result, plan, _ = shrink("ASFP", model, images, Path(tempfile.mkdtemp()))
    >>> result.compact_accuracy == result.masked_accuracy, plan.macs_after == result.compact_macs
    (True, True)
    """
    model.eval()
    example = data.test_images[:2]
    small = compact(model, example)
    found = verify(model, small, example)
    file = folder / "compact.safetensors"
    save(small, file, model=MODEL, num_classes=data.classes, in_channels=data.test_images.shape[1])
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, small))
    result = CompactResult(
        method,
        accuracy(model, data),
        accuracy(small, data),
        small.plan.macs_before,
        small.plan.macs_after,
        before,
        after,
        found.max_abs_diff,
        found.relative,
        file,
        file.stat().st_size,
    )
    return small, result, small.plan, found


def report(result: CompactResult, plan: Plan, found: Verification) -> str:
    """What compaction did, in a few lines."""
    same = "the same" if result.compact_accuracy == result.masked_accuracy else "ANOTHER"
    return (
        f"{result.method}, compacted: zero filters are cut out of the network\n"
        f"{plan.summary()}\n"
        f"  parameters: {result.masked_parameters:,} -> {result.compact_parameters:,}\n"
        f"  {found}\n"
        f"  accuracy {result.compact_accuracy:.1%}, {same} as with the zeros in\n"
        f"  written to {result.file}, {result.file_bytes / 1024:.0f} KiB: asfp.load({str(result.file)!r})"
    )
