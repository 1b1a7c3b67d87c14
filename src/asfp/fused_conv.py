"""A convolution that adds its bias, a residual and applies ReLU before it writes: one pass over memory on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asfp.compaction.layers import BorderBias

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What cuDNN has fused kernels for."""

FEW = 8
"""Convolutions that read fewer channels than this, as a network's first does, may read zeros beside them."""

WIDTHS = {torch.float16: 8, torch.bfloat16: 8}
"""To how many channels those are filled up on a GPU, by type: tensor cores load 16 bytes at once."""

LONGEST = 64
"""Their window's rows may have this many numbers for a kernel of our own."""

LARGEST = 25
"""Numbers in the window of a max pooling, at most, for a kernel of our own: it is written out for all of them."""

WIDEST = 512
"""More than the pixels of any kernel's tile, which may begin before the last one."""

SAME = 0.05
"""Fused and separate results may differ by this share of the range: more than rounding, less than a mistake."""

SLOWER = "separate kernels are faster"

MATMUL = "matmul"
"""A 1x1 convolution as cuBLAS's product of matrices, with bias and ReLU but no residual."""


class FusedConv(nn.Module):
    """relu(conv(x, w) + b), or relu(conv(x, w) + b + z), by one kernel where there is a GPU.

    That is cuDNN's, unless `take_faster` found a better one. On a CPU, under autocast, torch.compile or gradients it is
    computed by torch's separate operations; on a GPU too where cuDNN has no such kernel, and from then on: `fell_back`
    says why. The first result is compared with theirs.
    Our own kernel for few channels may let what is not finite in x spread one pixel further.
    With a `border` correction, what that adds is kept for the last size. For inference: the weights take no gradients,
    and are not to be changed by way of `.data`, which what is made of them does not notice.

    >>> conv = nn.Conv2d(3, 8, 3)
    >>> x = torch.randn(1, 3, 8, 8)
    >>> torch.equal(FusedConv(conv)(x), conv(x).relu()), FusedConv(conv).fell_back
    (True, '')
    """

    traced_whole = True  # one operation to a tracer
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, conv: nn.Conv2d, *, relu: bool = True, bias: Tensor | None = None, border: BorderBias | None = None
    ) -> None:
        super().__init__()
        assert conv.padding_mode == "zeros"
        assert not isinstance(conv.padding, str)
        bias = conv.bias if bias is None else bias
        if bias is None and relu:  # cuDNN's kernel adds one anyhow
            bias = conv.weight.new_zeros(conv.out_channels)
        self.weight = nn.Parameter(conv.weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.stride, self.padding, self.dilation = (_both(x) for x in (conv.stride, conv.padding, conv.dilation))
        self.groups = conv.groups
        self.relu, self.border = relu, border
        self.width: int | None = None
        """How many channels to fill the input up to; None for what WIDTHS says."""
        self.kernel: object = None
        """None for cuDNN's; MATMUL, for a 1x1 convolution; or the tile of a kernel of our own."""
        self.fell_back = ""
        self._checked = False
        self._one_pass = True
        self._weight: tuple[object, Tensor | None] = (None, None)
        self._map: tuple[object, Tensor | None] = (None, None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        if not self._by_hand(x, z):
            return self._separately(x, self.weight, z)
        alike = z is None or z.shape == self._shape(x)
        if self.kernel is not None and alike and self._has_own(x, z):
            return self._own(x, z)
        wide, weight = self._filled_up(x)
        if not self.relu or self.fell_back or not alike:
            return self._in_two(wide, weight, z) if alike else self._separately(wide, weight, z)
        try:
            if self._checked or torch.cuda.is_current_stream_capturing():
                return self._fused(wide, weight, z)
            result, reason = self._compared(wide, weight, z), "cuDNN's fused kernel gives another result"
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # no such kernel; a mistake in the shapes is told by what follows
            result, reason = None, (str(error).strip() or repr(error)).splitlines()[0]
        if result is None:
            result = self._separately(wide, weight, z)
            self.fell_back = reason
        self._checked = True
        return result

    def take_faster(self, x: Tensor, z: Tensor | None = None) -> bool:
        """On a GPU: time all ways to compute it on this input, and do it the fastest way from now on.

        By cuDNN's fused kernel; by a convolution and one pass behind it; with few input channels filled up to 4 or 8;
        by Triton kernels in tiles of several sizes; as a product of matrices by cuBLAS, where it is one. Ways that
        give another result are left out. False where nothing was timed.
        """
        if not self._by_hand(x, z):
            return False
        count = self.weight.shape[1]
        widths = [w for w in (4, 8) if count < FEW and self.groups == 1 and w > count]
        ways = ("", SLOWER) if self.relu and self.fell_back in ("", SLOWER) else (self.fell_back,)
        times: dict[tuple[str, int, object], float] = {}
        self.kernel, refused = None, self.fell_back
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            for width in (count, *widths):
                for way in ways:
                    self.fell_back, self.width, self._checked = way, width, False
                    taken = _time(lambda: self.forward(x, z))  # no hooks: they brought us here
                    times[self.fell_back, width, None] = taken
                    if self.fell_back != way:  # there is no such kernel, or it is wrong
                        refused = self.fell_back
                        break
            refused = refused if refused != SLOWER else ""
            expected = self._separately(x, self.weight, z)
            for kernel in self._kernels(x, z):
                self.kernel = kernel
                with suppress(Exception):  # compilers fail in many ways, and there are others to take
                    if _same(self._own(x, z), expected):
                        times[refused, count, kernel] = _time(lambda: self.forward(x, z))
        self.kernel = min(times, key=lambda way: times[way])[2]
        others = [way for way in times if way[2] is None]  # for inputs that the kernel is not for
        self.fell_back, self.width, _ = min(others, key=lambda way: times[way])
        return True

    def form(self, *given: Tensor | None) -> tuple[object, ...]:
        """What its time depends on: convolutions of the same form are best computed in the same way."""
        tensors = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in (*given, self.weight)]
        geometry = self.stride, self.padding, self.dilation, self.groups, self.relu
        return *tensors, *geometry, self.bias is None, None if self.border is None else id(self)

    def take_from(self, other: FusedConv) -> None:
        """Compute it in the way of another one, of the same form."""
        self.fell_back, self.width, self.kernel = other.fell_back, other.width, other.kernel
        self._checked = False

    def _by_hand(self, x: Tensor, z: Tensor | None) -> bool:
        """Whether cuDNN can be called by hand: plain tensors on a GPU, nothing that traces, casts or differentiates."""
        given = [t for t in (x, self.weight, self.bias, z) if t is not None]
        return (
            _is_plain(x)
            and not torch.is_autocast_enabled("cuda")
            and all(type(t) in (Tensor, nn.Parameter) and t.dtype == x.dtype and t.device == x.device for t in given)
            and not (torch.is_grad_enabled() and any(t.requires_grad for t in given))
            and bool(torch.backends.cudnn.enabled)
            and not torch.backends.cudnn.deterministic
        )

    def _compared(self, x: Tensor, weight: Tensor, z: Tensor | None) -> Tensor | None:
        """The fused result, or None where it is not that of separate kernels.

        torch passes the memory of the result as a residual times 0: what is left there must not matter, so leave NaNs.
        """
        expected = self._separately(x, weight, z)
        left = torch.full_like(expected, torch.nan)
        del left
        found = self._fused(x, weight, z)
        return found if _same(found, expected) else None

    def _fused(self, x: Tensor, weight: Tensor, z: Tensor | None) -> Tensor:
        if self.border is not None:
            z = self._corrections(self.border, x, weight) if z is None else self.border(z, x)
        z = z if z is None else z.contiguous(memory_format=_layout(x, weight))
        return cudnn(x, weight, z, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def _separately(self, x: Tensor, weight: Tensor, z: Tensor | None) -> Tensor:
        y = F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        y = y if self.border is None else self.border(y, x)
        y = y if z is None else y + z
        return y.relu_() if self.relu else y

    def _in_two(self, x: Tensor, weight: Tensor, z: Tensor | None) -> Tensor:
        """The convolution, and one pass for all that is behind it."""
        more = self.relu or z is not None or self.bias is not None
        if not more or not self._one_pass or not _has_triton() or _layout(x, weight) != torch.channels_last:
            return self._separately(x, weight, z)
        y = F.conv2d(x, weight, None, self.stride, self.padding, self.dilation, self.groups)
        y = y if self.border is None else self.border(y, x)
        if y.is_contiguous(memory_format=torch.channels_last) and y.stride(1) == 1:
            try:
                from asfp.triton_fused import finish_

                return finish_(y, self.bias, z, self.relu)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # Triton is there but cannot compile, e.g. without a C compiler
                self._one_pass = False
        return self._separately(x, weight, z)

    def _has_own(self, x: Tensor, z: Tensor | None) -> bool:
        """Whether there are kernels of our own for it, and the one that was chosen can do it."""
        plain = self.groups == 1 and self.border is None and self.bias is not None and x.dtype in WIDTHS
        if (
            not plain
            or x.shape[1] != self.weight.shape[1]
            or x.stride(1) != 1
            or not x.is_contiguous(memory_format=torch.channels_last)
        ):
            return False
        out = self._shape(x)
        counted = max(x.numel(), out[0] * out[1] * out[2] * out[3] + WIDEST)
        if min(out) < 1 or counted >= 2**31:  # a mistake, which torch tells; the kernels count in 32 bits
            return False
        if self._is_stem():
            return z is None
        return set(self.dilation) == {1} and (self.kernel != MATMUL or (z is None and self._is_product()))

    def _is_product(self) -> bool:
        """Whether cuBLAS computes it: a product of matrices, pixels x inputs and inputs x outputs, and ReLU."""
        return self.weight.shape[2:] == (1, 1) and set(self.stride) == {1} and not any(self.padding) and self.relu

    def _is_stem(self) -> bool:
        """Whether the rows of its window are short."""
        count, _, along = self.weight.shape[1:]
        return count < FEW and along > 1 and count * along <= LONGEST and set(self.dilation) == {1}

    def _kernels(self, x: Tensor, z: Tensor | None) -> list[object]:
        """Our own ways to compute it."""
        if not self._has_own(x, z):
            return []
        multiplies = z is None and self._is_product() and hasattr(torch, "_addmm_activation")
        matmul: list[object] = [MATMUL] if multiplies else []
        if not _has_triton():
            return matmul
        try:
            from asfp.triton_fused import tiles_for
            from asfp.triton_stem import STEM_TILES
        except Exception:  # Triton is there but cannot be imported
            return matmul
        outputs, inputs, *window = self.weight.shape
        return [*matmul, *(STEM_TILES if self._is_stem() else tiles_for(inputs, outputs, window[0] * window[1]))]

    def _own(self, x: Tensor, z: Tensor | None) -> Tensor:
        assert self.bias is not None
        tile: Any = self.kernel
        how: Any = self.stride, self.padding, self.relu, tile
        if self._is_stem():
            from asfp.triton_stem import arranged, lead_of, stem

            lead = lead_of(self.weight, self.stride[1], how[1][1])
            ready = self._prepared(("rows", lead), lambda weight: arranged(weight, lead))
            return stem(x, self.weight, ready, self.bias, *how)
        if self.kernel == MATMUL:
            n, inputs, height, width = x.shape
            rows, weight = x.permute(0, 2, 3, 1).reshape(-1, inputs), self.weight.flatten(1)
            y = torch._addmm_activation(self.bias, rows, weight.t())
            return y.view(n, height, width, -1).permute(0, 3, 1, 2)
        from asfp.triton_fused import conv

        return conv(x, self.weight, self.bias, z, *how)

    def _filled_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Input and weight with channels of zeros where there are few; the weight is kept for the next time."""
        count = self.weight.shape[1]
        width = WIDTHS.get(x.dtype, count) if self.width is None else self.width
        more = width - count
        if more <= 0 or count >= FEW or self.groups != 1 or x.shape[1] != count:
            return x, self.weight
        layout = _layout(self.weight)
        kept = self._prepared(more, lambda w: F.pad(w, (0, 0, 0, 0, 0, more)).contiguous(memory_format=layout))
        return F.pad(x, (0, 0, 0, 0, 0, more)), kept

    def _prepared(self, way: object, prepare: Callable[[Tensor], Tensor]) -> Tensor:
        """What is made of the weight for this way, kept for the next time."""
        key = way, *_identity(self.weight)
        if self._weight[0] != key or self.weight.is_inference():
            self._weight = key, prepare(self.weight.detach())
        kept = self._weight[1]
        assert kept is not None
        return kept

    def _corrections(self, border: BorderBias, x: Tensor, weight: Tensor) -> Tensor:
        """What the border correction adds, for the whole batch, as a residual; kept for the next time."""
        key = x.shape, _layout(x, weight), *_identity(border.integral)
        if self._map[0] != key or border.integral.is_inference():
            shape = self._shape(x)
            added = border.contribution(torch.empty(shape, device="meta"), x)
            self._map = key, added.expand(shape).contiguous(memory_format=_layout(x, weight))
        kept = self._map[1]
        assert kept is not None
        return kept

    def _shape(self, x: Tensor) -> tuple[int, ...]:
        axes = zip(x.shape[2:], self.weight.shape[2:], self.stride, self.padding, self.dilation, strict=True)
        sizes = [(n + 2 * int(p) - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]
        return x.shape[0], self.weight.shape[0], *sizes

    def __getstate__(self) -> dict[str, object]:
        here = {"_weight": (None, None), "_map": (None, None), "_checked": False, "_one_pass": True, "kernel": None}
        return self.__dict__ | here  # another machine tries and compares again

    def extra_repr(self) -> str:
        out, count, *taps = self.weight.shape
        fallen = f", {self.kernel}" if self.kernel else f", fell back: {self.fell_back}" if self.fell_back else ""
        form = f"kernel={taps}, stride={self.stride}, padding={self.padding}, relu={self.relu}"
        return f"{count * self.groups}, {out}, {form}{fallen}"


class FusedPool(nn.Module):
    """max_pool2d(x), by a kernel that does not write the places of the maxima, where `take_faster` found it faster.

    >>> x = torch.randn(1, 3, 8, 8)
    >>> torch.equal(FusedPool(nn.MaxPool2d(2))(x), nn.MaxPool2d(2)(x))
    True
    """

    traced_whole = True

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        assert fits_pool(pool)
        self.window, self.stride, self.padding = (_both(x) for x in (pool.kernel_size, pool.stride, pool.padding))
        self.own = False

    def forward(self, x: Tensor) -> Tensor:
        if self.own and self._by_hand(x):
            return self._pooled(x)
        return F.max_pool2d(x, self.window, self.stride, self.padding)

    def take_faster(self, x: Tensor) -> None:
        """On a GPU: compare and time both ways on this input, and take the faster from now on."""
        self.own = False
        if not self._by_hand(x):
            return
        with suppress(Exception), torch.cuda.device(x.device):  # as for convolutions
            if torch.equal(self._pooled(x), self.forward(x)):
                self.own = _time(lambda: self._pooled(x)) < _time(lambda: self.forward(x))

    def _by_hand(self, x: Tensor) -> bool:
        return (
            _is_plain(x)
            and _has_triton()
            and self.window[0] * self.window[1] <= LARGEST
            and x.stride(1) == 1
            and x.is_contiguous(memory_format=torch.channels_last)
            and 4 * x.numel() < 2**31 - 1024  # the kernel counts in 32 bits; padding at most doubles height and width
            and min(n + 2 * p - k for n, p, k in zip(x.shape[2:], self.padding, self.window, strict=True)) >= 0
            and not (torch.is_grad_enabled() and x.requires_grad)
        )

    def _pooled(self, x: Tensor) -> Tensor:
        from asfp.triton_stem import max_pool

        return max_pool(x, self.window, self.stride, self.padding)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "own": False}  # another machine tries again

    def extra_repr(self) -> str:
        return f"{self.window}, stride={self.stride}, padding={self.padding}" + ", own kernel" * self.own


def fits_pool(pool: nn.MaxPool2d) -> bool:
    """Whether there is a `FusedPool` of it: windows without gaps, none that hangs over, no places asked for.

    >>> fits_pool(nn.MaxPool2d(3, 2, 1)), fits_pool(nn.MaxPool2d(3, ceil_mode=True))
    (True, False)
    """
    sizes = [_pair(x) for x in (pool.kernel_size, pool.stride, pool.padding)]
    return None not in sizes and _pair(pool.dilation) == (1, 1) and not pool.ceil_mode and not pool.return_indices


def cudnn(x: Tensor, weight: Tensor, z: Tensor | None, bias: Tensor | None, *geometry: Any) -> Tensor:
    """relu(conv(x, w) + z + b) by one kernel; cuDNN takes z for what has the result's shape, without a check."""
    if z is None:
        return torch.ops.aten.cudnn_convolution_relu(x, weight, bias, *geometry)
    return torch.ops.aten.cudnn_convolution_add_relu(x, weight, z, 1.0, bias, *geometry)


def _is_plain(x: Tensor) -> bool:
    """Whether kernels can be called by hand on it: a batch of images on a GPU, and nothing that traces."""
    return (
        x.is_cuda
        and x.ndim == 4
        and x.numel() > 0
        and x.dtype in DTYPES
        and type(x) in (Tensor, nn.Parameter)
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and torch.autograd.forward_ad._current_level < 0
    )


def _pair(value: Any) -> tuple[int, int] | None:
    """One number for both axes, or one for each, as torch takes them; None for what else it may take.

    >>> _pair(3), _pair([2]), _pair((1, 2)), _pair(())
    ((3, 3), (2, 2), (1, 2), None)
    """
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    if len(values) not in (1, 2) or not all(isinstance(x, int) for x in values):
        return None
    return values[0], values[-1]


def _both(value: Any) -> tuple[int, int]:
    found = _pair(value)
    assert found is not None
    return found


def _same(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= SAME * expected.abs().max())


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _identity(x: Tensor) -> tuple[object, ...]:
    """What changes when a tensor or its values do, but for inference tensors, which count no versions."""
    return x.data_ptr(), x.dtype, x.device, None if x.is_inference() else x._version


def _layout(*tensors: Tensor) -> torch.memory_format:
    """How cuDNN writes what it makes of these: channels last where one of them is."""
    last = any(not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
    return torch.channels_last if last else torch.contiguous_format


def _time(run: Callable[[], object], calls: int = 10) -> float:
    """Milliseconds of a call on the GPU, which sleeps until all are queued, so that it does not wait for Python."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls
