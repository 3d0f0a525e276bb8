"""torch: torch's own layer_norm and rms_norm by our kernels, in eager mode.

aten's operators get our kernels at the CUDA key, below autograd, autocast and functorch. So a call,
its recorded gradient, and what DTensor or a checkpoint runs locally are ours. torch.compile and
torch.export are not touched: their fake tensors never reach a kernel. What our checks refuse goes
to the kernel that stood there before, torch's or another library's.

A call like one before is found by a small key and by the layouts of its tensors (Repeated), and is
then only allocated and launched.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..gpu import nvrtc
from ..norm.calls import FOR_ATEN, FOR_Y, prepare_backward, prepare_forward
from ..norm.prepared import keep, repeated
from ..norm.request import (
    BackwardOperands,
    BackwardOptions,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
)
from ..table import as_html, as_text, printable
from . import private
from .autograd import names_of, normalize, repeated_of
from .modes import PLAIN, has_functorch_transforms, num_dispatch_modes, wants_gradient
from .private import is_forward_mode

DEVICE = "CUDA"  # tests set "CPU"
_MOST_ALIKE = 8  # calls of one key whose tensors differ
_MOST_REASONS = 20

_Kernel = Callable[..., Any]
_is_grad_enabled = torch.is_grad_enabled

# Calls by operator, and by operator and reason, since the overrides were put in place.
_served: Counter[str] = Counter()
_left: Counter[tuple[str, str]] = Counter()


# Kernels. Each takes the arguments of aten's operator; former: the kernel that stood there before.


def _again(key: tuple, operands: tuple) -> Any:
    """What a call like one before returns; None for the first of its kind.

    key: the operator, and all that counts beside the layouts of the tensors that are there.
    """
    for known in repeated.get(key, ()):
        made = known.run(operands)
        if made is not None:
            _served[key[0]] += 1
            return made
    return None


def _first(key: tuple, operands: tuple, prepare: Callable[[], tuple]) -> Any:
    """Prepares a call and runs it. None: our checks refuse it.

    operands: as _again takes them. prepare: returns a prepared call, and its own operands.
    """
    try:
        if not operands[0].numel():
            raise ValueError("no elements")
        prepared, checked = prepare()
    except (TypeError, ValueError, RuntimeError) as error:
        _leave(key[0], error)
        return None
    found = repeated_of(prepared, operands)
    if found is not None:
        keep(repeated, key, (found, *repeated.get(key, ())[: _MOST_ALIKE - 1]))
    _served[key[0]] += 1
    return prepared.run(checked)


def _leave(name: str, error: Exception) -> None:
    """Counts a call that the former kernel gets."""
    reason = printable(error)
    if (name, reason) not in _left and len(_left) >= _MOST_REASONS:
        reason = "other reasons"
    _left[name, reason] += 1


def _prepare_forward(
    centered: bool, extents: list[int], eps: float | None, operands: tuple, purpose: str
) -> tuple:
    options = ForwardOptions(centered, tuple(extents), eps)
    return prepare_forward(ForwardRequest(ForwardOperands(*operands), options), purpose)


def _prepare_backward(
    centered: bool, extents: list[int], output_mask: list[bool], operands: tuple, like_bias: Any
) -> tuple:
    """operands: the first of BackwardOperands, whose statistics have the rank of x."""
    dy, x, *statistics, weight = operands
    leading = x.shape[: x.ndim - len(extents)]
    # Views, so the addresses of a repeated call stay those of the operands.
    mean, rstd = (each if each is None else each.view(leading) for each in statistics)
    wanted = names_of(("dx", "dweight", "dbias"), output_mask)
    dtype = None if like_bias is None else like_bias.dtype
    options = BackwardOptions(centered, tuple(extents), gradients=wanted, dbias_dtype=dtype)
    return prepare_backward(BackwardRequest(BackwardOperands(dy, x, mean, rstd, weight), options))


def _native_layer_norm(former: _Kernel) -> _Kernel:
    def native_layer_norm(x, extents, weight, bias, eps):
        operands = x, weight, bias
        key = "layer_norm", x.numel(), eps, weight is None, bias is None, *extents
        made = _again(key, operands)
        if made is None:
            prepare = partial(_prepare_forward, True, extents, eps, operands, FOR_ATEN)
            made = _first(key, operands, prepare)
        return former(x, extents, weight, bias, eps) if made is None else made

    return native_layer_norm


def _fused_rms_norm(former: _Kernel) -> _Kernel:
    def fused_rms_norm(x, extents, weight, eps):
        operands = x, weight
        key = "rms_norm, recorded", x.numel(), eps, weight is None, *extents
        made = _again(key, operands)
        if made is None:
            prepare = partial(_prepare_forward, False, extents, eps, operands, FOR_ATEN)
            made = _first(key, operands, prepare)
        return former(x, extents, weight, eps) if made is None else made

    return fused_rms_norm


def _native_layer_norm_backward(former: _Kernel) -> _Kernel:
    def native_layer_norm_backward(dy, x, extents, mean, rstd, weight, bias, output_mask):
        operands = dy, x, mean, rstd, weight
        dtype = None if bias is None else bias.dtype
        key = "layer_norm backward", x.numel(), dtype, weight is None, *output_mask, *extents
        made = _again(key, operands)
        if made is None:
            prepare = partial(_prepare_backward, True, extents, output_mask, operands, bias)
            made = _first(key, operands, prepare)
        if made is None:
            return former(dy, x, extents, mean, rstd, weight, bias, output_mask)
        return made[:3]

    return native_layer_norm_backward


def _fused_rms_norm_backward(former: _Kernel) -> _Kernel:
    def fused_rms_norm_backward(dy, x, extents, rstd, weight, output_mask):
        operands = dy, x, None, rstd, weight
        key = "rms_norm backward", x.numel(), weight is None, *output_mask, *extents
        made = _again(key, operands)
        if made is None:
            prepare = partial(_prepare_backward, False, extents, output_mask, operands, None)
            made = _first(key, operands, prepare)
        return former(dy, x, extents, rstd, weight, output_mask) if made is None else made[:2]

    return fused_rms_norm_backward


def _rms_norm(former: _Kernel) -> _Kernel:
    """aten::rms_norm, above autograd: weights of another dtype than x, for which torch runs eight
    operations, and calls without gradients, which need no statistics."""

    def rms_norm(x, extents, weight=None, eps=None):
        if (
            x.__class__ not in PLAIN
            or weight.__class__ not in PLAIN
            or num_dispatch_modes()
            or has_functorch_transforms()
            or is_forward_mode()
        ):
            return former(x, extents, weight, eps)
        operands, made = (x, weight), None
        if not (_is_grad_enabled() and wants_gradient(x, weight)):
            key = "rms_norm", x.numel(), eps, weight is None, *extents
            made = _again(key, operands)
            if made is None:
                prepare = partial(_prepare_forward, False, extents, eps, operands, FOR_Y)
                made = _first(key, operands, prepare)
        elif weight is None or weight.dtype == x.dtype:
            return private.fused_rms_norm(x, extents, weight, eps)[0]
        else:
            made = _recorded_of_two_dtypes(x, weight, extents, eps)
        return former(x, extents, weight, eps) if made is None else made[0]

    return rms_norm


def _recorded_of_two_dtypes(
    x: Tensor, weight: Tensor, extents: list[int], eps: float | None
) -> tuple | None:
    """y first, recorded by autograd.Function. None: our checks refuse it."""
    options = ForwardOptions(False, tuple(extents), eps, out_dtype=x.dtype)  # not that of autocast
    try:
        made = normalize(ForwardRequest(ForwardOperands(x, weight), options))
    except (TypeError, ValueError) as error:
        return _leave("rms_norm, recorded", error)
    _served["rms_norm, recorded"] += 1
    return made


# Putting them in place.


class Enabled:
    """Which calls of torch's norms ran on our kernels, and which were left to torch. Prints as a
    table.

    served: calls by operator. left: calls by operator and reason. Both count since the kernels were
    put in place, in the whole process. Replays of CUDA graphs and compiled calls do not count.
    """

    @property
    def served(self) -> dict[str, int]:
        return dict(_served)

    @property
    def left(self) -> dict[tuple[str, str], int]:
        return dict(_left)

    def __str__(self) -> str:
        rows = self._rows()
        return "\n".join([as_text(rows), self._summary()] if rows else [self._summary()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = self._rows()
        return (as_html(rows) if rows else "") + self._summary()

    def _rows(self) -> list[tuple[str, str, str]]:
        rows = [(name, f"{count:,}", "cupynorm") for name, count in self.served.items()]
        rows += [(name, f"{count:,}", f"torch: {why}") for (name, why), count in self.left.items()]
        return [("norm", "calls", "computed by"), *rows] if rows else []

    def _summary(self) -> str:
        if not torch.cuda.device_count():
            return "no GPU: torch computes every norm"
        if not _library:
            return "disabled: torch computes every norm"
        if not (_served or _left):
            return "cupynorm computes torch's norms of CUDA tensors; no call yet"
        return f"{_served.total():,} calls by cupynorm, {_left.total():,} left to torch"


_OPERATORS = {
    "native_layer_norm": _native_layer_norm,
    "native_layer_norm_backward": _native_layer_norm_backward,
    "_fused_rms_norm": _fused_rms_norm,
    "_fused_rms_norm_backward": _fused_rms_norm_backward,
}

_lock = threading.RLock()
_is_on = False  # by enable()
_num_blocks = 0  # of enabled() that are open
_library: torch.library.Library | None = None  # while the overrides are in place


def _update() -> None:
    """Puts the overrides in place or takes them away, as the two variables above say."""
    global _library
    if not (_is_on or _num_blocks):
        if _library is not None:
            _library._destroy()
            _library = None
        return
    if _library is not None:
        return
    if not hasattr(torch.library, "get_kernel"):
        raise nvrtc.MissingLibraryError(
            f"torch {torch.__version__} is installed; enable() needs 2.9 or later: "
            "pip install -U torch"
        )
    _served.clear()
    _left.clear()
    if DEVICE == "CUDA":
        if not torch.backends.cuda.is_built():
            return  # there is no tensor to serve
        if torch.cuda.device_count():
            nvrtc.cupy()  # raises the sentence that says what to install
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, of_former in _OPERATORS.items():
            _override(library, name, DEVICE, of_former)
        for key in (f"Autograd{DEVICE}", DEVICE):  # the second in inference mode
            _override(library, "rms_norm", key, _rms_norm)
    _library = library


def _override(
    library: torch.library.Library, name: str, key: str, of_former: Callable[[_Kernel], _Kernel]
) -> None:
    former = torch.library.get_kernel(f"aten::{name}", key)  # before ours: no recursion
    ours = of_former(partial(former.call_boxed, private.dispatch_keys(key, DEVICE)))
    private.run_as_it_is(ours)
    library.impl(name, ours, key, allow_override=True)


def enable() -> Enabled:
    """Runs torch's own layer_norm and rms_norm on our kernels, for CUDA tensors in eager mode.

    Examples:
        >>> calls = cupynorm.enable()
        >>> y = torch.nn.LayerNorm(4)(torch.randn(2, 4))  # on the CPU torch computes it
        >>> calls.served, calls.left
        ({}, {})
        >>> cupynorm.disable()

    It holds for the whole process, all its threads and models, until disable(). Gradients, DTensor
    and checkpoints keep working as they are. torch.compile and torch.export see torch's norms as
    before. A second call changes nothing and returns the same counts. Without a GPU torch computes
    every norm, as before.

    Returns Enabled: which calls were served, and which were left to torch, with the reason.

    Raises MissingLibraryError for torch before 2.9, and with a GPU without CuPy.
    """
    global _is_on
    with _lock:
        _is_on = True
        try:
            _update()
        except BaseException:
            _is_on = False
            raise
    return Enabled()


def disable() -> None:
    """Gives torch's norms back to torch. Blocks of enabled() that are open stay until their end.

    Examples:
        >>> cupynorm.disable() is None  # also where nothing is enabled
        True
    """
    global _is_on
    with _lock:
        _is_on = False
        _update()


@contextmanager
def enabled() -> Iterator[Enabled]:
    """enable() for a with block. It may be nested, and holds for all threads meanwhile.

    Examples:
        >>> with cupynorm.enabled() as calls:
        ...     y = torch.nn.RMSNorm(4)(torch.randn(2, 4))
        >>> calls.left
        {}
    """
    global _num_blocks
    with _lock:
        _num_blocks += 1
    try:
        with _lock:
            _update()
        yield Enabled()
    finally:
        with _lock:
            _num_blocks -= 1
            _update()
