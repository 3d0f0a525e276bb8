"""8 bits: what a norm returns, and matrices on a GPU with their scales, sums and magnitudes.

Formats, scales and rounding are those of cupynorm.reference.fp8; the kernels write them by
cuda_src/fp8/float8.cuh and scales.cuh.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..dispatch.devices import Device
from ..dispatch.grids import quantize_launch, reduce_matrix_launch, update_scales_launch
from ..dispatch.problem import ceil_div, cols_of_scale
from ..dtypes import EIGHT_BITS, compute_dtype
from ..gpu import arrays, launch, nvrtc
from ..gpu.arrays import Rows
from ..options import shown
from ..reference import fp8
from ..table import pairs_as_html
from .arguments import (
    Address,
    Call,
    Layouts,
    RowsByName,
    Words,
    dtype_of,
    layout_of,
    layouts_of,
    row_words,
    rows_of,
    scale_rule_words,
)
from .checks import dtype_name
from .prepared import Prepared, keep, matrices, reader
from .request import Array, ForwardOperands, Quantization


class QuantizedTensor:
    """An array in 8 bits. Its values are data * scale_inv.

    Examples:
        >>> x = np.array([[1.0, 2.0, 3.0, 6.0]])
        >>> how = cupynorm.Quantize("float8_e4m3fn", "row")
        >>> y = cupynorm.layer_norm(x, 4, out_dtype=how)
        >>> y.data
        array([[249, 241,   0, 126]], dtype=uint8)
        >>> y.dequantize().round(3)
        array([[-1.031, -0.515,  0.   ,  1.604]])

    data: of the shape that was quantised; a torch tensor of a float8 dtype, or a CuPy or NumPy
        array of uint8 with its bits; or int8.
    scale_inv: float32. One element for all; block_rows is then None. Or (..., num_rows /
        block_rows, num_cols / block_cols), both rounded up: one for each block of that many rows
        and columns, where num_cols counts all dimensions that were normalised over. In the layout
        "packed" of Quantize it is int32, with a last dimension of a fourth, rounded up.
    format: "float8_e4m3fn", "float8_e5m2" or "int8". dtype: what dequantize() gives by default.
    transposed: None, or [num_cols, num_rows], contiguous: the transpose of data. With
        transposed_scale_inv it was quantised anew, in blocks along what was a column.
    """

    def __init__(
        self,
        data: Array,
        scale_inv: Array,
        dtype: Any,
        *,
        transposed: Array | None = None,
        transposed_scale_inv: Array | None = None,
        block_rows: int | None = None,
        block_cols: int = 128,
        format: str | None = None,
    ) -> None:
        for name, array in (("data", data), ("scale_inv", scale_inv)):
            is_array = arrays.is_torch(array) or hasattr(array, "__dlpack__")
            if not is_array or isinstance(array, type):
                raise TypeError(f"{name} is {arrays.type_in_words(array)}; expected an array")
        self.data, self.scale_inv, self.dtype = data, scale_inv, dtype
        self.transposed, self.transposed_scale_inv = transposed, transposed_scale_inv
        self.block_rows, self.block_cols = block_rows, block_cols
        if not (format is None or isinstance(format, str)):
            raise TypeError(f"format is {shown(format)}; expected one of {', '.join(EIGHT_BITS)}")
        self.format = arrays.dtype_name(data) if format is None else format
        self._pass_gradient: Callable | None = None

    def attach(self, pass_gradient: Callable) -> None:
        """torch: pass_gradient(values) gives values whose gradient goes to what was quantised."""
        self._pass_gradient = pass_gradient

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def dequantize(self, dtype: Any = None) -> Array:
        """The values, computed in float32.

        For torch tensors whose gradient is recorded, the gradient is passed on as that of y, in the
        dtype of what was normalised, as if nothing had been rounded.

        dtype: of the result, a torch dtype or a name. Raises TypeError if it is none of the four.
        """
        dtype = self.dtype if dtype is None else dtype
        name = dtype_name(dtype, "dtype")
        if not arrays.is_torch(self.data):
            return _dequantized(self, arrays.CuPyLibrary.dtype(name))
        values = _scaled(self.data.float(), self).to(arrays.TorchLibrary.dtype(name))
        return values if self._pass_gradient is None else self._pass_gradient(values)

    def without_values(self) -> Array:
        """A torch tensor as dequantize() gives it, but with one element in memory, of no meaning.

        Its gradient goes where that of dequantize() goes.
        """
        dtype = arrays.TorchLibrary.dtype(dtype_name(self.dtype, "dtype"))
        tensor = self.data.new_empty(1, dtype=dtype).expand(self.shape)
        return tensor if self._pass_gradient is None else self._pass_gradient(tensor)

    def __repr__(self) -> str:
        data = self.data.dtype if arrays.is_torch(self.data) else self.format
        fields = f"data={data}, dtype={self.dtype}, block_rows={self.block_rows}"
        return f"QuantizedTensor(shape={tuple(self.shape)}, {fields})"

    def _repr_html_(self) -> str:
        bits = _on_host(self.data)
        counts = np.bincount(bits.view(np.uint8).reshape(-1), minlength=256).reshape(2, 128)
        if self.format == "int8":  # -128 counts as -127
            counts[1] = np.append(0, counts[1, :0:-1]) + np.append(np.zeros(127, int), counts[1, 0])
        counts = counts.sum(0)
        facts = range_facts(counts, self.format)
        where = "one" if self.block_rows is None else " x ".join(map(str, self.scale_inv.shape))
        of_blocks = f", each of {self.block_rows} x {self.block_cols}" if self.block_rows else ""
        pairs = [
            ("shape", " x ".join(map(str, self.shape))),
            ("data", self.format),
            ("dequantize() gives", str(self.dtype)),
            ("scale_inv", f"{where}{of_blocks}"),
            ("transposed", "no" if self.transposed is None else "yes"),
        ]
        return pairs_as_html([*pairs, *facts])


def _on_host(data: Array) -> np.ndarray:
    """The bits of 8-bit floats as NumPy's uint8."""
    if arrays.is_torch(data):
        return data.detach().view(arrays.TorchLibrary.dtype("uint8")).cpu().numpy()
    return data.get() if arrays.is_cupy(data) else data


def range_facts(counts: np.ndarray, format: str) -> list[tuple[str, str]]:
    """How the range of a format is used. counts: [128], of the bits without the sign."""
    largest = {"float8_e4m3fn": 0x7E, "float8_e5m2": 0x7B, "int8": 0x7F}[format]
    total = max(1, int(counts.sum()))
    shares = {"0": counts[0], "the largest value": counts[largest]}
    shares["infinity or NaN"] = counts[largest + 1 :].sum()
    return [(name, f"{count:,} ({count / total:.2%})") for name, count in shares.items()]


@np.errstate(all="ignore")
def _dequantized(quantized: QuantizedTensor, dtype: np.dtype) -> Array:
    """An array of NumPy or CuPy."""
    if quantized.format == "int8":
        values = quantized.data.astype(np.float32)
    else:
        values = fp8.decode(np.arange(256, dtype=np.uint8), quantized.format).astype(np.float32)
        if not isinstance(quantized.data, np.ndarray):
            values = nvrtc.cupy().asarray(values)
        values = values[quantized.data]
    return _scaled(values, quantized).astype(dtype)


def _scaled(values: Array, quantized: QuantizedTensor) -> Array:
    """Each of the data's values in float32 times its factor."""
    factors, shape, block_rows = quantized.scale_inv, tuple(quantized.shape), quantized.block_rows
    if arrays.dtype_name(factors) == "int32":
        factors = unpacked(factors)
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


def unpacked(packed: Array) -> Array:
    """float32 scales of the layout "packed". The exponent 0 stands for 2^-127, a subnormal."""
    parts = [(packed >> shift) & 0xFF for shift in (0, 8, 16, 24)]
    bits = [(each << 23) | ((each - 1 >> 31) & 1 << 22) for each in parts]
    if arrays.is_torch(packed):
        import torch  # torch.compile would inspect all modules of sys.modules

        return torch.stack(bits, -1).flatten(-2).view(torch.float32)
    stack = np.stack if isinstance(packed, np.ndarray) else nvrtc.cupy().stack
    return stack(bits, -1).reshape(*packed.shape[:-1], 4 * packed.shape[-1]).view(np.float32)


def quantize_on_host(
    quantization: Quantization, operands: ForwardOperands, y: np.ndarray, extents: tuple[int, ...]
) -> QuantizedTensor:
    """y in float64 as 8 bits, by the reference, as arrays of the input's library."""
    like = operands.input
    num_cols, shape = arrays.product(extents), tuple(y.shape)
    leading = shape[: len(shape) - len(extents)]
    values = y.reshape(arrays.product(leading), num_cols)
    name, scaling, layout = quantization.dtype, quantization.scaling, quantization.layout
    rule = {"smallest_amax": quantization.smallest_amax, "upper_bound": quantization.upper_bound}
    if scaling == "given" and operands.scale is not None:
        given = arrays.to_float64(operands.scale).reshape(()).astype(np.float32)
        rule["scale_inv" if quantization.divides else "scale"] = given
    quantized = fp8.quantize_by(
        scaling, values, name, power_of_two=quantization.power_of_two, **rule
    )
    if scaling == "given" and operands.amax is not None:
        largest = np.maximum(arrays.to_float64(operands.amax), quantized.amax)
        operands.amax[...] = arrays.from_float64(largest, "float32", like)
    data, transposed = np.ascontiguousarray(quantized.data), None
    if quantization.transpose:
        transposed = _of_library(np.ascontiguousarray(data.T), name, like)
    data = _of_library(data.reshape(shape), name, like)
    if layout == "row":
        scales = quantized.scale_inv.reshape(scale_shape(scaling, leading, num_cols))
        scale_inv = _of_library(scales, None, like)
    else:
        memory = fp8.arranged(quantized.scale_inv, layout)
        scale_inv = arranged(_of_library(memory, None, like), quantization, leading)
    return as_quantized_tensor(quantization, data, scale_inv, transposed, like, num_cols)


def scale_shape(scaling: str, leading: tuple[int, ...], num_cols: int) -> tuple[int, ...]:
    """The shape of scale_inv."""
    block_cols = cols_of_scale(scaling, num_cols)
    if block_cols is None:
        return (1,)
    # A row without columns has its scale too.
    return (*leading, 1 if scaling == "row" else ceil_div(num_cols, block_cols))


def scale_memory(
    quantization: Quantization, leading: tuple[int, ...], num_cols: int
) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of the memory of scale_inv, as `arranged` takes it."""
    shape = scale_shape(quantization.scaling, leading, num_cols)
    if quantization.layout == "row":
        return shape, "float32"
    num_rows, is_packed = 4 * ceil_div(arrays.product(leading), 4), quantization.layout == "packed"
    num_parts = ceil_div(shape[-1], 4) if is_packed else shape[-1]
    return (num_parts, num_rows), "int32" if is_packed else "float32"


def arranged(memory: Array, quantization: Quantization, leading: tuple[int, ...]) -> Array:
    """scale_inv: a view of its memory. reshape would give a single column or row other strides."""
    if quantization.layout == "row":
        return memory
    num_parts, strides = memory.shape[0], [memory.shape[1]]
    for at in range(len(leading)):
        strides.insert(0, arrays.product(leading[len(leading) - at :]))
    shape = (*leading, num_parts)
    if arrays.is_torch(memory):
        return memory.as_strided(shape, strides)
    library = np if isinstance(memory, np.ndarray) else nvrtc.cupy()
    return library.lib.stride_tricks.as_strided(memory, shape, [4 * each for each in strides])


def as_quantized_tensor(
    quantization: Quantization,
    data: Array,
    scale_inv: Array,
    transposed: Array | None,
    x: Array,
    num_cols: int,
) -> QuantizedTensor:
    """The arrays of an 8-bit y of x, as quantization says they were written, as one value."""
    block_cols = cols_of_scale(quantization.scaling, num_cols)
    return QuantizedTensor(
        data,
        scale_inv,
        x.dtype if arrays.is_torch(x) else arrays.dtype_name(x),
        transposed=transposed,
        format=quantization.dtype,
        block_rows=None if block_cols is None else 1,
        block_cols=block_cols or num_cols,
    )


def _of_library(raw: np.ndarray, name: str | None, like: Array) -> Array:
    """A host array; name: the 8-bit format that its bits are, if any."""
    if not arrays.is_torch(like):
        return raw if raw.size else np.empty(raw.shape, raw.dtype)
    torch = sys.modules["torch"]
    if not raw.size:  # NumPy's strides would be 0
        return torch.empty(raw.shape, dtype=getattr(torch, name or raw.dtype.name))
    tensor = torch.from_numpy(raw)
    return tensor.view(getattr(torch, name)) if name else tensor


# Matrices on a GPU.


class OfNorm(NamedTuple):
    """A norm whose y is quantised in place of the matrix itself, and its statistics."""

    centered: bool
    weight: Array | None
    bias: Array | None
    zero_centered: bool
    mean: Array | None
    rstd: Array


class QuantizedMatrix(NamedTuple):
    """data: [num_rows, num_cols]. transposed: [num_cols, num_rows]. sums: over rows, [num_cols].

    None: not wanted.
    """

    data: Array | None
    scale_inv: Array | None
    transposed: Array | None
    sums: Array | None = None


def quantize(
    x: Array,
    dtype: str,
    scale: Array | None = None,
    amax: Array | None = None,
    *,
    wants_data: bool = True,
    transpose: bool = False,
    of_norm: OfNorm | None = None,
    sums: str | None = None,
    rule: tuple[float, bool] | None = None,
) -> QuantizedMatrix:
    """A matrix on a GPU in 8-bit floats, read once; one of 8-bit floats is only transposed.

    x: [num_rows, num_cols]; the device of a CuPy array is the current one. dtype: the 8-bit one by
    name. scale: one float32, None: 1.
    amax: one float32, raised to the largest |x|. of_norm: quantise that norm's y of x.
    sums: the dtype of sums of x over rows, which are computed in float32 (float64 for float64), in
    a fixed order, and rounded once.
    rule: (smallest_amax, power_of_two): the scale is that of amax, x's own, which is read.
    """
    library = arrays.library(x)
    of_key, centered, zero_centered = None, None, False
    norm: tuple[Array | None, ...] = (None,) * 4
    if of_norm is not None:
        centered, zero_centered = of_norm.centered, of_norm.zero_centered
        norm = of_norm.weight, of_norm.bias, of_norm.mean, of_norm.rstd
        of_key = *map(library.layout_key, norm), centered, zero_centered
    operands = _Operands(x, *norm, scale, amax)
    key = (library.layout_key(x), dtype, of_key, wants_data, transpose, sums, rule)
    # amax may be written to, so it is never copied. It is one element that we made.
    key += None if scale is None else library.layout_key(scale), amax is None
    prepared = matrices.get(key)
    if prepared is None:
        options = QuantizeOptions(dtype, centered, zero_centered, sums, rule)
        prepared = _prepare(operands, options, wants_data, transpose)
        keep(matrices, key, prepared)
    quantized = QuantizedMatrix(*prepared.run(operands))
    if not prepared.steps and quantized.scale_inv is not None:
        quantized.scale_inv[...] = 1.0 if scale is None else 1.0 / scale
    return quantized


class _Operands(NamedTuple):
    x: Array
    weight: Array | None
    bias: Array | None
    mean: Array | None
    rstd: Array | None
    scale: Array | None
    amax: Array | None


def _prepare(
    operands: _Operands, options: QuantizeOptions, wants_data: bool, transpose: bool
) -> Prepared:
    x, dtype = operands.x, options.dtype
    rows, copied = rows_of(x, 1)
    is_scaled = rows.dtype not in (dtype, "uint8")
    if not is_scaled:
        rows = rows._replace(dtype=dtype)
    names = ("weight", "bias", "mean", "rstd", "scale")
    layouts = {"x": (rows, copied), **layouts_of(operands, names, (), 1)}
    outputs = {
        "data": ((rows.num_rows, rows.num_cols), dtype if wants_data else None),
        "scale_inv": ((1,), "float32" if is_scaled else None),
        "transposed": ((rows.num_cols, rows.num_rows), dtype if transpose else None),
        "sums": ((rows.num_cols,), options.sums),
    }
    call = None
    if rows.num_rows and rows.num_cols:
        of_plan = [name for name in ("x", "weight", "bias") if name in layouts]
        call = quantize_call({name: layouts[name][0] for name in of_plan}, options)
    return _prepared_matrix(operands, layouts, outputs, call)


def _prepared_matrix(
    operands: _Operands,
    layouts: Layouts,
    outputs: dict[str, tuple[tuple[int, ...], str | None]],
    call: Call | None,
    *,
    zeroed: bool = False,
) -> Prepared:
    """outputs: shapes and dtypes; None for what is not wanted.

    zeroed: outputs are 0 before the launch. call: None if there is nothing to compute: they stay 0.
    """
    names = [name for name, array in zip(operands._fields, operands) if array is not None]
    copied = {name: name in layouts and layouts[name][1] for name in names}
    made = {name: (shape, dtype) for name, (shape, dtype) in outputs.items() if dtype}
    fills = dict.fromkeys(made, 0) if zeroed or call is None else None
    if call is not None and call.partials_shape:
        made["partials"] = call.partials_shape, compute_dtype(layouts["x"][0].dtype).name
    read = reader(operands._fields, names)
    return Prepared(operands.x, read, copied, made, call, tuple(outputs), fills=fills)


class QuantizeOptions(NamedTuple):
    """How a matrix, or a norm's y of it, becomes 8-bit floats of a dtype.

    centered: None for the matrix itself, else whether its norm is layer_norm. sums: the dtype of
    sums of x over rows, or None.
    rule: (smallest_amax, power_of_two) where the scale comes from a known amax, None where it is
    given.
    """

    dtype: str
    centered: bool | None = None
    zero_centered: bool = False
    sums: str | None = None
    rule: tuple[float, bool] | None = None


def quantize_call(tensors: RowsByName, options: QuantizeOptions) -> Call:
    """tensors: x, weight, bias. x of the 8-bit dtype itself is only transposed."""
    x = tensors["x"]
    launches = quantize_launch(
        x.num_rows,
        x.num_cols,
        x.dtype,
        options.dtype,
        layout_of(x.num_cols, tensors).pack_limit,
        centered=options.centered,
        weight=dtype_of(tensors, "weight"),
        bias=dtype_of(tensors, "bias"),
        zero_centered=options.zero_centered,
        sums=options.sums,
        scaling="tensor" if options.rule else "given",
    )
    words = [*row_words(tensors, "x")]
    if x.dtype != options.dtype:
        smallest_amax, power_of_two = options.rule or (0.0, False)
        how = Quantization(options.dtype, power_of_two=power_of_two, smallest_amax=smallest_amax)
        rule = scale_rule_words(how)
        words += [Address("scale"), Address("scale_inv"), Address("amax"), *rule]
    if options.centered is not None:
        words += [Address("weight"), Address("bias"), Address("mean"), Address("rstd")]
    words += [Address("data"), x.num_cols, Address("transposed"), x.num_rows, x.num_cols]
    arguments, partials_shape = [[*words, Address("partials")]], None
    if options.sums:
        partials_shape = (-(-x.num_rows // 128), x.num_cols)  # one row for each 128 rows
        arguments.append(sum_words(partials_shape))
    return Call(launches, tuple(arguments), None, partials_shape)


def sum_words(partials_shape: tuple[int, int]) -> Words:
    """struct Parameters of backward_parameters.cu, of one kind of sums."""
    num_cols = partials_shape[1]
    return [0, Address("partials"), num_cols, 0, Address("sums"), *partials_shape]


def update_scales(
    scale: Array, history: Array, largest: Array, factor: float, *, most_recent: bool
) -> None:
    """The end of a step of delayed scaling, in place, by one launch: what nn/scales.py's updated
    gives.

    scale, largest: [num_tensors]; history: [num_steps, num_tensors]; all float32, contiguous, on a
    GPU. factor: what largest is multiplied by. most_recent: this step's amax counts, and not the
    largest of all steps.
    """
    view = arrays.view(history)
    key = ("update_scales", view.device, *view.shape)
    kernel = matrices.get(key)
    if kernel is None:
        kernel = launch.load(update_scales_launch(view.shape[1]), view.device)
        keep(matrices, key, kernel)
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


def sum_rows(x: Array, dtype: str) -> Array:
    """[num_cols]: sums over the rows of x [num_rows, num_cols], of a dtype by name.

    They are computed in float32 (float64 for float64), in a fixed order, and rounded once.
    """
    return _prepared(x, dtype).run((x,))


def amax(x: Array) -> Array:
    """[1], float32: the largest |x| of a matrix; NaN if there is one, 0 of nothing."""
    return _prepared(x, None).run((x,))


def _prepared(x: Array, sums: str | None) -> Prepared:
    key = ("reduce_matrix", arrays.library(x).layout_key(x), sums)
    prepared = matrices.get(key)
    if prepared is None:
        rows, copied = rows_of(x, 1)
        call = None
        if rows.num_rows and rows.num_cols:
            call = reduce_matrix_call(launch.device(arrays.view(x).device), rows, sums)
        outputs = {"sums": ((rows.num_cols,), sums)} if sums else {"amax": ((1,), "float32")}
        layouts = {"x": (rows, copied)}
        # The kernel raises amax, and writes sums.
        operands = _Operands(x, *(None,) * 6)
        prepared = _prepared_matrix(operands, layouts, outputs, call, zeroed=sums is None)
        keep(matrices, key, prepared)
    return prepared


def reduce_matrix_call(device: Device, x: Rows, sums: str | None) -> Call:
    """A reading of a matrix for its largest magnitude, or for sums over its rows, of dtype sums."""
    limit = layout_of(x.num_cols, {"x": x}).pack_limit
    launches, num_slabs, rows_of_slab = reduce_matrix_launch(
        device, x.num_rows, x.num_cols, x.dtype, limit, sums
    )
    words = [*row_words({"x": x}, "x"), x.num_rows, x.num_cols, rows_of_slab]
    arguments, partials_shape = [[*words, Address("partials"), Address("amax")]], None
    if sums:
        partials_shape = (num_slabs, x.num_cols)
        arguments.append(sum_words(partials_shape))
    return Call(launches, tuple(arguments), None, partials_shape)
