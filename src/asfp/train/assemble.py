"""From a config to the parts of a run: fabric, model, data, optimiser, pruner, step."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from asfp.data import ResidentData, cifar10, digits
from asfp.errors import AsfpError
from asfp.models import create_model
from asfp.pruner import SoftPruner
from asfp.train.config import OptimizerConfig, TrainConfig
from asfp.train.objective import Objective, cross_entropy, distillation
from asfp.train.pruning import build_pruner, build_regrowth
from asfp.train.regrowth import Regrowth
from asfp.train.step import GraphedStep, Normalise, Step, eager_step
from asfp.weights import load_weights


class Data(Protocol):
    """What the loop needs of a data set; every batch is a pure function of (seed, epoch, step)."""

    classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train_size: int
    test_size: int

    @property
    def steps(self) -> int: ...
    def global_size(self, step: int) -> int: ...
    def train_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]: ...
    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]: ...


@dataclass
class Parts:
    """All that a run changes or reads; `model` is the plain module, whatever wraps it in the step."""

    fabric: Any
    model: nn.Module
    data: Data
    normalise: Normalise
    optimizer: torch.optim.Optimizer
    pruner: SoftPruner | None
    regrowth: Regrowth | None
    step: Step
    mode: str
    """eager, compile or graph."""


def start_fabric(config: TrainConfig) -> Any:
    """Devices, precision and processes as the config says; under torchrun, as torchrun says.

    >>> from asfp.train.config import EngineConfig
    >>> fabric = start_fabric(TrainConfig(engine=EngineConfig(accelerator="cpu")))
    >>> fabric.world_size, fabric.device.type
    (1, 'cpu')
    """
    from lightning.fabric import Fabric

    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    engine = config.engine
    devices, nodes = engine.devices, engine.nodes
    if "TORCHELASTIC_RUN_ID" in os.environ:
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    accelerator = engine.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    precision: Any = engine.precision
    if precision == "auto":
        precision = "bf16-mixed" if accelerator == "cuda" and torch.cuda.is_bf16_supported() else "32-true"
    strategy = "ddp" if devices * nodes > 1 else "auto"
    try:
        fabric = Fabric(
            accelerator=accelerator, devices=devices, num_nodes=nodes, strategy=strategy, precision=precision
        )
    except (ValueError, RuntimeError) as error:
        raise AsfpError(
            f"engine.accelerator={accelerator!r}, devices={devices}, precision={precision!r}: {error}"
        ) from error
    fabric.launch()
    if engine.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(engine.deterministic)
    torch.backends.cudnn.deterministic = engine.deterministic
    torch.backends.cudnn.benchmark = not engine.deterministic
    return fabric


def assemble(config: TrainConfig, fabric: Any) -> Parts:
    """Everything built and on its device; the weights depend on the seed alone.

    >>> from asfp.train.config import config_from
    >>> tables = {"model": {"name": "resnet8"}, "data": {"name": "digits"}, "engine": {"accelerator": "cpu"}}
    >>> config = config_from(tables)
    >>> parts = assemble(config, start_fabric(config))
    >>> parts.data.steps, parts.mode, type(parts.pruner).__name__
    (12, 'eager', 'SoftPruner')
    """
    data = build_data(config, fabric)
    model = build_model(config, data)
    engine = config.engine
    if engine.sync_bn:
        if fabric.device.type == "cpu":
            raise AsfpError("engine.sync_bn=true needs GPUs: torch has no synchronised batch norm for the CPU")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.to(fabric.device)
    if engine.channels_last:
        model.to(memory_format=torch.channels_last)
    mean, std = config.data.mean or data.mean, config.data.std or data.std
    normalise = Normalise(mean, std, engine.channels_last).to(fabric.device)
    mode = engine.compile
    if mode == "auto":
        mode = "graph" if fabric.device.type == "cuda" and fabric.world_size == 1 else "eager"
    if mode == "graph" and (fabric.device.type != "cuda" or fabric.world_size > 1):
        raise AsfpError("engine.compile='graph' is for one GPU: use 'compile' or 'eager'")
    optimizer = build_optimizer(config.optimizer, model, capturable=mode == "graph", device=fabric.device)
    pruner = build_pruner(config, model, data)
    regrowth = build_regrowth(config, model, data, pruner, optimizer)
    wrapped, wrapped_optimizer = fabric.setup(model, optimizer)
    loss = build_objective(config, model, data)
    plain = eager_step(fabric, wrapped, normalise, wrapped_optimizer, regrowth, loss)
    step: Step = plain
    if mode == "compile":
        step = eager_step(fabric, wrapped, normalise, wrapped_optimizer, regrowth, loss, compiled=True)
    elif mode == "graph":
        fast = eager_step(fabric, model, normalise, optimizer, regrowth, loss, compiled=True)
        step = GraphedStep(fast, plain, regrowth)
    torch.manual_seed(config.seed + fabric.global_rank)
    return Parts(fabric, model, data, normalise, optimizer, pruner, regrowth, step, mode)


def build_data(config: TrainConfig, fabric: Any) -> Data:
    """The data set that the config names.

    >>> from types import SimpleNamespace
    >>> from asfp.train.config import DataConfig
    >>> one = SimpleNamespace(device=torch.device("cpu"), global_rank=0, world_size=1)
    >>> build_data(TrainConfig(data=DataConfig(name="digits")), one).shape
    (1, 16, 16)
    """
    data = config.data
    if data.name == "imagefolder":
        from asfp.data.folder import FolderData

        return FolderData(
            data.root, data.batch, config.seed, size=data.size or 224, workers=data.workers, corrupt=data.corrupt,
            test_batch=data.test_batch, device=fabric.device, rank=fabric.global_rank, world=fabric.world_size,
        )  # fmt: skip
    if data.name == "cifar10":
        if data.size not in (0, 32):
            raise AsfpError(f"data.size={data.size}: CIFAR-10's images are 32x32, leave data.size out")
        images = cifar10(data.root, data.download)
    else:
        images = digits(data.size or 16)
    augment = data.augment == "crop-flip" or (data.augment == "auto" and data.name == "cifar10")
    return ResidentData(
        images, fabric.device, data.batch, config.seed, augment=augment, test_batch=data.test_batch,
        rank=fabric.global_rank, world=fabric.world_size,
    )  # fmt: skip


def build_model(config: TrainConfig, data: Data) -> nn.Module:
    """The model for the data's classes and channels, with random weights by the seed or those of `model.weights`.

    >>> from types import SimpleNamespace
    >>> from asfp.train.config import ModelConfig
    >>> build_model(TrainConfig(model=ModelConfig("resnet8")), SimpleNamespace(classes=7, shape=(3, 8, 8))).linear
    Linear(in_features=64, out_features=7, bias=True)
    """
    return _create(config, data, config.model.name, config.model.options, "model.weights", config.model.weights)


def _create(config: TrainConfig, data: Data, name: str, more: dict[str, Any], key: str, weights: str) -> nn.Module:
    options: dict[str, Any] = {"num_classes": data.classes}
    if data.shape[0] != 3:
        if name.startswith("torchvision:"):
            raise AsfpError(f"{name} takes images of 3 channels, {config.data.name} has {data.shape[0]}")
        options["in_chans" if name.startswith("timm:") else "in_channels"] = data.shape[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = create_model(name, **(options | more))
    if weights:
        path = Path(weights)
        if not path.exists():
            raise AsfpError(f"{key}={str(path)!r}: there is no such file; train the dense recipe first")
        load_weights(model, path)
    return model


def build_objective(config: TrainConfig, model: nn.Module, data: Data) -> Objective:
    """Cross entropy, or distillation from the teacher of the config, which is put where the model is.

    >>> from types import SimpleNamespace
    >>> build_objective(TrainConfig(), nn.Linear(2, 2), SimpleNamespace(classes=2, shape=(3, 8, 8))) is cross_entropy
    True
    """
    distill = config.distill
    if not distill.weights:
        return cross_entropy
    name, options = distill.model or config.model.name, {} if distill.model else config.model.options
    teacher = _create(config, data, name, options, "distill.weights", distill.weights)
    teacher.to(next(model.parameters()))
    if config.engine.channels_last:
        teacher.to(memory_format=torch.channels_last)
    return distillation(teacher, distill.alpha, distill.temperature)


def build_optimizer(
    config: OptimizerConfig, model: nn.Module, *, capturable: bool = False, device: Any = "cpu"
) -> torch.optim.SGD:
    """SGD on all parameters; for a CUDA graph, fused and with the learning rate as a tensor.

    >>> build_optimizer(OptimizerConfig(lr=0.2), nn.Linear(2, 2)).param_groups[0]["lr"]
    0.2
    """
    lr: Any = torch.tensor(config.lr, device=device) if capturable else config.lr
    return torch.optim.SGD(
        model.parameters(), lr, momentum=config.momentum, nesterov=config.nesterov, weight_decay=config.weight_decay,
        fused=True if capturable else None,
    )  # fmt: skip


def learning_rate(config: OptimizerConfig, epoch: int, epochs: int) -> float:
    """The rate in epoch `epoch`, counted from 1: a milestone m lowers it from epoch m + 1 on.

    >>> [round(learning_rate(OptimizerConfig(), epoch, 200), 6) for epoch in (1, 60, 61, 121, 161)]
    [0.1, 0.1, 0.02, 0.004, 0.0008]
    """
    if epoch <= config.warmup_epochs:
        return config.warmup_lr
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1.0 + math.cos(math.pi * (epoch - 1) / epochs))
    return float(config.lr * config.gamma ** sum(epoch > milestone for milestone in config.milestones))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """In place where the rate is a tensor, so that a captured step sees it.

    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> set_learning_rate(optimizer, 0.5)
    >>> optimizer.param_groups[0]["lr"]
    0.5
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
