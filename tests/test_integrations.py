"""The callbacks for other people's loops: pruned filters survive a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asfp

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")


class Net(nn.Module):
    """Takes and returns what the Hugging Face Trainer does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 3)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.second(self.first(pixels).relu()).mean((2, 3)))
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


def images() -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(0)
    return [{"pixels": torch.randn(1, 8, 8, generator=numbers), "labels": torch.tensor(i % 3)} for i in range(24)]


def train(folder: Path, epochs: int, resume: str | None = None) -> tuple[Net, Any]:
    from asfp.integrations.transformers import PruningCallback

    torch.manual_seed(0)
    model = Net()
    example = {"pixels": torch.zeros(1, 1, 8, 8)}
    callback = PruningCallback(asfp.HardPruner(model, 0.5, epochs=4, example_inputs=example))
    arguments = transformers.TrainingArguments(
        str(folder), num_train_epochs=epochs, per_device_train_batch_size=8, learning_rate=0.01, save_strategy="epoch",
        lr_scheduler_type="constant", report_to="none", use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=images(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return model, callback


@pytest.mark.filterwarnings("ignore")  # of transformers and accelerate, about their own
def test_a_resumed_trainer_keeps_the_filters_that_were_pruned(tmp_path: Path) -> None:
    whole, before = train(tmp_path / "whole", 4)
    train(tmp_path / "parts", 2)
    model, callback = train(tmp_path / "parts", 4, str(tmp_path / "parts" / "checkpoint-6"))
    for name, mask in before.pruner.masks.items():
        assert torch.equal(mask, callback.pruner.masks[name])
        assert not model.get_parameter(f"{name}.weight")[~mask].any()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    (tmp_path / "parts" / "checkpoint-6" / "asfp-pruner.pt").unlink()
    with pytest.raises(asfp.AsfpError, match=r"no asfp-pruner\.pt in .*checkpoint-6"):
        train(tmp_path / "parts", 4, str(tmp_path / "parts" / "checkpoint-6"))
