"""How long compaction takes, over depths 20 to 1202 and for the networks that have a bar.

`python benchmarks/compaction.py`

Prints seconds for each (self-check aside) and the exponent of a power law through the CIFAR depths (1 is linear).
"""

from __future__ import annotations

import argparse
import math
import time

import torch

import asfp
from asfp.sources import input_shape

DEPTHS = (20, 56, 110, 302, 602, 1202)
BARS = {"torchvision:resnet50": 3.0, "resnet110": 15.0, "torchvision:densenet201": 15.0}


def seconds(name: str, repeats: int = 1, **options: int) -> float:
    """The median time of compacting the network, 40 % of its filters pruned, batch norms as after training."""
    torch.manual_seed(0)
    model = asfp.models.CifarResNet(**options) if options else asfp.create_model(name)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.bias)
    example = torch.zeros((1, 3, 32, 32) if options else input_shape(name, model))
    asfp.SoftPruner(model, 0.4, epochs=1).step(1)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        asfp.compact(model.eval(), example, check=False)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS, help="depths of CIFAR ResNets, 6n + 2 each")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    seconds("resnet20")  # imports and caches
    for name, bar in BARS.items():
        took = seconds(name, options.repeats)
        print(f"{name:26s} {took:7.2f} s   bar {bar:4.0f} s   {'PASS' if took < bar else 'FAIL'}", flush=True)
    times = {}
    for depth in options.depths:
        times[depth] = seconds("", options.repeats if depth < 300 else 1, depth=depth)
        print(
            f"CIFAR ResNet-{depth:<13d} {times[depth]:7.2f} s   {1000 * times[depth] / depth:6.2f} ms a layer",
            flush=True,
        )
    low, high = min(times), max(times)
    if low < high:
        print(f"grows as depth ** {math.log(times[high] / times[low]) / math.log(high / low):.2f}")


if __name__ == "__main__":
    main()
