"""A Lightning callback: prunes after each training epoch, before the validation is logged as the pruned model's."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from asfp.pruner import HardPruner, SoftPruner
from asfp.steps import PruneStep


class PruningCallback(Callback):
    """`pruner.step(epoch)` after each training epoch of `trainer.fit`; logs "prune/rate" and "prune/regrown".

    Give it what makes the pruner, once the model is there. The last step is in `.last`. The pruner's state goes into
    Lightning's checkpoints, so a resumed fit goes on identically.

        pruning = PruningCallback(lambda module: asfp.SoftPruner(module.net, rate=0.4, epochs=10))
        Trainer(max_epochs=10, callbacks=[pruning]).fit(module, data)

    >>> PruningCallback(lambda module: SoftPruner(module, 0.4, epochs=10)).last is None
    True
    """

    def __init__(self, make_pruner: Any) -> None:
        self.make_pruner = make_pruner
        self.pruner: SoftPruner | None = None
        self.last: PruneStep | None = None
        self._state: dict[str, Any] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pruner = self.make_pruner(pl_module)
        assert self.pruner is not None
        if self._state:
            self.pruner.load_state_dict(self._state)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.pruner, HardPruner):
            self.pruner.enforce_()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.pruner is not None
        self.last = self.pruner.step(trainer.current_epoch + 1)
        pl_module.log_dict({"prune/rate": self.last.rate, "prune/regrown": self.last.regrown}, on_epoch=True)

    def state_dict(self) -> dict[str, Any]:
        return self.pruner.state_dict() if self.pruner is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict
