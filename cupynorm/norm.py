"""layer_norm, rms_norm and their explicit forward and backward: check, allocate, plan, launch.

Reading order: `layer_norm` (what users call) -> `normalize` (checks, then host or GPU) -> `run_forward` (plan and launch).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from . import arrays, launch
from .arrays import Rows, View
from .dispatch import STATISTICS, STRATEGIES, Device, Launch, Plan, Problem, Tile, choose, make_plan, pack_limit
from .dtypes import DTYPES, compute_dtype

Array = Any  # a CuPy array, torch tensor, NumPy array, or any object with __dlpack__


class Forward(NamedTuple):
    """What a forward returns. y as the input; mean, rstd of the leading shape, float32 (float64 for float64 input).

    mean is None for rms_norm. sum is input + residual in the input's dtype, or the input itself where there is no residual.
    """

    y: Array
    mean: Array | None
    rstd: Array
    sum: Array


class Backward(NamedTuple):
    """The gradients that were asked for, None for the others. dx is of the input and of the residual alike."""

    dx: Array | None
    dweight: Array | None
    dbias: Array | None


class Options(NamedTuple):
    """How, not what: none of these changes the result beyond rounding."""

    strategy: str | None = None
    tile: Tile | None = None
    statistics: str | None = None
    sm_margin: int = 0


class Machine(Protocol):
    """Where kernels run: a GPU (GpuMachine below) or the CPU (cupynorm.on_cpu)."""

    device: Device

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[Array, int]:
        """A new array and its address."""

    def launch(self, launch: Launch, words: tuple) -> None:
        """Runs one kernel on its packed argument."""


class GpuMachine:
    """The device that an array lies on and the current stream of the library that owns it."""

    def __init__(self, array: Array, device_index: int) -> None:
        self.library = arrays.library(array)
        self.device_index = device_index
        self.device = launch.device(device_index)
        self.stream = self.library.stream(device_index)

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[Array, int]:
        array = self.library.empty(shape, dtype, self.device_index)
        return array, self.library.view(array).pointer

    def launch(self, kernel_launch: Launch, words: tuple) -> None:
        launch.launch(kernel_launch, self.device_index, self.stream, words)


# What users call.


def layer_norm(
    input: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    residual: Array | None = None,
    return_residual: bool = False,
    zero_centered_weight: bool = False,
    out_dtype: Any = None,
    out: Array | None = None,
    sm_margin: int = 0,
    strategy: str | None = None,
    tile: Tile | Mapping[str, int] | None = None,
    statistics: str | None = None,
) -> Array | tuple[Array, Array]:
    """Layer normalisation over the last dimensions (Ba, Kiros, Hinton 2016; formula in cupynorm.reference.layer_norm).

    input: shape (..., *normalized_shape), float16, bfloat16, float32 or float64; a CuPy array, a torch tensor, a NumPy array
        or any object with __dlpack__. Any strides; rows that are contiguous are read where they lie, others copied first.
    normalized_shape: an int or the trailing shape to normalise over.
    weight, bias: shape normalized_shape, each optional, of any of the four dtypes, on the input's device.
    eps: added to the variance; may be 0 or negative, then a row whose variance does not exceed -eps is Inf or NaN as in float64.
    residual: of input's shape and dtype; input + residual, rounded once to that dtype, is normalised in its place.
    return_residual: also return that sum, for pre-norm blocks.
    zero_centered_weight: multiply by 1 + weight.
    out_dtype: dtype of the result (a name, NumPy or torch dtype), by default the input's.
    out: an array to write the result to, of the input's shape, its rows contiguous, sharing no memory with the inputs.
    sm_margin: multiprocessors to leave free for other kernels, forward and backward: it shrinks the grid.
    strategy, tile, statistics: force a row of cupynorm.STRATEGIES, its Tile, and "two_pass" or "welford"; by default the
        width of a row decides. Ignored where the reference computes.

    Returns y of input's shape in the input's library, or (y, sum) with return_residual. A CuPy array or DLPack exporter gives a
    CuPy array; a CUDA torch tensor a torch tensor, differentiable in input, weight, bias and residual; NumPy arrays and CPU
    tensors are computed by the float64 reference and rounded once (differentiable for torch).

    Arithmetic is in float32 (float64 for float64 input) with one rounding at the end; a row's result does not depend on the other
    rows and repeats to the bit. A row that holds NaN or Inf is NaN, and only that row. A row of float32 or bfloat16 whose squared
    deviations sum beyond 3.4e38 (values of about 1.8e19 and more) has infinite variance in float32, so rstd is 0 and y is bias.

    Raises ValueError or TypeError, before anything is launched, for shapes, dtypes, devices or options that do not fit;
    cupynorm.MissingLibraryError if the input is on a GPU and CuPy or NVRTC is not installed.
    """
    return normalize(
        True, input, normalized_shape, weight, bias, eps, residual, return_residual, zero_centered_weight, out_dtype, out,
        _options(strategy, tile, statistics, sm_margin),
    )  # fmt: skip


def rms_norm(
    input: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    eps: float | None = None,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    return_residual: bool = False,
    zero_centered_weight: bool = False,
    out_dtype: Any = None,
    out: Array | None = None,
    sm_margin: int = 0,
    strategy: str | None = None,
    tile: Tile | Mapping[str, int] | None = None,
    statistics: str | None = None,
) -> Array | tuple[Array, Array]:
    """Root-mean-square normalisation (Zhang, Sennrich 2019; formula in cupynorm.reference.rms_norm): layer_norm without the mean.

    eps: by default the machine epsilon of the arithmetic, 2**-23 (2**-52 for float64 input), as torch.nn.functional.rms_norm.
    All else, returns and errors too, as for layer_norm. A row whose squares sum beyond 3.4e38 gives 0 * weight.
    """
    return normalize(
        False, input, normalized_shape, weight, bias, eps, residual, return_residual, zero_centered_weight, out_dtype, out,
        _options(strategy, tile, statistics, sm_margin),
    )  # fmt: skip


def layer_norm_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    residual: Array | None = None,
    zero_centered_weight: bool = False,
    out_dtype: Any = None,
    out: Array | None = None,
    sm_margin: int = 0,
    strategy: str | None = None,
    tile: Tile | Mapping[str, int] | None = None,
    statistics: str | None = None,
) -> Forward:
    """layer_norm that also returns what backward needs, outside any autograd: Forward(y, mean, rstd, sum).

    normalized_shape is by default weight's or bias's shape, or else the last dimension of x. Arguments and errors as for layer_norm.
    """
    shape = _default_shape(x, weight, bias, normalized_shape)
    options = _options(strategy, tile, statistics, sm_margin)
    return forward(True, x, shape, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options)


def rms_norm_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float | None = None,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    residual: Array | None = None,
    zero_centered_weight: bool = False,
    out_dtype: Any = None,
    out: Array | None = None,
    sm_margin: int = 0,
    strategy: str | None = None,
    tile: Tile | Mapping[str, int] | None = None,
    statistics: str | None = None,
) -> Forward:
    """rms_norm that also returns what backward needs: Forward(y, None, rstd, sum). Arguments as for layer_norm_forward."""
    shape = _default_shape(x, weight, bias, normalized_shape)
    options = _options(strategy, tile, statistics, sm_margin)
    return forward(False, x, shape, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options)


def layer_norm_backward(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array | None = None,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    zero_centered_weight: bool = False,
    dsum: Array | None = None,
    gradients: Sequence[str] = ("dx", "dweight", "dbias"),
    dweight_dtype: Any = None,
    dbias_dtype: Any = None,
    sm_margin: int = 0,
    strategy: str | None = None,
    tile: Tile | Mapping[str, int] | None = None,
) -> Backward:
    """Gradients of layer_norm at x, for the statistics that layer_norm_forward returned (derivation: cupynorm.reference.layer_norm).

    dy: gradient of y, of x's shape, in any of the four dtypes. x: what was normalised (Forward.sum). mean, rstd: x's leading shape.
    dsum: gradient that reaches the returned sum from elsewhere, added to dx. gradients: which to compute; the others are None and
    cost nothing. dweight_dtype, dbias_dtype: by default weight's dtype, or x's without a weight.
    Returns Backward(dx in x's dtype, dweight and dbias of normalized_shape). The sums over rows are made in float32 (float64 for
    float64), in a fixed order: they repeat to the bit. Raises as layer_norm.
    """
    shape = _default_shape(x, weight, None, normalized_shape)
    options = _options(strategy, tile, None, sm_margin)
    return backward(
        True, dy, x, mean, rstd, shape, weight, zero_centered_weight, dsum, gradients, dweight_dtype, dbias_dtype, options
    )  # fmt: skip


def rms_norm_backward(
    dy: Array,
    x: Array,
    rstd: Array,
    weight: Array | None = None,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    zero_centered_weight: bool = False,
    dsum: Array | None = None,
    gradients: Sequence[str] = ("dx", "dweight", "dbias"),
    dweight_dtype: Any = None,
    dbias_dtype: Any = None,
    sm_margin: int = 0,
    strategy: str | None = None,
    tile: Tile | Mapping[str, int] | None = None,
) -> Backward:
    """Gradients of rms_norm at x, for the rstd that rms_norm_forward returned. All else as for layer_norm_backward."""
    shape = _default_shape(x, weight, None, normalized_shape)
    options = _options(strategy, tile, None, sm_margin)
    return backward(
        False, dy, x, None, rstd, shape, weight, zero_centered_weight, dsum, gradients, dweight_dtype, dbias_dtype, options
    )  # fmt: skip


# Checks: each failure is a sentence that says what was given and what was expected.


def _options(strategy: str | None, tile: object, statistics: str | None, sm_margin: int) -> Options:
    if strategy is not None and strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}; it is one of {', '.join(STRATEGIES)}, or None to let the width decide")
    if statistics is not None and statistics not in STATISTICS:
        raise ValueError(f"statistics is {statistics!r}; it is one of {', '.join(STATISTICS)}, or None")
    if isinstance(sm_margin, bool) or not isinstance(sm_margin, numbers.Integral) or sm_margin < 0:
        raise ValueError(f"sm_margin is {sm_margin!r}; expected a number of multiprocessors, 0 or more")
    if tile is not None and not isinstance(tile, Tile):
        if not isinstance(tile, Mapping):
            raise TypeError(f"tile is a {type(tile).__name__}; expected a cupynorm.Tile or a dict of its fields")
        try:
            tile = Tile(**tile)
        except TypeError as error:
            raise ValueError(
                f"tile has fields {', '.join(map(str, tile))}; a Tile takes {', '.join(Tile.__annotations__)}"
            ) from error
    return Options(strategy, tile, statistics, int(sm_margin))


def _default_shape(x: Array, weight: Array | None, bias: Array | None, normalized_shape: object) -> object:
    if normalized_shape is not None:
        return normalized_shape
    for parameter in (weight, bias):
        if hasattr(parameter, "shape"):
            return tuple(parameter.shape)
    shape = getattr(x, "shape", None)
    if not shape:
        raise ValueError("x has no dimension to normalise over; expected at least one, or normalized_shape")
    return tuple(shape)[-1:]


def _check_shape(shape: tuple[int, ...], normalized_shape: object, name: str) -> tuple[int, ...]:
    given = normalized_shape
    if isinstance(normalized_shape, numbers.Integral) and not isinstance(normalized_shape, bool):
        normalized_shape = (normalized_shape,)
    try:
        checked = tuple(int(extent) for extent in normalized_shape)
        integral = all(isinstance(extent, numbers.Integral) for extent in normalized_shape)
    except (TypeError, ValueError):
        integral = False
    if not integral:
        raise TypeError(f"normalized_shape is {given!r}; expected an int or a sequence of ints")
    if not checked:
        raise ValueError("normalized_shape is empty; expected at least one dimension")
    if len(checked) > len(shape) or shape[len(shape) - len(checked) :] != checked:
        raise ValueError(f"normalized_shape is {checked}, {name} has shape {shape}; expected its last dimensions")
    return checked


def _check_dtype(array: Array, name: str) -> str:
    dtype = arrays.dtype_name(array)
    if dtype not in DTYPES:
        raise TypeError(f"{name} is of dtype {dtype}; expected one of {', '.join(DTYPES)}")
    return dtype


def _check_dtype_name(dtype: object, name: str) -> str:
    text = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if text not in DTYPES:
        try:
            text = np.dtype(dtype).name
        except TypeError:
            pass
    if text not in DTYPES:
        raise TypeError(f"{name} is {dtype!r}; expected one of {', '.join(DTYPES)}")
    return text


def _check_same_place(array: Array, x: Array, name: str, x_name: str) -> None:
    if arrays.where(array) != arrays.where(x):
        raise ValueError(f"{name} is {arrays.where(array)}, {x_name} is {arrays.where(x)}; expected both in one place")


def _take_like(array: Array | None, x: Array, shape: tuple[int, ...], name: str, x_name: str) -> Array | None:
    """An optional array that must have a shape, a supported dtype, and x's place."""
    if array is None:
        return None
    array = arrays.take(array, name)
    _check_dtype(array, name)
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; expected {shape}")
    _check_same_place(array, x, name, x_name)
    return array


def _check_eps(eps: object, dtype: str) -> float:
    if eps is None:
        return 2.0 ** (1 - compute_dtype(dtype).digits)
    if isinstance(eps, bool) or not isinstance(eps, numbers.Real) or math.isnan(eps):
        raise TypeError(f"eps is {eps!r}; expected a real number")
    return float(eps)


def _check_out(out: Array, x: Array, dtype: str, num_dims: int, others: Mapping[str, Array | None]) -> None:
    if out is None:
        return
    if not (arrays.is_torch(out) or arrays.is_cupy(out) or isinstance(out, np.ndarray)):
        raise TypeError(f"out is a {type(out).__name__}; expected an array of the input's library")
    _check_same_place(out, x, "out", "input")
    if tuple(out.shape) != tuple(x.shape):
        raise ValueError(f"out has shape {tuple(out.shape)}; expected the input's, {tuple(x.shape)}")
    if arrays.dtype_name(out) != dtype:
        raise TypeError(f"out is of dtype {arrays.dtype_name(out)}; expected {dtype}")
    view = _view(out)
    rows = arrays.rows(view, num_dims)
    if rows is None or (rows.num_rows > 1 and abs(rows.row_stride) < rows.num_cols):
        raise ValueError(f"out has strides {view.strides}; expected rows that are contiguous and do not overlap")
    low, high = arrays.extent(view)
    for name, other in others.items():
        if other is not None:
            other_low, other_high = arrays.extent(_view(other))
            if low < other_high and other_low < high:
                raise ValueError(f"out shares memory with {name}; expected memory of its own")


def _view(array: Array) -> View:
    if isinstance(array, np.ndarray):
        strides = tuple(stride // array.itemsize for stride in array.strides)
        return View(array.ctypes.data, array.shape, strides, array.dtype.name, None)
    return arrays.library(array).view(array)


# Forward.


def normalize(
    centered,
    input,
    normalized_shape,
    weight,
    bias,
    eps,
    residual,
    return_residual,
    zero_centered_weight,
    out_dtype,
    out,
    options,
):
    """layer_norm and rms_norm: through autograd where torch asks for it, else straight to `forward`."""
    input = arrays.take(input, "input")
    arguments = (normalized_shape, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options)
    if arrays.is_torch(input):
        from .autograd import apply, wants_gradient

        if wants_gradient(input, weight, bias, residual):
            y, added = apply(centered, input, *arguments)
            return (y, added) if return_residual else y
    result = forward(centered, input, *arguments)
    return (result.y, result.sum) if return_residual else result.y


def forward(
    centered, x, normalized_shape, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options
) -> Forward:
    """Checks everything, then computes on the host or on the GPU."""
    x = arrays.take(x, "input")
    dtype = _check_dtype(x, "input")
    shape = tuple(x.shape)
    normalized = _check_shape(shape, normalized_shape, "input")
    weight = _take_like(weight, x, normalized, "weight", "input")
    bias = _take_like(bias, x, normalized, "bias", "input")
    residual = _take_like(residual, x, shape, "residual", "input")
    if residual is not None and arrays.dtype_name(residual) != dtype:
        raise TypeError(f"residual is of dtype {arrays.dtype_name(residual)}; expected the input's, {dtype}")
    eps = _check_eps(eps, dtype)
    y_dtype = _check_dtype_name(out_dtype, "out_dtype") if out_dtype is not None else dtype
    num_dims = len(normalized)
    _check_out(out, x, y_dtype, num_dims, {"input": x, "weight": weight, "bias": bias, "residual": residual})

    leading = shape[: len(shape) - num_dims]
    if arrays.on_host(x):
        return _forward_on_host(centered, x, leading, weight, bias, eps, residual, zero_centered_weight, y_dtype, out)

    x_rows, x = _rows(x, num_dims)
    machine = GpuMachine(x, _view(x).device)
    residual_rows = sum_rows = None
    added = x
    if residual is not None:
        residual_rows, residual = _rows(residual, num_dims)
        added, _ = machine.empty(shape, dtype)
        sum_rows, _ = _rows(added, num_dims)
    y = out if out is not None else machine.empty(shape, y_dtype)[0]
    y_rows, _ = _rows(y, num_dims)
    compute = compute_dtype(dtype).name
    mean, mean_pointer = machine.empty(leading, compute) if centered else (None, 0)
    rstd, rstd_pointer = machine.empty(leading, compute)
    weight, bias = _contiguous(weight), _contiguous(bias)
    run_forward(
        machine, centered, x_rows, y_rows, _parameter(weight), _parameter(bias), mean_pointer, rstd_pointer, eps,
        zero_centered_weight, residual_rows, sum_rows, options,
    )  # fmt: skip
    return Forward(y, mean, rstd, added)


def _rows(array: Array, num_dims: int) -> tuple[Rows, Array]:
    """An array's rows, and the array that holds them: the same, or a contiguous copy."""
    found = arrays.rows(_view(array), num_dims)
    if found is None:
        array = arrays.library(array).contiguous(array)
        found = arrays.rows(_view(array), num_dims)
    return found, array


def _contiguous(array: Array | None) -> Array | None:
    return None if array is None else arrays.library(array).contiguous(array)


def _parameter(array: Array | None) -> tuple[int, str] | None:
    """Address and dtype of a contiguous weight or bias."""
    if array is None:
        return None
    view = _view(array)
    return view.pointer, view.dtype


def _parameter_layouts(*parameters: tuple[int, str] | None) -> list[tuple[int, int, int]]:
    return [(pointer, 0, DTYPES[dtype].itemsize) for pointer, dtype in filter(None, parameters)]


def run_forward(
    machine: Machine, centered: bool, x: Rows, y: Rows, weight: tuple[int, str] | None, bias: tuple[int, str] | None,
    mean: int, rstd: int, eps: float, zero_centered: bool = False, residual: Rows | None = None, sum: Rows | None = None,
    options: Options = Options(),
) -> Plan:  # fmt: skip
    """Plans and launches a forward on arrays that are checked and allocated; mean and rstd are addresses, 0 if not wanted."""
    layouts = [rows.layout() for rows in (x, y, residual, sum) if rows] + _parameter_layouts(weight, bias)
    problem = Problem(
        "forward", centered, x.num_cols, x.dtype, y=y.dtype, weight=weight[1] if weight else None,
        bias=bias[1] if bias else None, zero_centered=bool(zero_centered), residual=residual is not None,
        pack_limit=pack_limit(x.num_cols, layouts),
    )  # fmt: skip
    plan = make_plan(problem, machine.device, x.num_rows, **options._asdict())
    load = (x.pointer, x.row_stride)
    if residual:
        load += (residual.pointer, residual.row_stride, *((sum.pointer, sum.row_stride) if sum else (0, 0)))
    store = (y.pointer, y.row_stride, weight[0] if weight else 0, bias[0] if bias else 0)
    for kernel_launch in plan.launches:
        machine.launch(kernel_launch, (*load, *store, mean, rstd, x.num_rows, x.num_cols, float(eps)))
    return plan


def _forward_on_host(centered, x, leading, weight, bias, eps, residual, zero_centered_weight, y_dtype, out) -> Forward:
    """The reference, rounded once."""
    from . import reference

    dtype = arrays.dtype_name(x)
    compute = compute_dtype(dtype).name
    num_rows = arrays.product(leading)
    matrix = (
        arrays.to_float64(x).reshape(num_rows, -1)
        if num_rows
        else np.empty((0, arrays.product(tuple(x.shape)[len(leading) :])))
    )
    added = x
    if residual is not None:
        added = arrays.from_float64(matrix.reshape(tuple(x.shape)) + arrays.to_float64(residual), dtype, x)
        matrix = arrays.to_float64(added).reshape(matrix.shape)
    weight64, bias64 = (None if array is None else arrays.to_float64(array).reshape(-1) for array in (weight, bias))
    norm = reference.layer_norm if centered else reference.rms_norm
    result = norm(matrix, weight64, bias64, eps, zero_centered_weight=bool(zero_centered_weight))
    y = arrays.from_float64(result.y.reshape(tuple(x.shape)), y_dtype, x)
    if out is not None:
        out[...] = y
        y = out
    mean = arrays.from_float64(result.mean.reshape(leading), compute, x) if centered else None
    return Forward(y, mean, arrays.from_float64(result.rstd.reshape(leading), compute, x), added)


# Backward.


def backward(
    centered, dy, x, mean, rstd, normalized_shape, weight, zero_centered_weight, dsum, gradients, dweight_dtype, dbias_dtype, options
) -> Backward:  # fmt: skip
    """Checks everything, then computes the gradients asked for on the host or on the GPU."""
    x = arrays.take(x, "x")
    dtype = _check_dtype(x, "x")
    shape = tuple(x.shape)
    normalized = _check_shape(shape, normalized_shape, "x")
    num_dims = len(normalized)
    leading = shape[: len(shape) - num_dims]
    dy = _take_like(dy, x, shape, "dy", "x")
    if dy is None:
        raise TypeError("dy is None; expected the gradient of y")
    dsum = _take_like(dsum, x, shape, "dsum", "x")
    weight = _take_like(weight, x, normalized, "weight", "x")
    compute = compute_dtype(dtype).name
    for name, array in (("mean", mean), ("rstd", rstd)):
        if array is None:
            if name == "mean" and not centered:
                continue
            raise TypeError(f"{name} is None; expected the statistic that the forward returned")
        _take_like(array, x, leading, name, "x")
        if arrays.dtype_name(array) != compute:
            raise TypeError(f"{name} is of dtype {arrays.dtype_name(array)}; expected {compute} for x of {dtype}")
    unknown = [name for name in gradients if name not in Backward._fields]
    if unknown or isinstance(gradients, str):
        raise ValueError(f"gradients is {gradients!r}; expected some of {', '.join(Backward._fields)}")
    parameter_dtype = arrays.dtype_name(weight) if weight is not None else dtype
    dweight_dtype = _check_dtype_name(dweight_dtype, "dweight_dtype") if dweight_dtype is not None else parameter_dtype
    dbias_dtype = _check_dtype_name(dbias_dtype, "dbias_dtype") if dbias_dtype is not None else parameter_dtype

    wanted = (
        dtype if "dx" in gradients else None,
        dweight_dtype if "dweight" in gradients else None,
        dbias_dtype if "dbias" in gradients else None,
    )
    if not any(wanted):
        return Backward(None, None, None)
    if arrays.on_host(x):
        return _backward_on_host(centered, dy, x, mean, rstd, weight, zero_centered_weight, dsum, wanted, normalized)

    dy_rows, dy = _rows(dy, num_dims)
    x_rows, x = _rows(x, num_dims)
    machine = GpuMachine(x, _view(x).device)
    dsum_rows = None
    if dsum is not None:
        dsum_rows, dsum = _rows(dsum, num_dims)
    weight, mean, rstd = (
        _contiguous(weight),
        _contiguous(arrays.take(mean, "mean")) if centered else None,
        _contiguous(arrays.take(rstd, "rstd")),
    )
    dx = dweight = dbias = dx_rows = None
    if wanted[0]:
        dx, _ = machine.empty(shape, dtype)
        dx_rows, _ = _rows(dx, num_dims)
    if wanted[1]:
        dweight, _ = machine.empty(normalized, dweight_dtype)
    if wanted[2]:
        dbias, _ = machine.empty(normalized, dbias_dtype)
    if x_rows.num_rows == 0:
        for array in (dweight, dbias):
            if array is not None:
                machine.library.zero(array)
    else:
        run_backward(
            machine, centered, x_rows, dy_rows, _parameter(mean)[0] if centered else 0, _parameter(rstd)[0], _parameter(weight),
            zero_centered_weight, dx_rows, _parameter(dweight), _parameter(dbias), dsum_rows, options,
        )  # fmt: skip
    return Backward(dx, dweight, dbias)


def check_backward(centered, x, normalized_shape, weight, bias, residual, out_dtype, options) -> None:
    """Raises ValueError now if a strategy forced on a differentiable forward does not fit its backward."""
    if options.strategy is None or arrays.on_host(x):
        return
    num_cols = arrays.product(_check_shape(tuple(x.shape), normalized_shape, "input"))
    dtype = _check_dtype(x, "input")
    dtypes = {"dweight": weight, "dbias": bias}
    problem = Problem(
        "backward", centered, num_cols, dtype, dy=_check_dtype_name(out_dtype, "out_dtype") if out_dtype is not None else dtype,
        dx=dtype, weight=None if weight is None else arrays.dtype_name(weight), pack_limit=pack_limit(num_cols, ()),
        **{name: None if array is None else arrays.dtype_name(array) for name, array in dtypes.items()},
    )  # fmt: skip
    choose(problem, launch.device(_view(x).device), options.strategy)


def run_backward(
    machine: Machine, centered: bool, x: Rows, dy: Rows, mean: int, rstd: int, weight: tuple[int, str] | None,
    zero_centered: bool, dx: Rows | None, dweight: tuple[int, str] | None, dbias: tuple[int, str] | None,
    dsum: Rows | None = None, options: Options = Options(),
) -> Plan:  # fmt: skip
    """Plans and launches a backward on arrays that are checked and allocated; None for a gradient that is not wanted."""
    dsum = dsum if dx else None
    layouts = [rows.layout() for rows in (x, dy, dx, dsum) if rows] + _parameter_layouts(weight, dweight, dbias)
    problem = Problem(
        "backward", centered, x.num_cols, x.dtype, weight=weight[1] if weight else None, zero_centered=bool(zero_centered),
        dy=dy.dtype, dx=dx.dtype if dx else None, dweight=dweight[1] if dweight else None, dbias=dbias[1] if dbias else None,
        dsum=dsum.dtype if dsum else None, pack_limit=pack_limit(x.num_cols, layouts),
    )  # fmt: skip
    plan = make_plan(problem, machine.device, x.num_rows, **options._asdict())
    partials = partials_pointer = None
    if plan.num_partials:
        count = bool(dweight) + bool(dbias)
        partials, partials_pointer = machine.empty((count, plan.num_partials, x.num_cols), problem.compute)
    bytes_of_one = plan.num_partials * x.num_cols * DTYPES[problem.compute].itemsize
    dweight_partials = partials_pointer if partials_pointer and dweight else 0
    dbias_partials = (partials_pointer + (bytes_of_one if dweight else 0)) if partials_pointer and dbias else 0

    rows = (x.pointer, x.row_stride, dy.pointer, dy.row_stride)
    for kernel_launch in plan.launches:
        if kernel_launch.kernel.source == "backward_parameters.cu":
            outputs = (dweight[0] if dweight else 0, dbias[0] if dbias else 0)
            if plan.num_partials:
                words = (dweight_partials, dbias_partials, x.num_cols, *outputs, plan.num_partials, x.num_cols)
            else:
                words = (*rows, mean, rstd, *outputs, x.num_rows, x.num_cols)
        else:
            store = (dx.pointer, dx.row_stride) if dx else (0, 0)
            store += (dsum.pointer, dsum.row_stride) if dsum else (0, 0)
            words = (
                *rows, weight[0] if weight else 0, *store, mean, rstd, dweight_partials, dbias_partials, x.num_rows, x.num_cols,
            )  # fmt: skip
        machine.launch(kernel_launch, words)
    return plan


def _backward_on_host(centered, dy, x, mean, rstd, weight, zero_centered_weight, dsum, wanted, normalized) -> Backward:
    """The reference, rounded once."""
    from . import reference

    num_cols = arrays.product(normalized)
    num_rows = arrays.product(tuple(x.shape)[: len(x.shape) - len(normalized)])

    def matrix(array: Array) -> np.ndarray:
        return arrays.to_float64(array).reshape(num_rows, num_cols)

    options = {"zero_centered_weight": bool(zero_centered_weight), "dsum": None if dsum is None else matrix(dsum)}
    weight64 = None if weight is None else arrays.to_float64(weight).reshape(-1)
    rstd64 = arrays.to_float64(rstd).reshape(-1)
    if centered:
        result = reference.layer_norm_backward(
            matrix(dy), matrix(x), arrays.to_float64(mean).reshape(-1), rstd64, weight64, **options
        )
    else:
        result = reference.rms_norm_backward(matrix(dy), matrix(x), rstd64, weight64, **options)
    shapes = (tuple(x.shape), normalized, normalized)
    return Backward(
        *(
            arrays.from_float64(values.reshape(shape), dtype, x) if dtype else None
            for values, shape, dtype in zip(result, shapes, wanted)
        )
    )
