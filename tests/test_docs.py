"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import asfp

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
MODULES = sorted(m.name for m in pkgutil.walk_packages(asfp.__path__, "asfp."))


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    failures, _ = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert failures == 0


@pytest.mark.parametrize("name", [n for n in asfp.__all__ if callable(getattr(asfp, n))])
def test_public_name_has_an_example(name: str) -> None:
    doc = getattr(asfp, name).__doc__
    assert doc is not None
    if not (isinstance(getattr(asfp, name), type) and issubclass(getattr(asfp, name), asfp.errors.AsfpError)):
        assert ">>>" in doc, f"asfp.{name} has no example in its docstring"
