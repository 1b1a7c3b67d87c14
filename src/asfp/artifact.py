"""Save and load compact models: one safetensors file of weights, with plan and architecture in its metadata.

Nothing in a file is run: the architecture is a name out of a fixed table and plain options, the structure comes from
the plan, and a checksum over all of it is compared before anything is built.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asfp.architecture import Architecture, build_architecture, recorded
from asfp.compaction import CompactModule, Plan, apply
from asfp.errors import AsfpError
from asfp.trace import Leaf, is_channels_last

FORMAT = "asfp-compact-1"
KEYS = {"format", "plan", "architecture", "channels_last", "sha256"}
LARGEST_HEADER = 64 * 2**20
LARGEST_INPUT = 2**27
"""Numbers in all inputs that a plan was made for."""


def save(compact: CompactModule, path: str | os.PathLike[str], model: str | None = None, **options: Any) -> None:
    """Write a compact model to one safetensors file, whole or not at all; `asfp.load(path)` gives it back.

    `model` and `options` are what `asfp.create_model` was called with, where the compact model does not know itself.
    Without them the file loads as `asfp.load(path, model=TheNetwork())`.

    >>> import asfp
    >>> small = asfp.compact(asfp.create_model("resnet8", num_classes=5), torch.zeros(1, 3, 32, 32))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asfp.save(small, f"{folder}/small.safetensors", model="resnet8", num_classes=5)
    ...     asfp.load(f"{folder}/small.safetensors").get_submodule("linear")
    Linear(in_features=64, out_features=5, bias=True)
    """
    path = _path(path)
    if not isinstance(compact, CompactModule):
        raise AsfpError(f"save expects what asfp.compact returned, got {type(compact).__name__}")
    if options and model is None:
        raise AsfpError(f"save got options {sorted(options)} of no model: pass model=, the name given to create_model")
    architecture = recorded(compact.meta.get("created_as"))
    if model is not None:
        architecture = Architecture(model, options)
        architecture.check()
    if architecture is not None and not _made_as(compact, architecture):
        if model is not None:
            raise AsfpError(
                f"this model was not cut from {model}{dict(options) or ''} as it is built: leave out model=, and load "
                "the file with model=, the network itself"
            )
        architecture = None  # it was changed after it was built
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in compact.state_dict().items()}
    metadata = {
        "format": FORMAT,
        "plan": compact.plan.to_json(),
        "architecture": architecture.to_json() if architecture is not None else "",
        "channels_last": str(is_channels_last(compact)),
    }
    metadata["sha256"] = checksum(tensors, metadata)
    if not path.parent.is_dir():
        raise AsfpError(f"there is no folder {str(path.parent)!r} to save {path.name} in: make it first")
    _write(path, tensors, metadata)


def load(
    path: str | os.PathLike[str], model: nn.Module | None = None, leaf_modules: Sequence[Leaf] = ()
) -> CompactModule:
    """The compact model of a file, in evaluation mode: bit for bit the one that was saved.

    For a network of your own give its dense architecture, `asfp.load(path, model=MyNet())`; its weights do not matter
    and it is not changed. A file that is damaged, of another format or for another architecture raises AsfpError.

    >>> import asfp
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asfp.save(asfp.compact(net, torch.zeros(1, 3, 8, 8)), f"{folder}/net.safetensors")
    ...     again = asfp.load(f"{folder}/net.safetensors", model=net)
    >>> bool((again(torch.ones(1, 3, 8, 8)) == net(torch.ones(1, 3, 8, 8))).all())
    True
    """
    path = _path(path)
    if model is not None and not isinstance(model, nn.Module):
        raise AsfpError(f"model={model!r} is not a torch.nn.Module: pass the dense network itself, e.g. model=MyNet()")
    metadata, tensors = _read(path)
    plan = _plan(path, metadata["plan"])
    if model is None:
        if not metadata["architecture"]:
            raise AsfpError(
                f"{path} does not say how to build {plan.model}: pass the dense network, "
                f"asfp.load({str(path)!r}, model={plan.model}(...))"
            )
        model = build_architecture(path, metadata["architecture"])
    try:
        compact = apply(plan, model, leaf_modules=leaf_modules)
    except AsfpError as error:
        raise AsfpError(f"{path}: {error}") from error
    except Exception as error:  # the plan is the file's word: whatever it does to the rewriter is its fault
        raise AsfpError(
            f"{path} holds a plan that does not fit {type(model).__name__} ({error}): save it again"
        ) from error
    _fill(path, compact, tensors)
    compact.meta["created_as"] = getattr(model, "created_as", None)  # so that it can be saved again
    if metadata["channels_last"] == "True":
        compact = compact.to(memory_format=torch.channels_last)
    return compact.eval()


def _path(path: Any) -> Path:
    try:
        if not os.fspath(path) or "\0" in os.fsdecode(path):
            raise TypeError("it is empty or holds a NUL")
        return Path(os.fsdecode(path))
    except TypeError as error:
        raise AsfpError(f"{path!r} is not the path of a file: give one such as 'model.safetensors'") from error


def _made_as(compact: CompactModule, architecture: Architecture) -> bool:
    """Whether the plan fits the network that the architecture builds, settings and all."""
    try:
        dense = build_architecture(Path("it"), architecture.to_json())
        again = apply(compact.plan, dense, leaf_modules=compact.meta.get("leaf_modules", ()))
    except AsfpError:
        return False
    return again.state_dict().keys() == compact.state_dict().keys()


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 over names, shapes, types and bytes of all tensors and over the metadata, in sorted order.

    >>> checksum({}, {"format": FORMAT}) == checksum({}, {"format": FORMAT, "sha256": "anything"})
    True
    """
    digest = hashlib.sha256()
    for key in sorted(metadata.keys() - {"sha256"}):
        digest.update(json.dumps([key, metadata[key]]).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Under another name first, and renamed when it is whole and on the disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
        part = Path(name)
        os.close(handle)
        save_file(tensors, part, metadata)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.chmod(0o666 & ~_umask())
        part.replace(path)
    except (SafetensorError, OSError) as error:
        why = getattr(error, "strerror", None) or error
        fix = "free the space or choose another file"
        if isinstance(error, IsADirectoryError):
            fix = "give the file to save in it"
        raise AsfpError(f"{path} could not be written ({why}): {fix}") from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors, once they are known to be as they were written."""
    from safetensors import SafetensorError, safe_open

    _check_size(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            _check_metadata(path, metadata)
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError, OverflowError) as error:
        if isinstance(error, AsfpError):
            raise
        raise AsfpError(f"{path} is damaged or not a safetensors file ({error}): copy or save it again") from error
    if checksum(tensors, metadata) != metadata["sha256"]:
        raise AsfpError(f"{path} is damaged: its checksum does not match its content; copy or save it again")
    return metadata, tensors


def _check_size(path: Path) -> None:
    if not os.path.isfile(path):  # noqa: PTH113  (False, and no error, for what is too long for a path)
        if os.path.isdir(path):  # noqa: PTH112
            raise AsfpError(f"{str(path)!r} is a folder: give the file in it that was saved with asfp.save")
        raise AsfpError(f"there is no file {str(path)!r}: give the path of a model saved with asfp.save")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
    header = struct.unpack("<Q", start)[0] if len(start) == 8 else None
    if header is None or header > size - 8:
        raise AsfpError(f"{path} is truncated or not a safetensors file ({size} bytes): copy or save it again")
    if header > LARGEST_HEADER:
        raise AsfpError(f"{path} has a header of {header} bytes, more than the {LARGEST_HEADER} allowed")


def _check_metadata(path: Path, metadata: Mapping[str, str]) -> None:
    found = metadata.get("format")
    if found != FORMAT:
        what = f"has the format {found[:40]!r}" if found else "was not written by asfp.save"
        raise AsfpError(f"{path} {what}; this version of asfp reads {FORMAT!r}")
    if set(metadata) != KEYS:
        raise AsfpError(f"{path} is damaged: its metadata has {sorted(metadata)} instead of {sorted(KEYS)}")


def _plan(path: Path, text: str) -> Plan:
    try:
        plan = Plan.from_json(text)
        _check_plan(plan)
    except (AsfpError, RecursionError, TypeError, AttributeError) as error:
        raise AsfpError(f"{path} holds no readable plan ({str(error)[:200]}): save it again") from error
    return plan


def _check_plan(plan: Plan) -> None:
    """What a plan holds, type by type; the sizes of its inputs are bounded because tensors are made of them."""
    for layer in plan.layers:
        counts = (
            layer.in_before,
            layer.in_after,
            layer.out_before,
            layer.out_after,
            layer.macs_before,
            layer.macs_after,
        )
        _expect(all(type(n) is int and n >= 0 for n in counts), "its layers have sizes that are not counts")
    words = [
        w for x in (*plan.layers, *plan.barriers, *plan.folded) for w in vars(x).values() if not isinstance(w, int)
    ]
    words += [plan.signature, *(w for pair in [*plan.layouts.items(), *plan.facts.items()] for w in pair)]
    _expect(all(isinstance(word, str) for word in words), "it has something else where words should be")
    _expect(type(plan.constant_outputs) is int, "constant_outputs is not a number")
    _expect(0 < len(plan.inputs) <= 64, f"it has {len(plan.inputs)} inputs")
    total = 0
    for shape in plan.inputs:
        size = 1
        for n in shape:
            _expect(0 < n <= LARGEST_INPUT, f"an input has the size {n}")
            size *= n
        total += size
        _expect(len(shape) <= 8 and total <= LARGEST_INPUT, f"an input has the shape {shape[:8]}")


def _expect(fine: bool, problem: str) -> None:
    if not fine:
        raise AsfpError(problem)


def _fill(path: Path, compact: CompactModule, tensors: dict[str, Tensor]) -> None:
    own = compact.state_dict(keep_vars=True)
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())[:3]
        raise AsfpError(f"{path} holds other tensors than its plan makes ({', '.join(odd)}, ...): save it again")
    for name, target in own.items():
        given = tensors[name]
        if target.shape != given.shape or target.is_floating_point() != given.is_floating_point():
            shapes = f"{given.dtype} {tuple(given.shape)} instead of {target.dtype} {tuple(target.shape)}"
            raise AsfpError(f"{path}: {name} is {shapes}; the file does not fit its plan or the given network")
        target.data = target.data.to(given.dtype)  # first, so that copying rounds nothing and tied weights stay tied
    compact.load_state_dict(tensors, strict=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """A rename is on the disk only when its folder is; where folders cannot be opened there is nothing to do."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
