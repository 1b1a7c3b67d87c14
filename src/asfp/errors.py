"""What asfp raises when the user, not the program, has to change something."""

from __future__ import annotations

import difflib
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


def nearest(name: str, known: Iterable[str], n: int = 3) -> str:
    """` Did you mean ...?` with the known names closest to `name`, or an empty string when none is close.

    >>> nearest("resnet65", ["resnet56", "resnet20", "vgg16"], n=1)
    ' Did you mean resnet56?'
    >>> nearest("x", ["resnet56"])
    ''
    """
    close = difflib.get_close_matches(name, list(known), n=n, cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else ""
