"""asfp: asymptotic soft filter pruning, for convolutional networks that are smaller and really faster."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from asfp.version import __version__

if TYPE_CHECKING:
    from asfp.artifact import load, save
    from asfp.compaction import Plan, Verification, compact, verify
    from asfp.errors import AsfpError, TraceError, VerificationError
    from asfp.export import export_onnx, export_openvino, export_pt2
    from asfp.measurement import Measurement, measure
    from asfp.models import create_model
    from asfp.pruner import HardPruner, SoftPruner
    from asfp.schedule import AsymptoticSchedule, ConstantSchedule, CubicSchedule, LinearSchedule
    from asfp.steps import PruneStep

# Where each public name lives: loaded when first used, so that `asfp --help` need not wait for torch.
_HOMES = {
    "AsfpError": "errors",
    "AsymptoticSchedule": "schedule",
    "ConstantSchedule": "schedule",
    "CubicSchedule": "schedule",
    "HardPruner": "pruner",
    "LinearSchedule": "schedule",
    "Measurement": "measurement",
    "Plan": "compaction",
    "PruneStep": "steps",
    "SoftPruner": "pruner",
    "TraceError": "errors",
    "Verification": "compaction",
    "VerificationError": "errors",
    "compact": "compaction",
    "create_model": "models",
    "export_onnx": "export",
    "export_openvino": "export",
    "export_pt2": "export",
    "load": "artifact",
    "measure": "measurement",
    "save": "artifact",
    "verify": "compaction",
}

__all__ = [
    "AsfpError",
    "AsymptoticSchedule",
    "ConstantSchedule",
    "CubicSchedule",
    "HardPruner",
    "LinearSchedule",
    "Measurement",
    "Plan",
    "PruneStep",
    "SoftPruner",
    "TraceError",
    "Verification",
    "VerificationError",
    "__version__",
    "compact",
    "create_model",
    "export_onnx",
    "export_openvino",
    "export_pt2",
    "load",
    "measure",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"asfp.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and find_spec(f"asfp.{name}") is not None:
        return import_module(f"asfp.{name}")
    raise AttributeError(f"module 'asfp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
