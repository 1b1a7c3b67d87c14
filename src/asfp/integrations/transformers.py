"""A callback for the Hugging Face Trainer: prunes after each epoch. Needs transformers, which asfp does not install."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from asfp.errors import AsfpError
from asfp.pruner import HardPruner, SoftPruner
from asfp.steps import PruneStep

if TYPE_CHECKING:
    TrainerCallback = object
else:
    try:
        from transformers import TrainerCallback
    except ImportError:
        TrainerCallback = object


STATE = "asfp-pruner.pt"
"""The pruner's state, beside the model's in each checkpoint folder."""


class PruningCallback(TrainerCallback):
    """`pruner.step(epoch)` at the end of each epoch of a Hugging Face `Trainer`; the last step is in `.last`.

    Checkpoints hold the pruner's state, so that `train(resume_from_checkpoint=...)` goes on with the same filters.

    pruner = asfp.SoftPruner(model, rate=0.4, epochs=3, example_inputs={"pixel_values": pixels})
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[PruningCallback(pruner)]).train()
    """

    def __init__(self, pruner: SoftPruner) -> None:
        if TrainerCallback is object:
            raise AsfpError("asfp.integrations.transformers needs transformers: pip install transformers accelerate")
        self.pruner = pruner
        self.last: PruneStep | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(self.pruner, HardPruner):
            self.pruner.enforce_()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.last = self.pruner.step(min(self.pruner.epochs, round(state.epoch)))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = _folder(args, state)
        if state.is_world_process_zero and folder.is_dir():
            aside = folder / f"{STATE}.new"
            torch.save(self.pruner.state_dict(), aside)
            aside.replace(folder / STATE)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.global_step:
            return
        given = args.resume_from_checkpoint
        folders = [_folder(args, state), *([Path(given)] if isinstance(given, str) else [])]
        found = next((folder / STATE for folder in folders if (folder / STATE).is_file()), None)
        if found is not None:
            self.pruner.load_state_dict(torch.load(found, weights_only=True))
        elif isinstance(self.pruner, HardPruner):
            raise AsfpError(
                f"there is no {STATE} in {folders[0]}, so it is not known which filters are to stay zero: resume from "
                "a checkpoint that was written with this callback, in the same output_dir"
            )


def _folder(args: Any, state: Any) -> Path:
    """Where the Trainer keeps the checkpoint of the present step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
