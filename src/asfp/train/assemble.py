"""From a config to the parts of a run: fabric, model, data, optimiser, pruner, step."""

from __future__ import annotations

import atexit
import logging
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asfp.errors import AsfpError
from asfp.models import create_model
from asfp.pruner import SoftPruner
from asfp.train.blocks import fused_forward
from asfp.train.config import GRAPH_PRECISIONS, EngineConfig, OptimizerConfig, TrainConfig
from asfp.train.objective import Objective, cross_entropy, distillation
from asfp.train.pruning import build_pruner, build_regrowth
from asfp.train.regrowth import Regrowth
from asfp.train.sources import Data, build_data
from asfp.train.step import GraphedStep, Normalise, Step, eager_step
from asfp.weights import load_weights


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
    forward: Callable[[Tensor], Tensor] | None = None
    """A faster way to the model's outputs, in the run's precision."""


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
    except (ValueError, RuntimeError, ImportError) as error:
        raise AsfpError(
            f"engine.accelerator={accelerator!r}, devices={devices}, precision={precision!r}: {error}"
        ) from error
    if nodes > 1:
        _check_other_nodes(fabric, nodes, devices)
    if os.environ.get("LT_CLI_USED") != "1":  # `fabric run` has started the processes already
        fabric.launch()
    if fabric.world_size > 1:
        atexit.unregister(_leave_group)
        atexit.register(_leave_group)
    if engine.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(engine.deterministic)
    torch.backends.cudnn.deterministic = engine.deterministic
    torch.backends.cudnn.benchmark = not engine.deterministic
    return fabric


def _leave_group() -> None:
    """Ends the threads that talk to the other processes: those that Python's end meets at work abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_other_nodes(fabric: Any, nodes: int, devices: int) -> None:
    """Without a launcher, processes of several machines would wait for each other and say nothing."""
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment

    if isinstance(fabric.strategy.cluster_environment, LightningEnvironment) and "MASTER_ADDR" not in os.environ:
        raise AsfpError(
            f"engine.nodes={nodes} needs a launcher on every machine: torchrun --nnodes={nodes} "
            f"--nproc-per-node={devices} --rdzv-backend=c10d --rdzv-endpoint=FIRST_MACHINE:29500 -m asfp train ..."
        )


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
    mode = step_mode(engine, fabric)
    optimizer = build_optimizer(config.optimizer, model, capturable=mode == "graph", device=fabric.device)
    pruner = build_pruner(config, model, data)
    regrowth = build_regrowth(config, model, data, pruner, optimizer)
    wrapped, wrapped_optimizer = fabric.setup(model, optimizer)
    fused = fused_forward(model, data.shape) if mode == "graph" and _mixed(fabric, engine) else None
    loss = build_objective(config, model, data, fused=fused is not None)
    plain = eager_step(fabric, wrapped, normalise, wrapped_optimizer, regrowth, loss)
    step: Step = plain
    if mode == "compile":
        step = eager_step(fabric, wrapped, normalise, wrapped_optimizer, regrowth, loss, compiled=True)
    elif mode == "graph":
        kernels = narrow_kernels() if engine.channels_last and fused is None else nullcontext
        fast = eager_step(
            fabric, fused or model, normalise, optimizer, regrowth, loss, compiled=fused is None, kernels=kernels
        )
        step = GraphedStep(fast, plain, regrowth, every_size=fused is not None)
    torch.manual_seed(config.seed + fabric.global_rank)
    return Parts(fabric, model, data, normalise, optimizer, pruner, regrowth, step, mode, fused)


def narrow_kernels() -> Callable[[], AbstractContextManager[Any]]:
    """Convolutions of few channels by kernels of our own, where Triton is installed.

    >>> callable(narrow_kernels())
    True
    """
    if find_spec("triton") is None:
        return nullcontext
    from asfp.train.kernels import NarrowConvolutions

    return NarrowConvolutions


def _mixed(fabric: Any, engine: EngineConfig) -> bool:
    """Whether the step computes in bfloat16 with channels last, as the kernels of `blocks` do."""
    with fabric.autocast():
        bfloat16 = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is torch.bfloat16
    return engine.channels_last and bfloat16


def step_mode(engine: EngineConfig, fabric: Any) -> str:
    """eager, compile or graph: what `engine.compile` asks for, or the fastest that is right here.

    >>> from types import SimpleNamespace
    >>> gpu = SimpleNamespace(device=torch.device("cuda"), world_size=1)
    >>> step_mode(EngineConfig(), gpu), step_mode(EngineConfig(precision="16-mixed"), gpu)
    ('graph', 'eager')
    """
    one_gpu = fabric.device.type == "cuda" and fabric.world_size == 1
    if engine.compile == "auto":
        return "graph" if one_gpu and engine.precision in GRAPH_PRECISIONS else "eager"
    if engine.compile == "graph" and not one_gpu:
        raise AsfpError("engine.compile='graph' is for one GPU: use 'compile' or 'eager'")
    return engine.compile


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
        _check_output(model, name, data)
    if weights:
        path = Path(weights)
        if not path.exists():
            raise AsfpError(f"{key}={str(path)!r}: there is no such file; train the dense recipe first")
        load_weights(model, path)
    return model


def _check_output(model: nn.Module, name: str, data: Data) -> None:
    """The model is run on two images, in both modes, and left as it was."""
    example = torch.zeros(2, *data.shape)
    for mode, training in (("evaluation", False), ("training", True)):
        model.train(training)
        buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}  # batch norm's statistics
        try:
            with torch.no_grad():
                output = torch.func.functional_call(model, buffers, (example,))
        except Exception as error:
            raise AsfpError(
                f"{name} cannot take images of {data.shape} ({str(error).partition(chr(10))[0]}): set data.size or "
                "model.options, or choose another model"
            ) from error
        if not isinstance(output, Tensor):
            raise AsfpError(
                f"{name} gives a {type(output).__name__} in {mode}, not one tensor of scores: turn its other outputs "
                "off, e.g. model.options.aux_logits=false, or choose another model"
            )
        if output.shape != (2, data.classes):
            raise AsfpError(
                f"{name} gives {tuple(output.shape[1:])} scores an image, the data has {data.classes} classes: leave "
                "num_classes out of model.options, or choose a model that classifies"
            )


def build_objective(config: TrainConfig, model: nn.Module, data: Data, *, fused: bool = False) -> Objective:
    """Cross entropy, or distillation from the teacher of the config, which is put where the model is.

    `fused`: the teacher's outputs by the kernels of `blocks`, where they are for it.

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
    forward = fused_forward(teacher, data.shape) if fused else None
    return distillation(teacher, distill.alpha, distill.temperature, forward)


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


def learning_rate(config: OptimizerConfig, epoch: int, epochs: int, share: float = 1.0) -> float:
    """The rate in epoch `epoch`, counted from 1: a milestone m lowers it from epoch m + 1 on.

    `share` of the epoch is done with the step that it is for; where it ramps up, the rate depends on that.

    >>> [round(learning_rate(OptimizerConfig(), epoch, 200), 6) for epoch in (1, 60, 61, 121, 161)]
    [0.1, 0.1, 0.02, 0.004, 0.0008]
    >>> ramp = OptimizerConfig(warmup_epochs=2, warmup="ramp")
    >>> [learning_rate(ramp, epoch, 200, share) for epoch, share in ((1, 0.5), (1, 1.0), (2, 1.0), (3, 0.5))]
    [0.025, 0.05, 0.1, 0.1]
    """
    if epoch <= config.warmup_epochs:
        ramps = config.warmup == "ramp"
        return config.lr * (epoch - 1 + share) / config.warmup_epochs if ramps else config.warmup_lr
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
