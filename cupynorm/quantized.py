"""y in 8-bit floats: what a call asks for, what it returns, and the same of arrays on the host.

The kernels write it as cupynorm.fused calls them (cuda_src/fp8.cuh);
formats, scales and roundings are those of cupynorm.reference.fp8.
"""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import numpy as np

from . import arrays, launch, norm, nvrtc
from .calls import Quantization, QuantizeCall
from .dispatch import update_scales_launch
from .dtypes import FLOAT8S, compute_dtype
from .norm import Array
from .problem import SCALINGS, ceil_div, cols_of_scale

_FOUND = SCALINGS[1:]  # the scalings that need no scale from the caller


class QuantizedTensor:
    """An array in 8-bit floats, and what its values are: data * scale_inv.

    data: of the shape that was quantised; a torch tensor of a float8 dtype, or a CuPy or NumPy array of uint8 with its bits.
    format: "float8_e4m3fn" or "float8_e5m2". dtype: what dequantize() gives by default.
    scale_inv: float32, one element for all, block_rows then being None. Or (..., num_rows / block_rows, num_cols / block_cols),
    both rounded up: one for each block of so many rows and columns; num_cols are those of a whole row, of all the dimensions
    that were normalised over. In uint8 it is MXFP8's: a byte b means 2^(b - 127), and 255 NaN.
    transposed: None, or [num_cols, num_rows], contiguous: data the other way round; where transposed_scale_inv is given, it was
    quantised anew, in blocks along what was a column.
    """

    def __init__(
        self, data: Array, scale_inv: Array, dtype: Any, *, transposed: Array | None = None,
        transposed_scale_inv: Array | None = None, block_rows: int | None = None, block_cols: int = 128,
        format: str | None = None, carrier: Any = None,
    ) -> None:  # fmt: skip
        self.data, self.scale_inv, self.dtype = data, scale_inv, dtype
        self.transposed, self.transposed_scale_inv = transposed, transposed_scale_inv
        self.block_rows, self.block_cols = block_rows, block_cols
        self.format = format or arrays.dtype_name(data)
        self._carrier = carrier  # of torch: a tensor without memory that brings gradients to what was quantised

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def dequantize(self, dtype: Any = None) -> Array:
        """The values, computed in float32. Of torch tensors whose gradient is recorded its gradient is passed on as that of y,
        in the dtype of what was normalised, as if nothing had been rounded.

        dtype: of the result, a torch dtype or a name. Raises TypeError for one that is none of the four.
        """
        dtype = self.dtype if dtype is None else dtype
        name = norm.check_dtype_name(dtype, "dtype")
        if not arrays.is_torch(self.data):
            return _scaled(_values_of_bits(self), self).astype(arrays.CuPyLibrary.dtype(name))
        values = _scaled(self.data.float(), self).to(arrays.TorchLibrary.dtype(name))
        return values if self._carrier is None else norm._torch_part().passing_gradients(values, self._carrier)

    def __repr__(self) -> str:
        data = self.data.dtype if arrays.is_torch(self.data) else self.format
        return f"QuantizedTensor(shape={tuple(self.shape)}, data={data}, dtype={self.dtype}, block_rows={self.block_rows})"


def _values_of_bits(quantized: QuantizedTensor) -> Array:
    from .reference import fp8

    table = fp8.decode(np.arange(256, dtype=np.uint8), quantized.format).astype(np.float32)
    if isinstance(quantized.data, np.ndarray):
        return table[quantized.data]
    return nvrtc.cupy().asarray(table)[quantized.data]


def _factors(quantized: QuantizedTensor) -> Array:
    """scale_inv in float32."""
    found = quantized.scale_inv
    if arrays.dtype_name(found) != "uint8":
        return found
    if arrays.is_torch(found):
        bits = found.int() << 23
        # 2^-127 has no exponent of its own, and 255 is NaN where the bits say infinity.
        bits = bits.masked_fill(found == 0, 1 << 22).masked_fill(found == 255, 0x7FC00000)
        return bits.view(arrays.TorchLibrary.dtype("float32"))
    bits = found.astype(np.uint32) << 23
    bits[found == 0] = 1 << 22
    bits[found == 255] = 0x7FC00000
    return bits.view(np.float32)


def _scaled(values: Array, quantized: QuantizedTensor) -> Array:
    """Each of the data's values in float32 times its factor."""
    factors, shape, block_rows = _factors(quantized), tuple(quantized.shape), quantized.block_rows
    if block_rows is None:
        return values * factors
    # A row may have several dimensions, all that scale_inv has not: its blocks go through them.
    leading = shape[: len(factors.shape) - 1]
    num_cols = arrays.product(shape[len(leading) :])
    by = "repeat_interleave" if arrays.is_torch(factors) else "repeat"
    if factors.shape[-1] > 1:
        factors = getattr(factors, by)(quantized.block_cols, -1)[..., :num_cols]
    if block_rows > 1:
        factors = getattr(factors, by)(block_rows, -2)[: leading[-1]]
    return (values.reshape((*leading, num_cols)) * factors).reshape(shape)


# What a call asks for.


def is_float8(dtype: object) -> bool:
    """Whether an out_dtype is one of the 8-bit floats, by name or as torch's or ml_dtypes' dtype."""
    return _name(dtype) in FLOAT8S


def _name(dtype: object) -> str:
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if name in FLOAT8S or isinstance(dtype, str):
        return name
    return getattr(dtype, "__name__", name)


def quantization_of(out_dtype: object, scale: object, amax: object, power_of_two: object, transpose: object) -> Quantization:
    """The options of layer_norm that belong to an 8-bit y, checked as far as they need no other argument."""
    if not is_float8(out_dtype):
        given = {"scale": scale, "amax": amax, "power_of_two": power_of_two or None, "transpose": transpose or None}
        names = [name for name, value in given.items() if value is not None]
        raise TypeError(
            f"{' and '.join(names)} given with out_dtype {out_dtype}; expected an out_dtype of {' or '.join(FLOAT8S)}"
        )
    scaling = "given"
    if isinstance(scale, str):
        if scale not in _FOUND:
            raise ValueError(f"scale is {scale!r}; expected {', '.join(map(repr, _FOUND))}, an array of one float32, or None")
        scaling, scale = scale, None
    elif isinstance(scale, numbers.Number):
        raise TypeError(
            f"scale is {scale!r}; expected an array of one float32 where the input is, so that no step waits for its value"
        )
    for name, value in (("power_of_two", power_of_two), ("transpose", transpose)):
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name} is {value!r}; expected True or False")
    if amax is not None and scaling != "given":
        raise ValueError(
            f"amax was given with scale {scaling!r}, whose amaxes are found and used within the call; expected amax=None"
        )
    if power_of_two and scaling == "given":
        raise ValueError("power_of_two was given with a scale; expected it with one that is found: 'tensor', 'row' or 'block'")
    if transpose and scaling not in ("given", "tensor"):
        raise ValueError(
            f"transpose was given with scale {scaling!r}; expected one scale for the whole tensor, which both copies share"
        )
    return Quantization(_name(out_dtype), scaling, scale, amax, bool(power_of_two), bool(transpose))


def check(quantization: Quantization, x: Array) -> Quantization:
    """With scale and amax as they are taken."""
    taken = {}
    for name in ("scale", "amax"):
        array = getattr(quantization, name)
        if array is not None:
            array = arrays.take(array, name)
            if arrays.dtype_name(array) != "float32" or arrays.product(array.shape) != 1:
                raise TypeError(
                    f"{name} has shape {tuple(array.shape)} and dtype {arrays.dtype_name(array)}; expected one element of "
                    "float32"
                )
            norm._check_same_place(array, x, name, "input")
            if getattr(array, "requires_grad", False):
                raise ValueError(f"{name} requires a gradient; it is a constant here, so expected {name}.detach()")
        taken[name] = array
    if at_one_address(*taken.values()):
        raise ValueError("amax is scale's own memory, which the kernel reads; expected an array of its own")
    return quantization._replace(**taken)


def at_one_address(scale: Array | None, amax: Array | None) -> bool:
    """Whether both are there and begin at one address."""
    if scale is None or amax is None or arrays.is_torch(scale) != arrays.is_torch(amax):
        return False
    if arrays.is_torch(scale):
        return scale.data_ptr() == amax.data_ptr()
    first, second = (array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr for array in (scale, amax))
    return first == second


# Matrices on a GPU.


class OfNorm(NamedTuple):
    """Whose y of a matrix is meant, and its statistics."""

    centered: bool
    weight: Array | None
    bias: Array | None
    zero_centered: bool
    mean: Array | None
    rstd: Array


class QuantizedMatrix(NamedTuple):
    """data: [num_rows, num_cols]; transposed: [num_cols, num_rows]; sums: of x over rows, [num_cols]. None: not wanted."""

    data: Array | None
    scale_inv: Array | None
    transposed: Array | None
    sums: Array | None = None


def quantize(
    x: Array, dtype: str, scale: Array | None = None, amax: Array | None = None, *, wants_data: bool = True,
    transpose: bool = False, of_norm: OfNorm | None = None, sums: str | None = None, rule: tuple[float, bool] | None = None,
) -> QuantizedMatrix:  # fmt: skip
    """A matrix on a GPU in 8-bit floats, from one reading; one of 8-bit floats is only transposed.

    x: [num_rows, num_cols]. dtype: the 8-bit one by name. scale: one float32, None: 1;
    amax: one float32, raised to the largest |x|.
    of_norm: quantise that norm's y of x. sums: the dtype of sums of x over rows, which are computed in float32 (of float64 in
    that), in one order, and rounded once. rule: (smallest_amax, power_of_two): the scale is of amax, x's own, which is read.
    """
    is_scaled = arrays.dtype_name(x) not in (dtype, "uint8")
    lie = arrays.library(x).lie
    norm_key = of_norm and (lie(of_norm.weight), lie(of_norm.bias), of_norm.centered, of_norm.zero_centered)
    key = (lie(x), dtype, norm_key, wants_data, transpose, sums, rule)
    prepared = norm.quantizations.get(key)
    if prepared is None:
        prepared = _PreparedQuantize(x, dtype if is_scaled else None, dtype, of_norm, wants_data, transpose, sums, rule)
        norm.keep(norm.quantizations, key, prepared)
    return prepared.run(x, scale, amax, of_norm)


class _PreparedQuantize:
    """A quantisation that is planned and compiled."""

    def __init__(
        self, x: Array, made: str | None, dtype: str, of_norm: OfNorm | None, wants_data: bool, transpose: bool,
        sums: str | None, rule: tuple[float, bool] | None,
    ) -> None:  # fmt: skip
        view = norm._view(x)
        self.device_index = view.device
        self.library = library = arrays.library(x)(view.device)
        rows, copied = norm._rows(x, 1)
        if made is None:
            rows = rows._replace(dtype=dtype)
        weight, copy_weight = norm._parameter(of_norm and of_norm.weight)
        bias, copy_bias = norm._parameter(of_norm and of_norm.bias)
        self.copies = norm._copies(copied, copy_weight, copy_bias)
        self.call = QuantizeCall(rows, dtype, of_norm and (of_norm.centered, weight, bias, of_norm.zero_centered), sums, rule)
        launches = self.call.launches if rows.num_rows and rows.num_cols else ()
        self.kernels = [launch.load(each, view.device) for each in launches]
        self.new_data = norm._new(library, view.shape, dtype if wants_data else None)
        self.new_transposed = norm._new(library, view.shape[::-1], dtype if transpose else None)
        self.new_scale_inv = norm._new(library, (1,), "float32" if made else None)
        self.new_sums = norm._new(library, view.shape[1:], sums)
        self.new_partials = norm._new(library, self.call.partials_shape, compute_dtype(rows.dtype).name if sums else None)

    def run(self, x: Array, scale: Array | None, amax: Array | None, of_norm: OfNorm | None) -> QuantizedMatrix:
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            weight, bias, mean, rstd = (None,) * 4 if of_norm is None else (of_norm.weight, of_norm.bias, *of_norm[4:])
            if self.copies:
                x, weight, bias = norm._contiguous(library, self.copies, (x, weight, bias))
            made = QuantizedMatrix(self.new_data(), self.new_scale_inv(), self.new_transposed(), self.new_sums())
            if not self.kernels:
                norm._fill((made.scale_inv,), 1.0 if scale is None else 1.0 / scale)
                norm._fill((made.sums,), 0)
                return made
            data, scale_inv, transposed, sums = made
            given = (x, data, transposed, scale, scale_inv, amax, weight, bias, mean, rstd, self.new_partials(), sums)
            address, stream = library.address, library.stream()
            for kernel, words in zip(self.kernels, self.call.words(*(0 if each is None else address(each) for each in given))):
                kernel.enqueue(stream, words)
            return made
        finally:
            if former != self.device_index:
                library.exchange_device(former)


# Delayed scales on a GPU.


def update_scales(scale: Array, history: Array, largest: Array, factor: float, *, most_recent: bool) -> None:
    """The end of a step, in place, by one launch: what cupynorm.fp8.updated gives.

    scale, largest: [num_tensors]; history: [num_steps, num_tensors]; all of float32, contiguous, on a GPU. factor: what largest
    is multiplied by. most_recent: this step's amax counts, and not the largest of all steps.
    """
    view = norm._view(history)
    key = ("update_scales", view.device, *view.shape)
    kernel = norm.quantizations.get(key)
    if kernel is None:
        kernel = launch.load(update_scales_launch(view.shape[1]), view.device)
        norm.keep(norm.quantizations, key, kernel)
    library = arrays.library(history)(view.device)
    former = library.exchange_device(view.device)
    try:
        pointers = (library.address(each) for each in (scale, history, largest))
        with np.errstate(over="ignore"):  # beyond float32, as the scales are then
            factor = float(np.float32(factor))
        kernel.enqueue(library.stream(), (*pointers, factor, int(most_recent), *view.shape))
    finally:
        if former != view.device:
            library.exchange_device(former)


# Arrays on the host.


def on_host(quantization: Quantization, y: Array, extents: tuple[int, ...], like: Array) -> QuantizedTensor:
    """y in float64, by the reference. like: an array of the library that the result is to be of;
    its dtype is dequantize()'s."""
    from .reference import fp8

    num_cols, shape = arrays.product(extents), tuple(y.shape)
    leading = shape[: len(shape) - len(extents)]
    values = arrays.to_float64(y).reshape(arrays.product(leading), num_cols)
    name, scaling, scale, amax, power_of_two, transpose, smallest_amax = quantization
    if scaling == "given":
        factor = np.float32(1) if scale is None else arrays.to_float64(scale).reshape(()).astype(np.float32)
        made = fp8.quantize(values, name, factor)
        if amax is not None:
            amax[...] = arrays.from_float64(np.maximum(arrays.to_float64(amax), made.amax), "float32", like)
    elif scaling == "tensor":
        made = fp8.quantize(
            values, name, fp8.scale_of(fp8.amax(values), name, power_of_two=power_of_two, smallest_amax=smallest_amax)
        )
    elif scaling == "row":
        made = fp8.quantize_rows(values, name, power_of_two=power_of_two)
    elif scaling == "block":
        made = fp8.quantize_blocks(values, name, power_of_two=power_of_two)
    else:
        made = fp8.quantize_mxfp8(values, name)
    data, scale_inv = np.ascontiguousarray(made.data), np.asarray(made.scale_inv)
    transposed = _of_library(np.ascontiguousarray(data.T), name, like) if transpose else None
    data = _of_library(data.reshape(shape), name, like)
    scale_inv = _of_library(scale_inv.reshape(scale_shape(scaling, leading, num_cols)), None, like)
    return result(quantization, data, scale_inv, transposed, like, num_cols)


def scale_shape(scaling: str, leading: tuple[int, ...], num_cols: int) -> tuple[int, ...]:
    """The shape of scale_inv."""
    block_cols = cols_of_scale(scaling, num_cols)
    if block_cols is None:
        return (1,)
    return (*leading, 1 if scaling == "row" else ceil_div(num_cols, block_cols))  # a row without columns has its scale too


def result(
    quantization: Quantization, data: Array, scale_inv: Array, transposed: Array | None, x: Array, num_cols: int
) -> QuantizedTensor:
    """What layer_norm returns of x as 8-bit floats, of the arrays that were made as quantization says."""
    block_cols = cols_of_scale(quantization.scaling, num_cols)
    return QuantizedTensor(
        data, scale_inv, x.dtype if arrays.is_torch(x) else arrays.dtype_name(x), transposed=transposed,
        format=quantization.dtype, block_rows=None if block_cols is None else 1, block_cols=block_cols or num_cols,
    )  # fmt: skip


def _of_library(raw: np.ndarray, name: str | None, like: Array) -> Array:
    """A host array; name: the 8-bit format that its bits are, if any."""
    if not arrays.is_torch(like):
        return raw
    torch = norm._torch_part().torch
    tensor = torch.from_numpy(np.ascontiguousarray(raw))
    return tensor.view(getattr(torch, name)) if name else tensor
