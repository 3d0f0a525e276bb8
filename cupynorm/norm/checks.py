"""Checks of a call: each failure is a sentence that says what was given and what was expected.

Nothing is allocated or launched.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NoReturn, TypeVar

import numpy as np

from ..dispatch.functor_text import BoundFunctor, Functor, Functors, check_chain
from ..dtypes import DTYPES, EIGHT_BITS, compute_dtype
from ..gpu import arrays, nvrtc
from ..options import check_flags, check_real, is_int, sequence, shown
from .request import (
    GRADIENTS,
    Array,
    BackwardOperands,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    FusedBackward,
    checked_launch,
    parts_of,
)

# Options, as far as they need no array.

# Keywords of earlier versions, and what to write instead.
REMOVED_KEYWORDS = {
    "load": "fuse=functor, whose lines say whether they act on x or on y",
    "store": "fuse=functor, whose lines say whether they act on x or on y",
    "weight1": "a second call with that weight",
    "bias1": "a second call with that bias",
    "dy1": "a second call with that dy, whose dx is the dsum of the first",
    "dbias1_dtype": "a second call with that dbias_dtype",
    "row_scale": "fuse=cupynorm.functors.row_scale(scale)",
    "dropout_p": "fuse=cupynorm.functors.dropout(p, seed)",
    "dropout_seed": "fuse=cupynorm.functors.dropout(p, seed)",
    "residual_dtype": "a residual of that dtype, which is the sum's",
    "scale": "out_dtype=cupynorm.Quantize(dtype, scale)",
    "amax": "out_dtype=cupynorm.Quantize(dtype, amax=amax)",
    "power_of_two": "out_dtype=cupynorm.Quantize(dtype, scale, power_of_two=True)",
    "transpose": "out_dtype=cupynorm.Quantize(dtype, transpose=True)",
    "memory_efficient": "the module LayerNorm or RMSNorm with memory_efficient=True",
    "strategy": "launch=cupynorm.Launch(strategy=...)",
    "tile": "launch=cupynorm.Launch(strategy, tile)",
    "statistics": "launch=cupynorm.Launch(statistics=...)",
    "sm_margin": "launch=cupynorm.Launch(sm_margin=...)",
}

_Function = TypeVar("_Function", bound=Callable[..., Any])


def names_what_was_removed(function: _Function) -> _Function:
    """The function. Its TypeError for a keyword of REMOVED_KEYWORDS says what to write instead.

    So does that for an array where normalized_shape belongs: the order of the arguments.
    """
    name = function.__qualname__.removesuffix(".__init__")
    parameters = inspect.signature(function).parameters.values()
    order = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    gone = REMOVED_KEYWORDS.keys() - {each.name for each in parameters}

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except TypeError:
            if named := {key: options[key] for key in options if key in gone}:
                refuse_keywords(name, named)
            given = dict(zip(order, arguments)).get("normalized_shape")
            if hasattr(given, "__dlpack__"):
                raise TypeError(
                    f"normalized_shape is {arrays.type_in_words(given)}; expected an int or a tuple"
                    f" of ints: the order is {name}({', '.join(order)})"
                ) from None
            raise

    return call


def refuse_keywords(name: str, unknown: Mapping[str, Any]) -> NoReturn:
    """Raises TypeError for keywords that name does not have, or has no more."""
    for key in filter(REMOVED_KEYWORDS.__contains__, unknown):
        raise TypeError(f"{name} has no {key} any more; expected {REMOVED_KEYWORDS[key]}") from None
    raise TypeError(f"{name} got an unexpected keyword argument {next(iter(unknown))!r}")


def extents_of(normalized_shape: object) -> tuple[int, ...]:
    """normalized_shape as a tuple of ints. (40.0,), which equals (40,), is refused."""
    kind = normalized_shape.__class__
    if kind is int:
        return (normalized_shape,)
    if kind is tuple:
        for extent in normalized_shape:
            if extent.__class__ is not int:
                break
        else:
            return normalized_shape
    try:
        extents = (normalized_shape,) if is_int(normalized_shape) else tuple(normalized_shape)
    except TypeError:
        extents = (None,)
    if not all(map(is_int, extents)):
        given = shown(normalized_shape)
        raise TypeError(f"normalized_shape is {given}; expected an int or a sequence of ints")
    return tuple(map(int, extents))


def fields_of_forward(
    centered: bool,
    normalized_shape: object,
    tensors: tuple,
    options: tuple,
    return_residual: bool = False,
) -> tuple[tuple, tuple]:
    """The fields of ForwardOperands and ForwardOptions, of what a caller gives.

    tensors: input, weight, bias, residual. options: eps, zero_centered_weight, round_x_hat, out,
    out_dtype, fuse, launch, and memory_efficient, which is a module's.
    """
    input, weight, bias, residual = tensors
    eps, zero_centered_weight, round_x_hat, out, out_dtype, fuse, launch, memory_efficient = options
    if return_residual.__class__ is not bool:
        check_flags(return_residual=return_residual)
    scale = amax = quantization = functors = out_sum = None
    if out_dtype is not None:
        out_dtype, scale, amax, quantization = parts_of(out_dtype)
    if fuse.__class__ is not tuple or fuse:
        functors = bind_functors(fuse, return_residual, residual)
    if out is not None and isinstance(out, tuple):
        if len(out) != 2:
            raise ValueError(f"out has {len(out)} arrays; expected one array, or (y, sum)")
        out, out_sum = out
    if launch is not None:
        launch = checked_launch(launch)
    return (input, weight, bias, residual, out, out_sum, scale, amax, functors), (
        centered,
        extents_of(normalized_shape),
        eps,
        zero_centered_weight,
        out_dtype,
        round_x_hat,
        quantization,
        launch,
        memory_efficient,
    )


def dtype_name(dtype: object, name: str, *, also: Sequence[str] = ()) -> str:
    """One of the four dtypes by name, from a name, a NumPy dtype or a torch dtype.

    Raises TypeError for another one. also: further names that its message lists.
    """
    text = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if text not in DTYPES:
        try:
            text = np.dtype(dtype).name
        except (TypeError, ValueError, SyntaxError):
            pass
    if text not in DTYPES:
        expected = ", ".join((*DTYPES, *also))
        raise TypeError(f"{name} is {shown(dtype)}; expected one of {expected}")
    return text


def gradient_names(gradients: object) -> tuple[str, ...]:
    """gradients as a tuple, which can be a key. Raises ValueError or TypeError for other names."""
    names = FusedBackward._fields
    expected = ", ".join(names)
    if isinstance(gradients, str):
        raise ValueError(f"gradients is {gradients!r}; expected some of {expected}, in a tuple")
    wanted = sequence("gradients", gradients, f"some of {expected}")
    if not all(isinstance(each, str) and each in names for each in wanted):
        raise ValueError(f"gradients is {shown(wanted)}; expected some of {expected}")
    return wanted


# Functors.

ALL_ROWS = 2**62  # a period that no row reaches

# A power of two: below any other limit CuPy may have to draw again, and syncs to find out.
SEED_LIMIT = 2**62


def bind_functors(
    fuse: object, return_residual: bool = False, residual: object = None
) -> Functors | None:
    """The functors of `fuse`, a sequence or one alone. One that reads nothing needs no call.

    None: there are none.
    """
    if fuse.__class__ is tuple and not fuse:
        return None
    is_one = isinstance(fuse, (Functor, BoundFunctor)) or not isinstance(fuse, (tuple, list))
    given = [fuse] if is_one else fuse
    by_role = {"load": [], "store": []}
    for each in given:
        if isinstance(each, Functor):
            each = each()
        if not isinstance(each, BoundFunctor):
            raise TypeError(
                f"fuse has {arrays.type_in_words(each)}; expected functors with their arrays, as "
                "fuse=(cupynorm.functors.silu_gate(gate),)"
            )
        by_role[each.functor.role].append(each)
    if by_role["load"] and return_residual and residual is None:
        raise ValueError(
            "return_residual was given without a residual and with a functor on x; expected a "
            "residual, because what the functor makes alone is not stored"
        )
    for parts in by_role.values():
        if len(parts) > 1:
            check_chain([each.functor for each in parts])
    return Functors(*map(tuple, by_role.values())) if given else None


def _seed_at(x: Array, seed: object) -> Array:
    """A seed as an array of one element where x is, without a sync. None is drawn there by x's
    library, an int is filled in."""
    if seed is not None and not isinstance(seed, int):
        return seed
    if arrays.is_torch(x):
        import torch  # torch.compile would inspect all modules of sys.modules

        options = {"dtype": torch.int64, "device": x.device}
        if seed is None:
            return torch.randint(0, SEED_LIMIT, (1,), **options)
        return torch.full((1,), seed, **options)
    is_numpy = isinstance(x, np.ndarray)
    library = np if is_numpy else nvrtc.cupy()
    with contextlib.nullcontext() if is_numpy else x.device:
        if seed is None:
            return library.random.randint(0, SEED_LIMIT, 1, np.int64)
        return library.full(1, seed, np.int64)


def with_seeds(functors: Functors, x: Array) -> Functors:
    """The functors with each seed as an array where x is."""
    if not any(each.seeds for each in functors.parts()):
        return functors
    given, count = functors.arrays(), len(functors.named_arrays())
    return functors.with_arrays([*given[:count], *(_seed_at(x, each) for each in given[count:])])


def check_seeds_given(functors: Functors) -> None:
    """Raises ValueError where a seed is None: an explicit backward could not repeat it."""
    for name, each in zip(functors.names(), functors.arrays()):
        if each is None:
            raise ValueError(
                f"{name} is None in an explicit forward or backward; expected an int or one "
                "element of int64, the same in both"
            )


def check_differentiable(functors: Functors) -> None:
    """Raises ValueError if a functor has no derivative."""
    for each in functors.parts():
        name = each.functor.name
        if each.functor.backward is None:
            raise ValueError(
                f"fuse has {name}, which has no derivative, and a gradient was asked for; expected "
                f"cupynorm.functor({name!r}, ..., backward=...), or torch.no_grad()"
            )


def check_shape(
    array_shape: tuple[int, ...],
    shape: tuple[int, ...],
    num_dims: int,
    name: str,
    per_row: bool = False,
) -> None:
    """Raises ValueError unless kernels can read an array as one that is broadcast to this shape."""
    if per_row:
        leading = shape[: len(shape) - num_dims]
        if array_shape != leading:
            raise ValueError(
                f"{name} has shape {array_shape}; expected {leading}, one for each row"
            )
        return
    padded = (1,) * (len(shape) - len(array_shape)) + array_shape
    split = len(shape) - num_dims
    fits = len(padded) == len(shape)
    fits = fits and all(extent in (1, all_) for extent, all_ in zip(padded, shape))
    fits = fits and (padded[split:] == shape[split:] or set(padded[split:]) == {1})
    strides = (0,) * split
    if not fits or pattern_of(shape[:split], padded[:split], strides) is None:
        raise ValueError(
            f"{name} has shape {array_shape}, the input {shape}; expected an array that is "
            "broadcast to it, with all or one of the normalised columns, repeated over the rows as "
            "in [batch, 1, N] or [1, seq, 1, N]"
        )


def pattern_of(
    leading: tuple[int, ...], extents: tuple[int, ...], strides: tuple[int, ...] | None
) -> tuple[int, int, list[int]] | None:
    """repeat, period, and the strides of the dimensions in between, from the last one to the first.

    None: the rows of an array with these leading dimensions do not repeat in that way.
    """
    left = [each for each in zip(leading, extents, strides) if each[0] != 1]
    repeat, period, steps = 1, 1, []
    while left and left[-1][1] == 1:
        repeat *= left.pop()[0]
    while left and left[-1][1] != 1:
        extent, _, stride = left.pop()
        steps.append((extent, stride))
        period *= extent
    if any(extent != 1 for _, extent, _ in left):
        return None
    if not steps:
        repeat = 1
    return repeat, period if left else ALL_ROWS, steps


# Arrays.


def dtype_or_none(array: Array | None) -> str | None:
    """The dtype of an array by name; None of no array."""
    return None if array is None else arrays.dtype_name(array)


def check_dtype(array: Array, name: str) -> str:
    """The dtype of an array by name. Raises TypeError unless it is one of the four."""
    dtype = arrays.dtype_name(array)
    if dtype not in DTYPES:
        raise TypeError(f"{name} is of dtype {dtype}; expected one of {', '.join(DTYPES)}")
    return dtype


def check_same_place(array: Array, x: Array, name: str, x_name: str) -> None:
    """Raises ValueError unless an array has the library and the device of x."""
    if arrays.where(array) != arrays.where(x):
        raise ValueError(
            f"{name} is {arrays.where(array)}, {x_name} is {arrays.where(x)}; "
            f"expected the library and device of {x_name}"
        )


def take_like(
    array: Array | None, x: Array, shape: tuple[int, ...], name: str, x_name: str
) -> Array | None:
    """An optional array that must have a shape, one of the four dtypes, and x's place."""
    if array is None:
        return None
    array = arrays.take(array, name)
    check_dtype(array, name)
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; expected {shape}")
    check_same_place(array, x, name, x_name)
    return array


def share_an_address(scale: Array | None, amax: Array | None) -> bool:
    """Whether both are there and begin at one address."""
    if scale is None or amax is None or arrays.is_torch(scale) != arrays.is_torch(amax):
        return False
    return arrays.address(scale) == arrays.address(amax)


def _scalar(array: Array | None, name: str, x: Array) -> Array | None:
    """scale or amax, converted to an array that kernels read."""
    if array is None:
        return None
    array = arrays.take(array, name)
    if arrays.dtype_name(array) != "float32" or arrays.product(array.shape) != 1:
        raise TypeError(
            f"{name} has shape {tuple(array.shape)} and dtype {arrays.dtype_name(array)}; "
            "expected one element of float32"
        )
    check_same_place(array, x, name, "input")
    if getattr(array, "requires_grad", False):
        raise ValueError(
            f"{name} requires a gradient; it is a constant here, so expected {name}.detach()"
        )
    if name == "amax":
        _check_written(array, name)
    return array


def _check_written(array: Array, name: str) -> None:
    """Raises ValueError for a torch tensor whose elements are not those that a kernel writes."""
    if arrays.is_torch(array) and arrays.is_lazy(array) and not arrays.on_host(array):
        raise ValueError(
            f"{name} is a view that negates its memory, or zeros without memory; "
            "expected a tensor with memory of its own whose is_neg() is False"
        )


def _take_functors(
    functors: Functors | None, x: Array, extents: tuple[int, ...]
) -> Functors | None:
    """The functors with their arrays converted."""
    if functors is None:
        return None
    functors, converted = with_seeds(functors, x), []
    for functor in (each.functor for each in functors.parts()):
        if arrays.product(extents) % functor.multiple_of:
            raise ValueError(
                f"normalized_shape is {extents}, and functor {functor.name} was given; expected a "
                f"multiple of {functor.multiple_of} columns"
            )
    for name, array, per_row in functors.named_arrays():
        array = arrays.take(array, name)
        check_dtype(array, name)
        check_same_place(array, x, name, "input")
        check_shape(tuple(array.shape), tuple(x.shape), len(extents), name, per_row)
        converted.append(array)
    for name, seed in zip(functors.names_of_seeds(), functors.arrays()[len(converted) :]):
        seed = arrays.take(seed, name)
        dtype = arrays.dtype_name(seed)
        if dtype != "int64" or arrays.product(seed.shape) != 1:
            raise ValueError(
                f"{name} has shape {tuple(seed.shape)} and dtype {dtype}; expected one element of "
                "int64, or an int"
            )
        check_same_place(seed, x, name, "input")
        converted.append(seed)
    return functors.with_arrays(converted)


def check_eps(eps: object, dtype: str, has_default: bool) -> float:
    """eps as a float. has_default: None means the machine epsilon of the arithmetic."""
    if eps is None and has_default:
        return 2.0 ** (1 - compute_dtype(dtype).digits)
    return check_real("eps", eps)


def _check_extents(shape: tuple[int, ...], extents: tuple[int, ...], name: str) -> None:
    if not extents:
        raise ValueError("normalized_shape is empty; expected at least one dimension")
    if len(extents) > len(shape) or shape[len(shape) - len(extents) :] != extents:
        raise ValueError(
            f"normalized_shape is {extents}, {name} has shape {shape}; "
            f"expected the last dimensions of {name}"
        )


def check_out(request: ForwardRequest) -> None:
    """After check_forward: out and out_sum have the input's shape and place, the dtypes of y and
    the sum, and rows of their own."""
    operands, options = request
    x = operands.input
    if operands.out_sum is not None and operands.residual is None:
        raise ValueError(
            "out has a sum, and nothing is added to the input; expected one array, or a residual"
        )
    for name, out, dtype in (
        ("out", operands.out, options.out_dtype),
        ("the sum of out", operands.out_sum, dtype_or_none(operands.residual)),
    ):
        if out is None:
            continue
        if options.quantization is not None:
            raise ValueError(
                f"out was given with out_dtype {options.quantization.dtype}; expected out=None"
            )
        if not (arrays.is_torch(out) or arrays.is_cupy(out) or isinstance(out, np.ndarray)):
            pair = ", or a tuple (y, sum)" if name == "out" else ""
            given = arrays.type_in_words(out)
            raise TypeError(f"{name} is {given}; expected an array of the input's library{pair}")
        check_same_place(out, x, name, "input")
        if tuple(out.shape) != tuple(x.shape):
            raise ValueError(
                f"{name} has shape {tuple(out.shape)}; expected the input's, {tuple(x.shape)}"
            )
        if arrays.dtype_name(out) != dtype:
            raise TypeError(f"{name} is of dtype {arrays.dtype_name(out)}; expected {dtype}")
        view = arrays.view(out)
        _check_written(out, name)
        rows = arrays.rows(view, len(options.extents))
        if rows is None or (rows.num_rows > 1 and abs(rows.row_stride) < rows.num_cols):
            raise ValueError(
                f"{name} has strides {view.strides}; "
                "expected rows that are contiguous and do not overlap"
            )


def check_overlap(operands: ForwardOperands) -> None:
    """y shares no memory with what is read, unless it is the input; nor does the sum, unless it is
    the residual. A functor that reads other columns may read what is written already."""
    places: dict[int, tuple] = {}  # by array, which in place comes twice

    def place(array: Array) -> tuple[arrays.View, int, int]:
        if id(array) not in places:
            view = arrays.view(array)
            places[id(array)] = view, *arrays.extent(view)
        return places[id(array)]

    read = list(zip(("input", "weight", "bias", "residual"), operands))
    if operands.functors is not None:
        read += zip(operands.functors.names(), operands.functors.arrays())
    for written, out, own in (
        ("out", operands.out, "input"),
        ("the sum of out", operands.out_sum, "residual"),
    ):
        if out is None:
            continue
        view, low, high = place(out)
        for name, other in read:
            if other is None:
                continue
            other_view, other_low, other_high = place(other)
            if low >= other_high or other_low >= high:
                continue
            if name != own or view != other_view:
                raise ValueError(
                    f"{written} shares memory with {name}; expected memory of its own, or exactly "
                    f"that of the {own}"
                )
            for part in operands.functors.parts() if operands.functors else ():
                if part.functor.reads_others:
                    raise ValueError(
                        f"{written} is the {own}, and functor {part.functor.name} reads other "
                        "columns; expected memory of its own"
                    )
        read.append(("out", out))


# Requests.


def check_forward(request: ForwardRequest) -> ForwardRequest:
    """The request with its arrays converted, eps a float, and the dtype of y by name.

    Reads no address: a tensor may have no memory.
    """
    given, options = request
    zero_centered, rounds = options.zero_centered_weight, options.round_x_hat
    check_flags(zero_centered_weight=zero_centered, round_x_hat=rounds)
    x = arrays.take(given.input, "input")
    dtype, shape, extents = check_dtype(x, "input"), tuple(x.shape), options.extents
    _check_extents(shape, extents, "input")
    parameters = {
        name: take_like(getattr(given, name), x, extents, name, "input")
        for name in ("weight", "bias")
    }
    residual = take_like(given.residual, x, shape, "residual", "input")
    sum_dtype = dtype if residual is None else arrays.dtype_name(residual)
    eps = check_eps(options.eps, sum_dtype, has_default=not options.centered)
    y_dtype = dtype
    if options.quantization is not None:
        y_dtype = options.quantization.dtype
    elif options.out_dtype is not None:
        y_dtype = dtype_name(options.out_dtype, "out_dtype", also=EIGHT_BITS)
    divides = options.quantization is not None and options.quantization.divides
    operands = given._replace(
        input=x,
        residual=residual,
        scale=_scalar(given.scale, "scale_inv" if divides else "scale", x),
        amax=_scalar(given.amax, "amax", x),
        functors=_take_functors(given.functors, x, extents),
        **parameters,
    )
    if share_an_address(operands.scale, operands.amax):
        raise ValueError(
            "amax is scale's own memory, which the kernel reads; expected an array of its own"
        )
    options = options._replace(eps=eps, out_dtype=y_dtype)
    _check_combinations(operands, options)
    return ForwardRequest(operands, options)


def _check_combinations(operands: ForwardOperands, options: ForwardOptions) -> None:
    """Raises ValueError or TypeError for options that exclude each other."""
    quantization, functors = options.quantization, operands.functors
    if options.memory_efficient and quantization is not None:
        raise ValueError(
            f"memory_efficient was given with out_dtype {quantization.dtype}; "
            "expected only one of them"
        )
    if functors is None:
        return
    for name, is_given in (
        ("memory_efficient was given with fuse", options.memory_efficient),
        ("round_x_hat was given with a functor on y", options.round_x_hat and functors.store),
    ):
        if is_given:
            raise ValueError(f"{name}; expected only one of them")


def check_backward(request: BackwardRequest) -> BackwardRequest:
    """The request with its arrays converted and a dtype by name for each wanted gradient.

    The dtypes of gradients that are not wanted are None.
    """
    given, options = request
    check_flags(zero_centered_weight=options.zero_centered_weight)
    extents = options.extents
    x = arrays.take(given.x, "x")
    dtype, shape = check_dtype(x, "x"), tuple(x.shape)
    _check_extents(shape, extents, "x")
    leading = shape[: len(shape) - len(extents)]
    dy = take_like(given.dy, x, shape, "dy", "x")
    if dy is None:
        raise TypeError("dy is None; expected the gradient of y")
    dsum = take_like(given.dsum, x, shape, "dsum", "x")
    weight = take_like(given.weight, x, extents, "weight", "x")
    mean = _take_statistic(given.mean, x, leading, "mean") if options.centered else None
    rstd = _take_statistic(given.rstd, x, leading, "rstd")
    of_weight = arrays.dtype_name(weight) if weight is not None else dtype
    dtypes = {}
    for name, default in zip(GRADIENTS, (dtype, of_weight, of_weight, dtype)):
        own_dtype = getattr(options, f"{name}_dtype")
        if own_dtype is not None:
            default = dtype_name(own_dtype, f"{name}_dtype")
        dtypes[f"{name}_dtype"] = default if name in options.gradients else None
    bias = input = None
    functors = _take_functors(given.functors, x, extents)
    load = () if functors is None else functors.load
    reading = [each.functor.name for each in load if each.functor.reads_argument]
    if reading and not options.applies_load:
        input = take_like(given.input, x, shape, "input", "x")
        if input is None:
            raise TypeError(
                f"input is None; expected the input of the forward, because the backward of "
                f"{reading[0]} reads what it was applied to"
            )
    if options.recompute or functors is not None:
        bias = take_like(given.bias, x, extents, "bias", "x")
    operands = BackwardOperands(dy, x, mean, rstd, weight, dsum, bias, input, functors)
    return BackwardRequest(operands, options._replace(**dtypes))


def _take_statistic(array: Array | None, x: Array, leading: tuple[int, ...], name: str) -> Array:
    if array is None:
        raise TypeError(f"{name} is None; expected the statistic that the forward returned")
    array = take_like(array, x, leading, name, "x")
    expected = compute_dtype(arrays.dtype_name(x)).name
    if arrays.dtype_name(array) != expected:
        raise TypeError(
            f"{name} is of dtype {arrays.dtype_name(array)}; "
            f"expected {expected} for x of {arrays.dtype_name(x)}"
        )
    return array
