"""How the kernels divide maps into tiles, as in tile.cuh, and the kernels for one size of maps."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from asfp.train.cuda.runtime import CudaLauncher, Launcher

SOURCES = tuple(
    Path(__file__).parent / name for name in ("warp.cuh", "tile.cuh", "norm.cuh", "blocks.cu", "weights.cu")
)
KERNELS = (
    *("forward_first", "forward_second", "backward_first", "backward_second", "weight_first", "weight_second"),
    *("statistics", "end_of_block", "begin_backward", "norm_gradient", "sum_parts", "prepare"),
)
WIDTHS = (16, 32, 64)
CHUNKS = {16: 128, 32: 64, 64: 32}
"""Channels -> blocks that share out the tiles of a weight's gradient; each writes one, to be added up."""


class Geometry:
    """Tiles of maps of (height, width) with so many channels.

    >>> tiles = Geometry(16, 32, 32)
    >>> tiles.rows, tiles.images, tiles.tiles(128), tiles.fits
    (16, 1, 256, True)
    >>> Geometry(16, 24, 24).fits, Geometry(24, 32, 32).fits
    (False, False)
    """

    def __init__(self, channels: int, height: int, width: int) -> None:
        self.channels, self.height, self.width = channels, height, width
        self.parts = 2 if channels == 64 else 1
        self.threads = 128 if channels == 64 else 256
        self.pixels = {16: 512, 32: 256, 64: 128}.get(channels, 0)
        self.rows = min(self.pixels // width, height)
        self.images = self.pixels // (self.rows * width) if self.rows else 0
        self.weights = 9 * channels * channels
        self.chunks = CHUNKS.get(channels, 0)
        self.squares = max(1, (channels // 16) ** 2 // 8)

    @property
    def fits(self) -> bool:
        """Whether tiles of whole rows cover the maps."""
        whole = bool(self.rows) and self.height % self.rows == 0 and self.pixels % (self.rows * self.width) == 0
        return self.channels in WIDTHS and whole and (self.images == 1 or self.rows == self.height)

    def _planes(self, pixels: int) -> int:
        """Bytes of `pixels` in planes of eight channels, which begin in different banks."""
        eights = self.channels // 8
        return (pixels + (8 // eights + 8 - pixels % 8) % 8) * eights * 16

    @property
    def tile_bytes(self) -> int:
        """Of a tile with its border; the outputs, which take its place, need less."""
        return self._planes(self.images * (self.rows + 2) * (self.width + 2))

    @property
    def weight_bytes(self) -> int:
        """Of shared memory for a weight's gradient: both tiles, later the sums of the warps that share a square."""
        shares = 8 // min(8, (self.channels // 16) ** 2)
        return max(self.tile_bytes + self._planes(self.pixels), shares // 2 * (8 // shares) * 9 * 256 * 4)

    def tiles(self, images: int) -> int:
        """Of a batch."""
        return -(-images // self.images) * (self.height // self.rows)


def source(channels: int, height: int, width: int) -> str:
    """The kernels for one width and size of maps.

    >>> source(16, 32, 32).splitlines()[1]
    '#define C 16'
    """
    head = f"typedef unsigned int u32;\n#define C {channels}\n#define H {height}\n#define W {width}\n"
    return head + "".join(path.read_text(encoding="utf-8") for path in SOURCES)


def launcher(channels: int, height: int, width: int) -> Launcher:
    """The kernels for the current device, compiled once a process."""
    return _compiled(channels, height, width, torch.cuda.current_device())


@cache
def _compiled(channels: int, height: int, width: int, device: int) -> Launcher:
    return CudaLauncher(source(channels, height, width), KERNELS)
