"""Images a second of one training epoch: a plain PyTorch loop, ours eager, ours compiled (and captured on a GPU).

    python benchmarks/train.py --model resnet56 --data cifar10 --root data

All train the same model with the same batch size, precision and memory format. The plain loop is the usual one:
torchvision's transforms in a DataLoader. Without CIFAR-10 use `--data digits`, whose images stay in memory for all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from asfp.train import TrainConfig, config_from
from asfp.train.assemble import assemble, build_model, build_optimizer, start_fabric


def seconds_of(epoch: Callable[[int], int], device: torch.device, epochs: int) -> tuple[float, float]:
    """The median seconds of an epoch after a first one, and images a second."""
    images, times = epoch(1), []
    for number in range(2, epochs + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        images = epoch(number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    median = sorted(times)[len(times) // 2]
    return median, images / median


def plain(config: TrainConfig, limit: int, workers: int) -> tuple[Callable[[int], int], torch.device]:
    """What most people write: DataLoader, torchvision transforms, autocast, channels-last."""
    fabric = start_fabric(config)
    device = fabric.device
    parts = assemble(config, fabric)
    model: nn.Module = build_model(config, parts.data).to(device, memory_format=torch.channels_last)
    optimizer = build_optimizer(config.optimizer, model)
    if config.data.name == "cifar10":
        from torchvision import datasets
        from torchvision.transforms import v2

        steps = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), v2.ToImage()]
        steps += [
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([m / 255 for m in parts.data.mean], [s / 255 for s in parts.data.std]),
        ]
        data = datasets.CIFAR10(config.data.root, transform=v2.Compose(steps))
        loader = torch.utils.data.DataLoader(
            data,
            config.data.batch,
            shuffle=True,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
        )
    else:
        loader = list(parts.data.train_batches(1))

    def epoch(_: int) -> int:
        model.train()
        count = 0
        for number, (images, labels) in enumerate(loader):
            if number == limit:
                break
            images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            count += len(labels)
        return count

    return epoch, device


def ours(config: TrainConfig, limit: int) -> tuple[Callable[[int], int], torch.device]:
    parts = assemble(config, start_fabric(config))

    def epoch(number: int) -> int:
        parts.model.train()
        count = 0
        for step, (images, labels) in enumerate(parts.data.train_batches(number)):
            if step == limit:
                break
            parts.step(images, labels, 1.0)
            count += len(labels)
        return count

    return epoch, parts.fabric.device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--root", default="data")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=3, help="timed epochs, after one that is not")
    parser.add_argument("--steps", type=int, default=10**9, help="stop an epoch after so many steps")
    parser.add_argument("--workers", type=int, default=8, help="of the plain loop's DataLoader")
    parser.add_argument("--only", default="", help="plain, eager, compile or graph")
    options = parser.parse_args()
    fast = "graph" if torch.cuda.is_available() else "compile"
    for kind in ("plain", "eager", fast):
        if options.only and kind != options.only:
            continue
        config = config_from(
            {
                "model": {"name": options.model},
                "data": {"name": options.data, "root": options.root, "batch": options.batch},
                "engine": {"compile": "eager" if kind == "plain" else kind},
            }
        )
        start = time.perf_counter()
        epoch, device = (
            plain(config, options.steps, options.workers) if kind == "plain" else ours(config, options.steps)
        )
        median, rate = seconds_of(epoch, device, options.epochs)
        total = time.perf_counter() - start
        print(
            f"{options.model} {kind:8s} {median:8.3f} s an epoch  {rate:10,.0f} images/s  (with start {total:.1f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
