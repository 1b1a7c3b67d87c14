"""What makes two runs the same run: by content, not by where things lie or what they run on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from asfp.train.config import TrainConfig
from asfp.train.reading import merge

_PLACES = {"data": ("root", "workers", "download"), "engine": ("progress", "checkpoint_epochs")}
_DATA = ("name", "batch", "augment", "mean", "std", "size")


def settings(config: TrainConfig) -> dict[str, Any]:
    """The config without where things lie and how progress is shown: what a record and a checkpoint keep.

    >>> "root" in settings(TrainConfig())["data"]
    False
    """
    tables = config.to_dict()
    del tables["output"]
    for table, keys in _PLACES.items():
        for key in keys:
            del tables[table][key]
    return tables


def with_defaults(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as this version writes them: options that came later at their defaults.

    >>> with_defaults({"epochs": 3, "pruning": {"rate": 0.3}})["pruning"]["freeze_epochs"]
    0
    """
    return merge(settings(TrainConfig()), saved)


def comparable(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The same `with_defaults`, weights by their run, and no accelerator: a run may go on, or end, on another device.

    >>> old = settings(TrainConfig())
    >>> del old["distill"], old["pruning"]["momentum"]
    >>> comparable(old) == comparable(settings(TrainConfig()))
    True
    >>> comparable({"model": {"weights": "/elsewhere/resnet56-seed0/model.pt"}})["model"]["weights"]
    'resnet56-seed0'
    """
    tables = with_defaults(saved)
    for table in ("model", "distill"):
        tables[table] = tables[table] | {"weights": weights_name(str(tables[table]["weights"]))}
    tables["engine"] = {key: value for key, value in tables["engine"].items() if key != "accelerator"}
    return tables


def weights_name(path: str) -> str:
    """The run that the weights come from: the folder of a model.pt, or the name of any other file.

    >>> weights_name("/elsewhere/resnet56-seed0/model.pt"), weights_name("kept/resnet56-seed0.pt"), weights_name("")
    ('resnet56-seed0', 'resnet56-seed0', '')
    """
    file = PurePath(path.replace("\\", "/"))
    return file.parent.name or file.stem if file.stem == "model" else file.stem


def identity(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the result of a run up to rounding: model, data, optimiser, pruning, teacher, epochs and seed.

    Not the run's name, its folder, the data's folder or the engine. Settings that play no part (the rate of an unpruned
    run, milestones under a cosine, d under a constant rate) are left out, so that a run is found however it is written.

    >>> from asfp.train.config import EngineConfig, PruningConfig
    >>> asfp = TrainConfig(name="a", engine=EngineConfig(compile="eager"))
    >>> identity(settings(asfp)) == identity(settings(TrainConfig(name="b", output="elsewhere")))
    True
    >>> sfp = TrainConfig(pruning=PruningConfig(method="sfp", d=0.1))
    >>> identity(settings(sfp)) == identity(settings(TrainConfig(pruning=PruningConfig(schedule="constant"))))
    True
    """
    tables = comparable(saved)
    return {
        "epochs": tables["epochs"],
        "seed": tables["seed"],
        "model": tables["model"],
        "data": {key: tables["data"][key] for key in _DATA},
        "optimizer": _optimizer(tables["optimizer"]),
        "pruning": _pruning(tables["pruning"], tables["epochs"]),
        "distill": tables["distill"] if tables["distill"]["weights"] else {},
    }


def _optimizer(table: Mapping[str, Any]) -> dict[str, Any]:
    idle = set() if table["schedule"] == "step" else {"milestones", "gamma"}
    idle |= set() if table["warmup_epochs"] else {"warmup", "warmup_lr"}
    idle |= {"warmup_lr"} if table["warmup"] == "ramp" else set()
    return {key: value for key, value in table.items() if key not in idle}


def _pruning(table: Mapping[str, Any], epochs: int) -> dict[str, Any]:
    method, schedule = table["method"], table["schedule"]
    if method == "none":
        return {"method": method}
    if schedule == "auto":
        schedule = "asymptotic" if method == "asfp" else "constant"
    idle = {"constant": {"start", "d"}, "asymptotic": set()}.get(schedule, {"d"})
    idle |= set() if table["norm"] == "reset" else {"norm_shift"}
    idle |= set() if table["soften"] else {"soften_epochs"}
    kind = "hard" if method == "hard" else "soft"
    result = {key: value for key, value in table.items() if key not in idle} | {"method": kind, "schedule": schedule}
    if table["soften"] and not table["soften_epochs"]:
        result["soften_epochs"] = epochs // 2
    return result
