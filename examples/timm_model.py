"""Soft pruning of a timm model; needs `pip install 'asfp[timm]'`.

python examples/timm_model.py --epochs 10 --model resnet18
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

import asfp
from asfp.compaction import compact
from asfp.data import batches, digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--model", default="test_resnet")
    options = parser.parse_args()

    torch.manual_seed(0)
    data = digits(size=32)
    model = asfp.create_model(f"timm:{options.model}", num_classes=10, in_chans=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    order = torch.Generator().manual_seed(0)
    pruner = asfp.SoftPruner(model, rate=0.3, epochs=options.epochs, example_inputs=data.test_images[:2])

    for epoch in range(1, options.epochs + 1):
        model.train()
        for images, labels in batches(data.train_images, data.train_labels, 64, order):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        print(pruner.step(epoch))

    model.eval()
    small = compact(model, data.test_images[:2])
    with torch.no_grad():
        right = [int((m(data.test_images).argmax(1) == data.test_labels).sum()) for m in (model, small)]
    print(f"{right[0]} of {len(data.test_labels)} right with zeros in it, {right[1]} without them")
    print(small.plan.summary())


if __name__ == "__main__":
    main()
