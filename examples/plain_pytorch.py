"""Soft pruning in a plain PyTorch loop: three lines, marked with <--. Then a smaller model that computes the same.

python examples/plain_pytorch.py --epochs 10
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

import asfp
from asfp.compaction import compact, verify
from asfp.data import batches, digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    data = digits()
    model = asfp.create_model("resnet8", num_classes=10, in_channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    order = torch.Generator().manual_seed(0)
    pruner = asfp.SoftPruner(model, rate=0.4, epochs=epochs)  # <--

    for epoch in range(1, epochs + 1):
        model.train()
        for images, labels in batches(data.train_images, data.train_labels, 64, order):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        print(pruner.step(epoch))  # <--

    model.eval()
    small = compact(model, data.test_images[:2])  # <--
    with torch.no_grad():
        right = [int((m(data.test_images).argmax(1) == data.test_labels).sum()) for m in (model, small)]
    print(f"{right[0]} of {len(data.test_labels)} right with zeros in it, {right[1]} without them")
    print(verify(model, small, data.test_images[:2]))
    print(small.plan.summary())


if __name__ == "__main__":
    main()
