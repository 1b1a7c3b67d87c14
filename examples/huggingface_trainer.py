"""Soft pruning in the Hugging Face Trainer, on a small ResNet for images; needs `pip install transformers accelerate`.

python examples/huggingface_trainer.py --epochs 3
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch

import asfp
from asfp.data import digits

try:
    from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments
except ImportError:
    print("skipped: transformers is not installed (pip install transformers accelerate)")
    sys.exit(0)

from asfp.integrations.transformers import PruningCallback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    data = digits(size=32)
    rows = [{"pixel_values": x, "labels": y} for x, y in zip(data.train_images, data.train_labels, strict=True)]
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(num_channels=1, num_labels=10, **sizes))
    convolutions = [
        name for name, m in model.named_modules() if isinstance(m, torch.nn.Conv2d) and "shortcut" not in name
    ]
    pruner = asfp.SoftPruner(model, rate=None, epochs=epochs, layers=dict.fromkeys(convolutions, 0.4))
    arguments = TrainingArguments(
        tempfile.mkdtemp(), num_train_epochs=epochs, per_device_train_batch_size=64, learning_rate=1e-2, optim="sgd",
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    pruning = PruningCallback(pruner)
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[pruning]).train()
    print(pruning.last)


if __name__ == "__main__":
    main()
