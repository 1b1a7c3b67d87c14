"""The cost of `pruner.step` as a share of a training epoch: 50,000 images of CIFAR-10, batches of 128, SGD.

A few batches are timed and scaled to the epoch, with data that is already on the device: the share is an upper bound.

    python benchmarks/prune_step.py                       # ResNet-110 on the CPU, or on CUDA where there is one
    python benchmarks/prune_step.py --model resnet20 --batches 5 --criterion geometric_median --selection coupled
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import asfp

IMAGES = 50_000
LIMIT_PERCENT = 0.3


def median_ms(action: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The median time of `action` over `repeats` runs, after one that is not counted, the device's work included."""
    times = []
    for _ in range(repeats + 1):
        _wait(device)
        start = time.perf_counter()
        action()
        _wait(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Time both, print both and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet110", help="any name asfp.create_model knows")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--criterion", default="l2")
    parser.add_argument("--selection", default="independent", help="independent, nested or coupled")
    parser.add_argument("--align", type=int, default=1, help="keep multiples of so many filters")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--batches", type=int, default=3, help="training batches to time")
    parser.add_argument("--steps", type=int, default=20, help="pruning steps to time")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for torch's own choice")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    model = asfp.create_model(arguments.model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    x = torch.randn(arguments.batch, 3, 32, 32, device=device)
    y = torch.randint(10, (arguments.batch,), device=device)

    def train_batch() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    options = {name: getattr(arguments, name) for name in ("criterion", "selection", "align")}
    pruner = asfp.SoftPruner(model, rate=0.4, epochs=200, example_inputs=x[:1], **options)
    step_ms = median_ms(lambda: pruner.step(100), arguments.steps, device)
    batch_ms = median_ms(train_batch, arguments.batches, device)
    epoch_ms = batch_ms * math.ceil(IMAGES / arguments.batch)
    percent = 100 * step_ms / epoch_ms

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    chosen = ", ".join(f"{key} {value}" for key, value in options.items())
    print(f"{arguments.model}, {len(pruner.layers)} layers, {chosen}, {name}, torch {torch.__version__}")
    print(f"  pruning step   {step_ms:12.2f} ms   median of {arguments.steps}")
    print(f"  training batch {batch_ms:12.2f} ms   median of {arguments.batches}, {arguments.batch} images")
    print(f"  epoch          {epoch_ms:12.0f} ms   scaled to {IMAGES} images")
    verdict = "PASS" if percent < LIMIT_PERCENT else "FAIL"
    print(f"  step / epoch   {percent:12.4f} %    {verdict}, limit {LIMIT_PERCENT} %")


if __name__ == "__main__":
    main()
