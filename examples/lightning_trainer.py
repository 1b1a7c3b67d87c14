"""Soft pruning in Lightning's Trainer: one callback.

python examples/lightning_trainer.py --epochs 10
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import asfp
from asfp.compaction import compact
from asfp.data import digits
from asfp.integrations.lightning import PruningCallback


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = asfp.create_model("resnet8", num_classes=10, in_channels=1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    data = digits()
    loader = DataLoader(TensorDataset(data.train_images, data.train_labels), batch_size=64, shuffle=True)
    module = Classifier()
    pruning = PruningCallback(lambda module: asfp.SoftPruner(module.net, rate=0.4, epochs=epochs))
    trainer = Trainer(
        max_epochs=epochs, callbacks=[pruning], accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)

    print(pruning.last)
    model = module.net.eval()
    small = compact(model, data.test_images[:2])
    with torch.no_grad():
        right = [int((m(data.test_images).argmax(1) == data.test_labels).sum()) for m in (model, small)]
    print(f"{right[0]} of {len(data.test_labels)} right with zeros in it, {right[1]} without them")
    print(small.plan.summary())


if __name__ == "__main__":
    main()
