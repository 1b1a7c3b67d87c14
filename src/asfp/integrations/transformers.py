"""A callback for the Hugging Face Trainer: prunes after each epoch. Needs transformers, which asfp does not install."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


class PruningCallback(TrainerCallback):
    """`pruner.step(epoch)` at the end of each epoch of a Hugging Face `Trainer`; the last step is in `.last`.

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
