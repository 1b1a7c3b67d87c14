"""Fake tensors: operations that compute shapes alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def run_fake(mode: FakeTensorMode, module: Any, args: Any, kwargs: Any) -> Any:
    """A module's forward on fake values; one that looks at values is run on zeros, for the shape of its result.

    Forward, and not the module: some hooks would store fake tensors in it.
    """
    if type(module) in NORMS and len(args) == 1 and not kwargs:  # torch takes 8 ms to find this out
        module._check_input_dim(args[0])
        if module.num_features != args[0].shape[1]:
            raise ValueError(f"{module.num_features} features expected, got {args[0].shape[1]}")
        return torch.empty_like(args[0])
    try:
        return module.forward(*args, **kwargs)
    except DataDependentOutputException:
        with unset_fake_temporarily(), torch.no_grad():
            real = pytree.tree_map(_zeros, (args, kwargs))
            result = module.forward(*real[0], **real[1])
        return fakes(mode, result)


def _zeros(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device) if isinstance(value, Tensor) else value


def fakes(mode: FakeTensorMode, value: Any) -> Any:
    """The same value, its tensors fake."""
    return pytree.tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, value)


@contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """Operations compute shapes alone; what fails raises, and does not write to the log as well.

    >>> with fake_mode():
    ...     (torch.zeros(2, 3) @ torch.zeros(3, 1_000_000_000_000)).shape
    torch.Size([2, 1000000000000])
    """
    with quiet(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        yield mode


@contextmanager
def quiet() -> Iterator[None]:
    """What fails raises; torch would write it to its log as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
