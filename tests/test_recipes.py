"""Every recipe loads, says what the paper's table says, and builds its model and pruner."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asfp import AsfpError, HardPruner, SoftPruner
from asfp.train import TrainConfig, config_from, load_config
from asfp.train.assemble import build_model, build_pruner, learning_rate
from asfp.train.config import OptimizerConfig

RECIPES = Path(__file__).parent.parent / "recipes"
FILES = sorted(RECIPES.rglob("*.toml"))


def test_all_models_and_modes_of_the_paper_are_there() -> None:
    names = {path.relative_to(RECIPES).with_suffix("").as_posix() for path in FILES}
    for model in ("cifar10/resnet20", "cifar10/resnet32", "cifar10/resnet56", "cifar10/resnet110", "cifar10/vgg16",
                  "imagenet/resnet18", "imagenet/resnet34", "imagenet/resnet50"):  # fmt: skip
        assert model in names
        for method in ("sfp", "asfp", "hard"):
            assert {f"{model}-{method}", f"{model}-{method}-pretrained"} <= names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(RECIPES).as_posix())
def test_recipe_builds(path: Path) -> None:
    config = load_config(path)
    assert config.name == path.stem
    assert config_from(tomllib.loads(config.to_toml())) == config
    imagenet = path.parent.name == "imagenet"
    method = next((m for m in ("asfp", "sfp", "hard") if f"-{m}" in path.stem), "none")
    pretrained = "-pretrained" in path.stem
    assert config.pruning.method == method
    if imagenet:
        assert (config.epochs, config.data.batch, config.optimizer.weight_decay) == (100, 256, 1e-4)
        assert config.optimizer.lr == (0.01 if pretrained else 0.1)
        assert config.model.options == ({"weights": "IMAGENET1K_V1"} if pretrained else {})
    elif "vgg" in path.stem:
        assert (config.data.batch, config.optimizer.nesterov) == (64, False)
        assert config.epochs == (40 if pretrained and "160" not in path.stem else 160)
    else:
        assert (config.epochs, config.data.batch, config.optimizer.weight_decay) == (200, 128, 5e-4)
        rates = [round(learning_rate(config.optimizer, e, 200), 7) for e in (60, 61, 121, 161)]
        start = 0.01 if pretrained else 0.1
        assert rates == pytest.approx([start, start / 5, start / 25, start / 125])
        assert learning_rate(config.optimizer, 1, 200) == (0.01 if "110" in path.stem or pretrained else 0.1)
        assert bool(config.model.weights) == pretrained
    tables = config.to_dict()
    tables["model"] |= {"weights": "", "options": {}}
    plain = config_from(tables)
    built(replace(plain, name="", optimizer=OptimizerConfig()).to_toml())


@cache
def built(toml: str) -> None:
    """Model and pruner of a config; recipes that differ in their learning rate alone are built once."""
    config = config_from(tomllib.loads(toml))
    imagenet = config.data.name == "imagefolder"
    size = 64 if imagenet else 32
    data = SimpleNamespace(classes=1000 if imagenet else 10, shape=(3, size, size))
    model = build_model(config, data)  # type: ignore[arg-type]
    with torch.no_grad():
        assert model.eval()(torch.zeros(2, 3, size, size)).shape == (2, data.classes)
    pruner = build_pruner(config, model, data)  # type: ignore[arg-type]
    method = config.pruning.method
    kinds = {"none": type(None), "sfp": SoftPruner, "asfp": SoftPruner, "hard": HardPruner}
    assert type(pruner) is kinds[method]
    if pruner is not None:
        assert pruner.schedule(config.epochs) == config.pruning.rate
        assert (pruner.schedule(0) == 0.0) == (method == "asfp")
        assert len(pruner.layers) == len(config.pruning.layers) or not config.pruning.layers


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_overrides_are_typed_and_win(tmp_path: Path) -> None:
    path = write(tmp_path, 'epochs = 3\n[model]\nname = "resnet8"')
    overrides = ["model.name=resnet20", "optimizer.milestones=[1, 2]", "data.root=a b", "engine.sync_bn=true"]
    overrides += ["optimizer.lr=1", "model.options.shortcut_padding=both", "pruning.layers.conv1=0.5"]
    config = load_config(path, overrides)
    assert config.model.name == "resnet20"
    assert config.model.options == {"shortcut_padding": "both"}
    assert config.optimizer.milestones == (1, 2)
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.data.root == "a b"
    assert config.engine.sync_bn is True
    assert config.pruning.layers == {"conv1": 0.5}
    assert TrainConfig(epochs=3).folder == Path("runs/run-seed0")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prunning.rate=0.4", "prunning is no setting. Did you mean pruning?"),
        ("pruning.rat=0.4", "pruning.rat is no setting. Did you mean rate? Known: pruning.method"),
        ("epochs=many", "epochs='many' is a str: it must be a whole number"),
        ("epochs=1.5", "epochs=1.5 is a float: it must be a whole number"),
        ("epochs=true", "epochs=True is a bool: it must be a whole number"),
        ("epochs=0", "epochs=0 is not a count of epochs"),
        ("pruning.rate=1.5", "pruning.rate=1.5 is not a pruning rate"),
        ("pruning.method=soft", "pruning.method='soft' is unknown: use one of none, sfp, asfp, hard"),
        ("data.name=cifar11", "use one of cifar10, digits, imagefolder. Did you mean cifar10?"),
        ("data.batch=1", "data.batch=1 is too small: it must be at least 2"),
        ("model=resnet20", "model='resnet20': model is a table, set its entries, e.g. model.name=..."),
        ("optimizer.milestones=60", "optimizer.milestones=60 is a int: it must be a list"),
        ("optimizer.milestones=[60, 30]", "they must be epochs from 1 on, rising"),
        ("optimizer.momentum=0", "optimizer.nesterov=true needs momentum"),
        ("optimizer.momentum=-1", "optimizer.momentum=-1.0: it must be at least 0 and below 1"),
        ("optimizer.momentum=2", "optimizer.momentum=2.0: it must be at least 0 and below 1"),
        ("optimizer.momentum=nan", "optimizer.momentum=nan: it must be at least 0"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1.0: it must be at least 0"),
        ("optimizer.weight_decay=nan", "optimizer.weight_decay=nan: it must be at least 0"),
        ("optimizer.gamma=-1", "optimizer.gamma=-1.0: it must lie above 0"),
        ("optimizer.gamma=nan", "optimizer.gamma=nan: it must lie above 0"),
        ("optimizer.warmup_epochs=-3", "optimizer.warmup_epochs=-3 is too small: it must be at least 0"),
        ("optimizer.warmup=rmap", "optimizer.warmup='rmap' is unknown"),
        ("optimizer.warmup=ramp", "needs epochs to rise in: set optimizer.warmup_epochs=5"),
        ("optimizer.warmup_lr=-1", "optimizer.warmup_lr=-1.0 is not a learning rate"),
        ("optimizer.warmup_lr=nan", "optimizer.warmup_lr=nan is not a learning rate"),
        ("data.std=[0, 1, 1]", "data.std=[0.0, 1.0, 1.0]: it must be 3 numbers of 255, one a channel, above 0"),
        ("data.mean=[nan, 1, 1]", "data.mean=[nan, 1.0, 1.0]: it must be 3 numbers of 255"),
        ("data.mean=[120]", "data.mean=[120.0]: it must be 3 numbers of 255"),
        ("data={name='digits', std=[0]}", "data.mean and data.std are not for digits, which"),
        ("distill.model=resnet20", "distill.model='resnet20' without weights teaches nothing: set distill.weights"),
        ("seed=-1", "seed=-1 is not a seed"),
        ("seed", "'seed' is not an override: write key=value"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(AsfpError) as error:
        load_config(write(tmp_path, ""), [override])
    assert message in str(error.value)


def test_files_that_are_not_recipes(tmp_path: Path) -> None:
    with pytest.raises(AsfpError, match=r"there is no recipe .*mime.toml. Did you mean mine.toml\?"):
        load_config(write(tmp_path, "").with_name("mime.toml"))
    with pytest.raises(AsfpError, match="is not a TOML file"):
        load_config(write(tmp_path, "epochs 3"))
    write(tmp_path, 'base = "a.toml"', "b.toml")
    with pytest.raises(AsfpError, match="is its own base"):
        load_config(write(tmp_path, 'base = "b.toml"', "a.toml"))
