"""Tables and figures that stand on no run of `asfp train`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asfp.reproduce.imagenet import imagenet_commands, imagenet_sheet
from asfp.reproduce.rate import rate_sheet
from asfp.reproduce.show import Sheet
from asfp.reproduce.speedup import speedup_sheet

SHEETS: dict[str, Callable[[Path], Sheet]] = {
    "table3": lambda results: imagenet_sheet(),
    "table4": speedup_sheet,
    "fig-rate": lambda results: rate_sheet(),
}
"""Name -> the table, given the folder of results."""

COMMANDS: dict[str, Callable[[Path, Path | None], tuple[str, ...]]] = {"table3": imagenet_commands}
"""Name -> the command of each row, given the folders of recipes and of the data."""
