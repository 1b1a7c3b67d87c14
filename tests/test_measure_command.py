"""`asfp measure`: the table, the JSON object, and mistakes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from asfp.cli import app


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["measure", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def test_json_has_every_key_and_the_papers_number() -> None:
    done = call("resnet20", "--rate", "0.4", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    keys = {"model", "rate", "macs_dense", "macs_paper", "cut_paper_percent", "macs_compact", "cut_compact_percent"}
    assert keys | {"params_dense", "params_compact", "macs_integer", "cut_integer_percent"} <= found.keys()
    assert (found["model"], found["rate"], found["macs_dense"]) == ("resnet20", 0.4, 40550400)
    assert round(found["cut_paper_percent"], 2) == 53.96
    assert found["params_compact"] < found["params_dense"] == 269722
    assert found == json.loads(call("resnet20@0.4", "--json").stdout)


def test_selection_and_alignment_by_option_or_in_the_name() -> None:
    found = json.loads(call("resnet20", "--rate", "0.4", "--selection", "coupled", "--align", "8", "--json").stdout)
    assert (found["selection"], found["align"], found["model"]) == ("coupled", 8, "resnet20")
    assert found["macs_compact"] == found["macs_integer"]
    assert found == json.loads(call("resnet20@0.4:coupled:8", "--json").stdout)
    assert found == json.loads(call("resnet20@0.4:8", "--selection", "coupled", "--json").stdout)
    plain = json.loads(call("resnet20@0.4", "--json").stdout)
    assert (plain["selection"], plain["align"]) == ("independent", 1)


def test_table_shows_every_count() -> None:
    done = call("resnet20", "--rate", "0.4")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "resnet20, input 1x3x32x32, 40 % of the filters pruned"
    assert [line.split()[0] for line in lines[2:]] == ["dense", "paper's", "whole", "compact"]
    assert "53.96 %" in lines[3]


def test_preset() -> None:
    found = json.loads(call("vgg16", "--preset", "pfec", "--json").stdout)
    assert (found["preset"], found["rate"]) == ("pfec", None)
    assert found["macs_paper"] == found["macs_compact"] == 206143488


@pytest.mark.parametrize("name", ["torchvision:mobilenet_v2", "timm:resnet18"])
def test_models_of_other_libraries(name: str) -> None:
    found = json.loads(call(name, "--rate", "0.3", "--size", "64", "--json").stdout)
    assert found["input_shape"] == [1, 3, 64, 64]
    assert 35 < found["cut_compact_percent"] < 50
    assert abs(found["cut_compact_percent"] - found["cut_integer_percent"]) < 3


def test_layers_sum_to_the_total() -> None:
    found = json.loads(call("resnet8", "--layers", "--json").stdout)
    assert sum(layer["macs_conv"] for layer in found["layers"]) == found["macs_dense"]
    assert sum(layer["params"] for layer in found["layers"]) == found["params_dense"]
    assert "stages" in call("resnet8", "--layers").stdout or "layer" in call("resnet8", "--layers").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet65"], "no model is named 'resnet65'"),
        (["resnet56", "--rate", "1.2"], "rate=1.2 is not a pruning rate"),
        (["resnet56@much"], "'much' is not a pruning rate"),
        (["resnet20@0.3", "--rate", "0.4"], "give the rate once"),
        (["resnet20@0.3:coupled", "--selection", "nested"], "give the selection once"),
        (["resnet20@0.3:8", "--align", "16"], "give the align once"),
        (["resnet20@0.3:copled"], "'copled' is not understood"),
        (["resnet20@0.3:8:nested"], "'nested' is not understood; write NAME@RATE/STREAMS:SELECTION:ALIGN"),
        (["resnet20@0.3:0"], "align=0 is not a number of filters"),
        (["resnet20", "--rate", "0.4", "--selection", "some"], "selection='some' is unknown"),
        (["resnet20", "--rate", "0.4", "--align", "0"], "align=0 is not a number of filters"),
        (["resnet20", "--align", "8"], "give --rate too"),
        (["resnet20", "--preset", "pfec"], "asfp measure vgg16 --preset pfec"),
        (["vgg16", "--preset", "best"], "preset='best' is unknown"),
        (["vgg16", "--preset", "pfec", "--rate", "0.4"], "leave out --rate"),
        (["gone.safetensors"], "there is no file 'gone.safetensors'"),
        (["resnet20", "--size", "big"], "size='big' is not an image size"),
        (["vgg16", "--size", "8"], "does not run on example_inputs"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(arguments: list[str], message: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_target_finds_the_rate() -> None:
    result = call("resnet8", "--target-macs", "0.5", "--selection", "nested", "--align", "4", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["model"] == "resnet8"
    assert found["met"] is True
    assert 0.2 < found["rate"] < 0.6
    assert (found["selection"], found["align"]) == ("nested", 4)
    timed = call("resnet8", "--target-latency", "0.95", "--engine", "torch")
    assert timed.exit_code == 0, timed.output
    assert "of the time on torch" in timed.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet8", "--target-macs", "1.5"], "between 0 and 1"),
        (["resnet8", "--target-macs", "0.5", "--target-latency", "0.5"], "not both"),
        (["resnet8", "--target-macs", "0.5", "--engine", "torch"], "goes with --target-latency"),
        (["resnet8", "--engine", "torch"], "--target-latency"),
        (["resnet8", "--search"], "these options go with a target"),
        (["resnet8", "--search", "--rate", "0.4"], "in the place of --rate"),
        (["resnet8", "--target-macs", "0.5", "--search", "--selection", "joint"], "selection='joint' is unknown"),
        (["resnet8", "--target-macs", "0.5", "--search", "--align", "0"], "align=0 is not a number"),
        (["resnet8", "--target-latency", "0.5", "--search", "--engine", "compile"], "latencies are predicted for"),
        (["resnet8", "--target-macs", "0.5", "--rate", "0.3"], "in the place of --rate"),
        (["resnet8@0.3", "--target-macs", "0.5"], "has a rate already"),
        (["resnet8", "--target-latency", "0.5", "--engine", "tensorrt"], "latencies are predicted for"),
        (["resnet8", "--target-macs", "0.5", "--align", "0"], "align"),
        (["resnet8@0.3:zeros"], "leave out :zeros"),
    ],
)
def test_targets_that_make_no_sense(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("target", ["--target-macs", "--target-latency"])
def test_a_search_compares_ways(target: str) -> None:
    arguments = ("resnet8", target, "0.8", "--engine", "torch", "--search", "--selection", "coupled")
    shown = call(*arguments, "--align", "16")
    assert shown.exit_code == 0
    title, header, line, *_ = shown.output.splitlines()
    assert title.startswith("resnet8: 80 % of the ")
    assert ("predicted" in header) == (target == "--target-latency")
    assert line.split()[:2] == ["coupled", "16"]
    found = json.loads(call(*arguments, "--json").output)
    assert found["model"] == "resnet8"
    assert sorted(way["align"] for way in found["found"]) == [1, 16, 32]
    assert {way["selection"] for way in found["found"]} == {"coupled"}
