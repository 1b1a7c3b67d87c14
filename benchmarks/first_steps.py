"""The loss of each of the first steps of a recipe, in float32 on the CPU; the first of them at another learning rate.

    python benchmarks/first_steps.py recipes/cifar10/resnet56.toml --steps 20
    python benchmarks/first_steps.py recipes/cifar10/resnet56.toml --steps 60 --low 40   # 40 steps at 0.01

Images, their order and the initial weights are those of a run with the same seed.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

from asfp.train.assemble import assemble, set_learning_rate, start_fabric
from asfp.train.config import load_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--low", type=int, default=0, help="so many steps at the warm-up's learning rate first")
    options = parser.parse_args()
    changes = ('engine.accelerator="cpu"', 'engine.precision="32-true"', f"seed={options.seed}")
    config = load_config(options.recipe, changes)
    parts = assemble(config, start_fabric(config))
    parts.model.train()
    losses = []
    for step, (images, labels) in enumerate(islice(parts.data.train_batches(1), options.steps)):
        rate = config.optimizer.warmup_lr if step < options.low else config.optimizer.lr
        set_learning_rate(parts.optimizer, rate)
        losses.append(f"{float(parts.step(images, labels, 1.0)):.2f}")
    print(" ".join(losses))


if __name__ == "__main__":
    main()
