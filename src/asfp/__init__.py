"""asfp: asymptotic soft filter pruning, for convolutional networks that are smaller and really faster."""

from asfp.artifact import load, save
from asfp.compaction import Plan, Verification, compact, verify
from asfp.errors import AsfpError, TraceError, VerificationError
from asfp.export import export_onnx, export_openvino, export_pt2
from asfp.measurement import Measurement, measure
from asfp.models import create_model
from asfp.pruner import HardPruner, SoftPruner
from asfp.schedule import AsymptoticSchedule, ConstantSchedule, CubicSchedule, LinearSchedule
from asfp.steps import PruneStep
from asfp.version import __version__

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
