"""asfp: asymptotic soft filter pruning, for convolutional networks that are smaller and really faster."""

from asfp.errors import AsfpError, TraceError, VerificationError
from asfp.models import create_model
from asfp.version import __version__

__all__ = [
    "AsfpError",
    "TraceError",
    "VerificationError",
    "__version__",
    "create_model",
]
