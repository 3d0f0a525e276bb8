"""torch: torch's own layer_norm and rms_norm by our kernels, in eager mode.

aten's operators get our kernels at the CUDA key, below autograd, autocast and functorch. So a call,
its recorded gradient, and what DTensor or a checkpoint runs locally are ours. Only rms_norm is also
taken above autograd: there torch splits a call of two dtypes into eight operations. torch.compile
and torch.export are not touched: their fake tensors never reach a kernel. What our checks refuse
goes to the kernel that stood there before, torch's or another library's.

A call like one before is found by a small key and the layouts of its tensors (autograd.py), and is
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
from ..norm.prepared import Prepared, keep, of_aten
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
from .autograd import backward_again, forward_again, is_repeatable, names_of, normalize
from .modes import PLAIN, has_functorch_transforms, num_dispatch_modes, wants_gradient
from .private import is_forward_mode

DEVICE = "CUDA"  # tests set "CPU"
_MOST_ALIKE = 8  # calls of one key whose tensors differ
_MOST_REASONS = 100  # that are counted each

_Kernel = Callable[..., Any]
_is_grad_enabled = torch.is_grad_enabled

# Since the overrides were put in place: calls by norm, in a list because a call adds to it, and
# those left by norm and reason.
_served: dict[str, list[int]] = {}
_left: Counter[tuple[str, str]] = Counter()


def _runner(
    name: str,
    operator: str,
    prepare: Callable[..., tuple],
    repeating: Callable[..., _Kernel],
    counts_left: bool = True,
) -> Callable[..., tuple | None]:
    """A function that returns what a call returns, and None where our checks refuse it.

    Its arguments: a key, the operands, and the others, which must be equal in a repeated call.

    name: in the counts. prepare: makes a prepared call, and its own operands. repeating:
    forward_again or backward_again. counts_left: False where another operator then counts the call.
    """
    calls, count = of_aten.setdefault(operator, {}), _served.setdefault(name, [0])

    def run(key: tuple, operands: tuple, *given: Any) -> tuple | None:
        known = calls.get(key, ())
        for again in known:
            made = again(operands, *given)
            if made is not None:
                if again is not known[0]:  # so that it is asked first
                    calls[key] = (again, *(each for each in known if each is not again))
                return made
        try:
            if not operands[0].numel():
                raise ValueError("no elements")
            prepared, checked = prepare(operands, *given)
        except (TypeError, ValueError) as error:
            if counts_left:
                _leave(name, error)
            return None
        count[0] += 1
        launches = prepared if isinstance(prepared, Prepared) else prepared.on_gpu
        if is_repeatable(launches, operands):
            found = repeating(launches, operands, given, count)
            keep(calls, key, (found, *known[: _MOST_ALIKE - 1]))
        return prepared.run(checked)

    return run


def _leave(name: str, error: Exception) -> None:
    why = printable(error) if len(_left) < _MOST_REASONS else "other reasons"
    _left[name, why] += 1


def _prepare_forward(
    purpose: str, centered: bool, operands: tuple, eps: float | None, extents: list[int]
) -> tuple:
    options = ForwardOptions(centered, tuple(extents), eps)
    return prepare_forward(ForwardRequest(ForwardOperands(*operands), options), purpose)


def _prepare_backward(
    operands: tuple, extents: list[int], output_mask: list[bool], dbias_dtype: torch.dtype | None
) -> tuple:
    dy, x, *statistics, weight, _ = operands
    leading = x.shape[: x.ndim - len(extents)]
    # Views, so the addresses of a repeated call stay those of the operands.
    mean, rstd = (each if each is None else each.view(leading) for each in statistics)
    wanted = names_of(("dx", "dweight", "dbias"), output_mask)
    options = BackwardOptions(
        mean is not None, tuple(extents), gradients=wanted, dbias_dtype=dbias_dtype
    )
    return prepare_backward(BackwardRequest(BackwardOperands(dy, x, mean, rstd, weight), options))


# Kernels, named as aten's operators and with their arguments. former: what stood there before.


def native_layer_norm(former: _Kernel) -> _Kernel:
    prepare = partial(_prepare_forward, FOR_ATEN, True)
    run = _runner("layer_norm", "native_layer_norm", prepare, forward_again)

    def ours(x, extents, weight, bias, eps):
        key = x.numel(), weight is None, bias is None
        made = run(key, (x, weight, bias, None), eps, extents)
        return former(x, extents, weight, bias, eps) if made is None else made[:3]

    return ours


def native_layer_norm_backward(former: _Kernel) -> _Kernel:
    name = "layer_norm backward"
    run = _runner(name, "native_layer_norm_backward", _prepare_backward, backward_again)

    def ours(dy, x, extents, mean, rstd, weight, bias, wanted):
        operands, key = (dy, x, mean, rstd, weight, None), (x.numel(), weight is None)
        made = run(key, operands, extents, wanted, None if bias is None else bias.dtype)
        if made is None:
            return former(dy, x, extents, mean, rstd, weight, bias, wanted)
        return made[:3]

    return ours


def _fused_rms_norm(former: _Kernel) -> _Kernel:
    prepare = partial(_prepare_forward, FOR_ATEN, False)
    run = _runner("rms_norm", "_fused_rms_norm", prepare, forward_again)

    def ours(x, extents, weight, eps):
        made = run((x.numel(), weight is None), (x, weight, None, None), eps, extents)
        return former(x, extents, weight, eps) if made is None else made[:3:2]

    return ours


def _fused_rms_norm_backward(former: _Kernel) -> _Kernel:
    name = "rms_norm backward"
    run = _runner(name, "_fused_rms_norm_backward", _prepare_backward, backward_again)

    def ours(dy, x, extents, rstd, weight, wanted):
        operands, key = (dy, x, None, rstd, weight, None), (x.numel(), weight is None)
        made = run(key, operands, extents, wanted, None)
        return former(dy, x, extents, rstd, weight, wanted) if made is None else made[:2]

    return ours


def rms_norm(former: _Kernel) -> _Kernel:
    """Above autograd: a weight of another dtype than x, and y alone where nothing is recorded."""
    prepare = partial(_prepare_forward, FOR_Y, False)
    run = _runner("rms_norm", "rms_norm", prepare, forward_again, counts_left=False)

    def ours(x, extents, weight=None, eps=None):
        if (
            x.__class__ not in PLAIN
            or weight.__class__ not in PLAIN
            or x.is_complex()  # torch has own operations for these, and for channels_last
            or (x.ndim > 3 and not x.is_contiguous())
            or num_dispatch_modes()
            or has_functorch_transforms()
            or is_forward_mode()
        ):
            return former(x, extents, weight, eps)
        if not (_is_grad_enabled() and wants_gradient(x, weight)):
            made = run((x.numel(), weight is None), (x, weight, None, None), eps, extents)
        elif weight is None or weight.dtype == x.dtype:
            made = private.fused_rms_norm(x, extents, weight, eps)
        else:
            made = _recorded_of_two_dtypes(x, weight, extents, eps)
        return former(x, extents, weight, eps) if made is None else made[0]

    return ours


def _recorded_of_two_dtypes(
    x: Tensor, weight: Tensor, extents: list[int], eps: float | None
) -> tuple | None:
    """y first, recorded by autograd.Function. None: our checks refuse it."""
    options = ForwardOptions(False, tuple(extents), eps, out_dtype=x.dtype)  # not that of autocast
    try:
        made = normalize(ForwardRequest(ForwardOperands(x, weight), options))
    except (TypeError, ValueError) as error:
        _leave("rms_norm", error)
        return None
    _served["rms_norm"][0] += 1
    return made


# Putting them in place.


class Enabled:
    """Which calls of torch's norms our kernels computed, and which torch. Prints as a table.

    served: calls by operator. left: calls by operator and reason. Both count since the kernels were
    last put in place, in the whole process. Replays of CUDA graphs, compiled calls, and norms that
    torch splits into other operators do not count.
    """

    @property
    def served(self) -> dict[str, int]:
        return {name: count for name, (count,) in _served.items() if count}

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
        served, left = sum(self.served.values()), _left.total()
        if not (served or left):
            return "cupynorm computes torch's norms of CUDA tensors; no call yet"
        return f"{served:,} calls by cupynorm, {left:,} left to torch"


_lock = threading.RLock()
_is_on = False  # by enable()
_num_blocks = 0  # of enabled() that are open
_library: torch.library.Library | None = None  # while the overrides are in place


def _switch(is_on: bool, num_blocks: int) -> Enabled:
    """Puts the overrides in place or takes them away. The caller holds the lock."""
    global _is_on, _num_blocks, _library
    if not (is_on or num_blocks):
        if _library is not None:
            _library._destroy()
        _library = None
    elif _library is None:
        _library = _overrides()
    _is_on, _num_blocks = is_on, num_blocks
    return Enabled()


def _overrides() -> torch.library.Library | None:
    """The library that holds them; None if this torch was built without CUDA."""
    if private.fused_rms_norm is None or not hasattr(torch.library, "get_kernel"):
        raise nvrtc.MissingLibraryError(
            f"torch {torch.__version__} is installed; enable() needs 2.9 or later: "
            "pip install -U torch"
        )
    for count in _served.values():
        count[0] = 0
    _left.clear()
    if DEVICE == "CUDA" and not torch.backends.cuda.is_built():
        return None
    if DEVICE == "CUDA" and torch.cuda.device_count():
        nvrtc.cupy()  # raises the sentence that says what to install
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for of_former in (native_layer_norm, native_layer_norm_backward):
            _override(library, of_former, DEVICE)
        for of_former in (_fused_rms_norm, _fused_rms_norm_backward):
            _override(library, of_former, DEVICE)
        for key in (f"Autograd{DEVICE}", DEVICE):  # the second in inference mode
            _override(library, rms_norm, key)
    return library


def _override(
    library: torch.library.Library, of_former: Callable[[_Kernel], _Kernel], key: str
) -> None:
    name = of_former.__name__
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
    with _lock:
        return _switch(True, _num_blocks)


def disable() -> None:
    """Gives torch's norms back to torch. Blocks of enabled() that are open stay until their end.

    Examples:
        >>> cupynorm.disable() is None  # also where nothing is enabled
        True
    """
    with _lock:
        _switch(False, _num_blocks)


@contextmanager
def enabled() -> Iterator[Enabled]:
    """enable() for a with block. It may be nested, and holds for all threads meanwhile.

    Examples:
        >>> with cupynorm.enabled() as calls:
        ...     y = torch.nn.RMSNorm(4)(torch.randn(2, 4))
        >>> calls.left
        {}
    """
    with _lock:
        calls = _switch(_is_on, _num_blocks + 1)
    try:
        yield calls
    finally:
        with _lock:
            _switch(_is_on, _num_blocks - 1)
