"""What asfp raises when the user, not the program, has to change something."""

from __future__ import annotations

import difflib
import errno
import signal
from collections.abc import Iterable


class AsfpError(ValueError):
    """A mistake in what asfp was given: the message holds the value, what is allowed, and the fix.

    >>> from asfp import AsymptoticSchedule
    >>> AsymptoticSchedule(goal=1.5, epochs=10)
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: goal=1.5 is not a pruning rate: it must lie strictly between 0 and 1, e.g. goal=0.4
    """


class TraceError(AsfpError):
    """The model's forward cannot be traced into a graph; the message names the line and the ways out."""


class VerificationError(AsfpError):
    """A compact model does not compute what the original does; the message names the first layer that differs."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, at a moment from which the work can go on; the message says how.

    `code` is the exit code that shells expect; `silent` where another process of the same run says it already.

    >>> Interrupted("Stopped.", signal.SIGTERM).code, Interrupted("Stopped.").code
    (143, 130)
    """

    def __init__(self, message: str, number: int = signal.SIGINT, *, silent: bool = False) -> None:
        super().__init__(message)
        self.code, self.silent = 128 + int(number), silent


def out_of_room(error: OSError) -> bool:
    """Whether a disk or a quota is full, or a file larger than allowed.

    >>> out_of_room(OSError(errno.ENOSPC, "No space left on device")), out_of_room(FileExistsError())
    (True, False)
    """
    return error.errno in {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


def nearest(name: str, known: Iterable[str], n: int = 3) -> str:
    """` Did you mean ...?` with the known names closest to `name`, or an empty string when none is close.

    >>> nearest("resnet65", ["resnet56", "resnet20", "vgg16"], n=1)
    ' Did you mean resnet56?'
    >>> nearest("x", ["resnet56"])
    ''
    """
    close = difflib.get_close_matches(name, list(known), n=n, cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else ""
