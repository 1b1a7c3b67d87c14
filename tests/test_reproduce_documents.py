"""The tables in README.md and docs/results.md are those of the records, and cannot be edited by hand unnoticed."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean, stdev

import pytest
from typer.testing import CliRunner

from asfp import AsfpError
from asfp.cli import app
from asfp.reproduce import NAMES
from asfp.reproduce.definition import dense, pruned
from asfp.reproduce.plan import Places, find_recipes
from asfp.reproduce.records import load_records
from asfp.reproduce.write import DOCUMENTS, filled, write_documents
from reproduction import put

ROOT = Path(__file__).parent.parent
PLACES = Places(find_recipes(), ROOT / "results")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_match_the_records(name: str) -> None:
    text = (ROOT / name).read_text()
    assert text.count("<!-- results:") >= 1
    assert filled(text, PLACES, load_records(PLACES.results)) == text, (
        f"{name} is not as recorded: asfp reproduce --write"
    )


SAID = {  # what the text says of runs, outside the tables
    ("README.md", "{} on ResNet-56 (three seeds)"): "resnet56-asfp-cosine",
    ("docs/results.md", "the cosine has {} against"): "resnet56-asfp-cosine",
    ("docs/results.md", "against {} of the recipe's steps"): "resnet56-asfp",
    ("docs/results.md", "of pruned filters gave most, {} against"): "resnet20-asfp-momentum",
    ("docs/results.md", "Filters frozen after epoch 60: {} on"): "resnet20-asfp-freeze140",
    ("docs/results.md", "At 30 %, with one seed, ASFP has {} where"): "resnet56-asfp-rate0.3",
    ("docs/results.md", "At 10 % it has less, {}, with"): "resnet56-asfp-rate0.1",
    ("docs/results.md", "at 20 % less again, {}:"): "resnet56-asfp-rate0.2",
    ("docs/results.md", "Hard pruning has {}, 0.40 points below"): "resnet56-hard-pretrained",
    ("docs/results.md", "the momentum gave nothing: {} by"): "resnet56-asfp-momentum",
    ("docs/results.md", "ours has {} from scratch and"): "vgg16-asfp",
    ("docs/results.md", "from scratch and PFEC's {};"): "vgg16-hard-l1",
    ("docs/results.md", "ahead at either rate, {} against"): "vgg16-hard-pretrained-l1",
    ("docs/results.md", "against {} at 0.001, "): "vgg16-asfp-pretrained",
    ("docs/results.md", "at 0.001, {} against"): "vgg16-hard-pretrained-l1-lr0.1",
    ("docs/results.md", "against {} at 0.1."): "vgg16-asfp-pretrained-lr0.1",
    ("docs/results.md", "The unpruned network has {} where"): "vgg16",
    ("docs/results.md", "Tuned for 160 epochs, PFEC's has {} and"): "vgg16-hard-pretrained-l1-epochs160-lr0.1",
    ("docs/results.md", "and ours {} at 0.1, PFEC's"): "vgg16-asfp-pretrained-epochs160-lr0.1",
    ("docs/results.md", "at 0.1, PFEC's {} and"): "vgg16-hard-pretrained-l1-epochs160",
    ("docs/results.md", "and ours {} at 0.001. So"): "vgg16-asfp-pretrained-epochs160",
    ("docs/results.md", "Unpruned it has {}, above"): "resnet110",
    ("docs/results.md", "SFP has {}, as in the paper"): "resnet110-sfp",
    ("docs/results.md", "ASFP has {}, a point below"): "resnet110-asfp",
    ("docs/results.md", "coupled has {}, independent"): "resnet56-asfp-rate0.345-coupled",
    ("docs/results.md", "independent {} and nested"): "resnet56-asfp",
    ("docs/results.md", "and nested {}: coupled"): "resnet56-asfp-rate0.345-nested",
    ("docs/results.md", "as a teacher have {} with"): "resnet56-asfp-cosine-distill",
    ("docs/results.md", "from trained weights {}, below"): "resnet56-asfp-pretrained-cosine-distill",
    ("docs/results.md", "the best is the cosine, {} with"): "resnet56-asfp-cosine",
    ("docs/results.md", "the paper's recipe, {}, and hard"): "resnet56-asfp-pretrained",
    ("docs/results.md", "and hard pruning, {}, which"): "resnet56-hard-pretrained",
}


@pytest.mark.parametrize(("where", "label"), SAID.items())
def test_the_text_says_what_the_records_have(where: tuple[str, str], label: str) -> None:
    document, sentence = where
    records = load_records(PLACES.results).values()
    found = [100 * r["result"]["accuracy_compact"] for r in records if r["name"] == label]
    assert found, label
    value = f"{mean(found):.2f}" + (f" ± {stdev(found):.2f}" if len(found) > 1 else "")
    assert sentence.format(value) in " ".join((ROOT / document).read_text().split())


EARLIER = ("c7ebec0", "ec60f39", "e24ea17", "f065c57", "b1229d6")
"""The commits whose records are of the earlier kernels."""


def test_the_runs_of_the_earlier_kernels_are_those_that_the_text_names() -> None:
    records = load_records(PLACES.results).values()
    found = {(r["name"], r["seed"]) for r in records if r["name"].startswith("resnet") and r["commit"][:7] in EARLIER}
    three = ("resnet56", "resnet56-sfp", "resnet56-asfp", "resnet56-hard")
    one = ("sfp-pretrained", "asfp-pretrained", "asfp-l1", "asfp-geometric_median", "asfp-warmup")
    said = {(name, seed) for name in three for seed in range(3)} | {(f"resnet56-{name}", 0) for name in one}
    said |= {(f"resnet56-asfp-rate0.345-{name}", 0) for name in ("nested", "coupled")}
    said |= {(f"resnet20{name}", 0) for name in ("", "-sfp", "-asfp", "-asfp-cosine", "-asfp-warmup", "-asfp-distill")}
    assert found == said
    blocks = {(r["name"], r["seed"]) for r in records if "fused blocks" in r["hardware"]["step"]}
    assert not blocks & found


LAST = {  # what the text says of the accuracy before and after the last pruning
    "resnet56-asfp-inner-cosine": "three seeds of ResNet-56 had {} before the last pruning and {} after it",
    "resnet20-asfp-inner": "ResNet-20 {} and {};",
    "resnet56-asfp-pretrained-inner": "from trained weights {} and {}, and at",
    "resnet56-asfp-pretrained-inner-cosine-lr0.1": "0.1 with a cosine {} and {}.",
}


@pytest.mark.parametrize(("label", "sentence"), LAST.items())
def test_the_text_says_what_the_last_pruning_took(label: str, sentence: str) -> None:
    found = [r for r in load_records(PLACES.results).values() if r["name"] == label]
    results = [r["result"] for r in sorted(found, key=lambda r: r["config"]["seed"])]
    said = (
        [f"{100 * result[key]:.2f}" for result in results]
        for key in ("accuracy_before_last_pruning", "accuracy_compact")
    )
    listed = (" and ".join([", ".join(values[:-1]), values[-1]]) if values[1:] else values[0] for values in said)
    assert sentence.format(*listed) in " ".join((ROOT / "docs/results.md").read_text().split())


def test_a_number_changed_by_hand_is_noticed() -> None:
    text, records = (ROOT / "README.md").read_text(), load_records(PLACES.results)
    block = re.search(r"<!-- results:summary -->.*?<!-- /results -->", text, re.DOTALL)
    assert block is not None
    number = re.search(r"\d\d\.\d\d", block[0])
    assert number is not None
    wrong = text.replace(block[0], block[0].replace(number[0], "99.99", 1))
    assert filled(wrong, PLACES, records) != wrong
    assert filled(wrong, PLACES, records) == filled(text, PLACES, records)


def test_results_show_every_table_and_figure() -> None:
    names = re.findall(r"<!-- results:(\S+) -->", (ROOT / "docs/results.md").read_text())
    assert sorted([*names, "summary"]) == sorted(NAMES)


def test_writing_fills_what_is_between_the_markers_alone(tmp_path: Path) -> None:
    put(tmp_path / "results", dense("resnet56"), 0, 0.94)
    put(tmp_path / "results", pruned("resnet56", "asfp"), 0, 0.9277)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results:table1 -->\nold\n<!-- /results -->\nafter\n")
    places = Places(find_recipes(), tmp_path / "results", tmp_path / "runs")
    assert write_documents(tmp_path, places, ("page.md",)) == [page]
    text = page.read_text()
    assert text.startswith("before\n<!-- results:table1 -->\n\n| network |")
    assert text.endswith("<!-- /results -->\nafter\n")
    assert "| ResNet-56 | ASFP | scratch | 40 % | 92.77 (2 not yet run) | 1 | 1.23 | 92.44 ± 0.07 | 1.15 |" in text
    lost = "12 of them from weights that were not kept and are to be made again"
    assert f"62 more runs are planned, {lost}: `asfp reproduce table1`." in text
    assert "SFP | scratch | 30 %" not in text
    assert write_documents(tmp_path, places, ("page.md",)) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "one\n<!-- results:table1 -->\n",
            "a marker has no partner: <!-- results:table1 --> in line 2 has no <!-- /res",
        ),
        (
            "<!-- results:table1 -->\n<!-- results:table2 -->\n<!-- /results -->\n",
            "results:table1 --> in line 1 has no",
        ),
        ("<!-- /results -->\n", "a marker has no partner: <!-- /results --> in line 1 has no <!-- results:NAME -->"),
        ("<!-- results:table9 -->\n<!-- /results -->\n", "there is no 'table9' to reproduce"),
        ("<!-- results:table1 --> x\n<!-- /results -->\n", "<!-- results:table1 --> x in line 1 is no marker: write"),
        ("<!-- results:table1 -->\n<!-- /results-->\n", "has no <!-- /results --> behind it"),
        ("<!-- results: -->\n<!-- /results -->\n", "<!-- results: --> in line 1 is no marker"),
    ],
)
def test_markers_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    put(tmp_path / "results", dense("resnet56"), 0, 0.94)
    good = "<!-- results:fig-rate -->\n<!-- /results -->\n"
    (tmp_path / "good.md").write_text(good)
    (tmp_path / "odd.md").write_text(text)
    places = Places(find_recipes(), tmp_path / "results")
    with pytest.raises(AsfpError) as caught:
        write_documents(tmp_path, places, ("good.md", "odd.md"))
    assert str(caught.value).startswith(f"{tmp_path / 'odd.md'}: ")
    assert message in str(caught.value)
    assert (tmp_path / "good.md").read_text() == good


@pytest.mark.parametrize("there", [False, True], ids=["no folder", "no records"])
def test_without_records_the_documents_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    page = "<!-- results:table1 -->\nkept\n<!-- /results -->\n"
    (tmp_path / "docs").mkdir()
    for name in DOCUMENTS:
        (tmp_path / name).write_text(page)
    if there:
        (tmp_path / "results" / "cifar10").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for option in ([], ["--results", str(tmp_path / "results")]):
        done = CliRunner().invoke(app, ["reproduce", "--write", *option])
        assert done.exit_code == 2
        missing = "there is no such folder" if option and not there else "there are no records in "
        assert missing in done.stderr
    assert {(tmp_path / name).read_text() for name in DOCUMENTS} == {page}


def test_writing_elsewhere_than_in_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["reproduce", "--write"])
    assert done.exit_code == 2
    assert "there is no README.md: run this in the folder of the repository" in done.stderr
