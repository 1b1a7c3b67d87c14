"""The demo's last lines: how long a run takes, full of zeros and compact, on the engines that are installed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from asfp.bench import Bench, Setting, bench_models, engines_present


def time_engines(
    masked: nn.Module, small: nn.Module, example: Tensor, engines: Sequence[str] | None = None, batch: int = 64
) -> Bench:
    """Both models side by side on one thread; by default on each engine but torch.compile, which takes minutes.

    >>> import torch
    >>> done = time_engines(nn.Conv2d(1, 16, 3), nn.Conv2d(1, 8, 3), torch.zeros(1, 1, 8, 8), ["torch"])
    >>> [row.model for row in done.rows[:2]]
    ['masked', 'compact']
    """
    chosen = [engine for engine in engines_present() if engine != "compile"] if engines is None else engines
    settings = [Setting(engine, batch, threads=1) for engine in chosen]
    return bench_models({"masked": masked, "compact": small}, example, settings, repeats=20)


def latency_lines(done: Bench) -> str:
    """One line for each engine, and where to look further if the small network is not the faster one.

    >>> import torch
    >>> both = {"masked": nn.Conv2d(1, 4, 1), "compact": nn.Conv2d(1, 4, 1)}
    >>> latency_lines(bench_models(both, torch.zeros(1, 1, 4, 4))).split()[:3]
    ['time', 'for', '1']
    """
    lines = []
    for masked, small in zip(done.rows[::2], done.rows[1::2], strict=True):
        assert small.time_saved is not None
        doubt = ", too noisy to tell" if small.doubt else ""
        lines.append(
            f"  time for {small.setting.batch} images, {small.setting.engine}: {masked.times.median:.1f} ms -> "
            f"{small.times.median:.1f} ms ({-100 * small.time_saved[0]:+.0f} %{doubt})"
        )
    if any(row.time_saved is not None and row.time_saved[0] <= 0 for row in done.rows):
        lines.append(
            "  A network this small waits for memory and calls more than for multiply-adds. For a large one see:\n"
            "    asfp bench torchvision:resnet18 torchvision:resnet18@0.3 --engine openvino"
        )
    return "\n".join(lines)
