"""What an installed asfp looks like from outside."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import asfp

ROOT = Path(__file__).parent.parent


def test_import_is_light() -> None:
    heavy = "lightning", "timm", "plotly", "openvino", "sklearn", "matplotlib", "torchvision", "pandas", "scipy"
    code = f"import asfp, sys; print(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_names_load_when_they_are_used() -> None:
    code = "import asfp, sys; early = 'torch' in sys.modules; asfp.SoftPruner; asfp.trace.trace; print(early)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
    assert set(asfp._HOMES) | {"__version__"} == set(asfp.__all__) <= set(dir(asfp))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        asfp.nothing  # noqa: B018


def test_version_is_the_installed_one() -> None:
    assert asfp.__version__ == metadata.version("asfp")


def test_public_names_exist_and_are_sorted() -> None:
    assert [name for name in asfp.__all__ if not hasattr(asfp, name)] == []
    assert len(set(asfp.__all__)) == len(asfp.__all__)


def test_package_is_typed_and_licensed() -> None:
    assert (ROOT / "src/asfp/py.typed").exists()
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    assert metadata.metadata("asfp")["License-Expression"] == "Apache-2.0"


def test_ranges_stay_open_and_constraints_fit_them() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    extras = [r for group in project["optional-dependencies"].values() for r in group]
    for text in project["dependencies"] + extras:
        requirement = Requirement(text)
        assert {clause.operator for clause in requirement.specifier} == {">="}, f"{text} has more than a lower bound"
        assert requirement.specifier.contains(pinned[requirement.name]), f"{text} excludes the pinned version"


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_documents_link_to_files_that_exist(name: str) -> None:
    import re

    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text()):
        if "://" not in target:
            assert (ROOT / target).exists(), f"{name} links to {target}"


def test_changelog_has_this_version() -> None:
    assert f"## [{asfp.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
