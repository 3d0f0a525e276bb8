"""layer_norm and rms_norm with fused options: a sum of its own dtype, dropout and a scale of each row before a residual is
added.

As norm.py, from which such calls come: check, plan, allocate, launch, each kind of call once. What is different: the row that
is normalised is a sum that the kernel makes of input and residual, and backward splits its gradient between the two. Backward
alone may also write y again.
"""

from __future__ import annotations

import math
import sys

import numpy as np

from . import arrays, launch, norm, nvrtc, quantized
from .calls import NOTHING_FUSED, Dropout, FusedBackwardCall, FusedForwardCall, FusedOptions, OfY, Quantization, Recomputed
from .dispatch import choose, pack_limit
from .dtypes import DTYPES, compute_dtype, decode, encode
from .norm import FOR_GRADIENTS, FOR_STATISTICS, FOR_Y, Array, FusedBackward, FusedForward
from .problem import Problem


def normalize(
    centered, input, extents, weight, bias, eps, residual, return_residual, zero_centered_weight, out_dtype, out, options,
    fused_options,
):  # fmt: skip
    """What layer_norm and rms_norm return."""
    if norm.is_tensor(input):
        y, y1, added = norm._torch_part().normalize_fused(
            centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options, fused_options
        )
    else:
        prepared, given = prepare_forward(
            centered, input, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options, fused_options,
            FOR_Y,
        )  # fmt: skip
        y, _, _, added, y1, _ = prepared.run(*given)
    # Old compilers do not know properties of a NamedTuple.
    results = (y,) if fused_options.weight1 is None and fused_options.bias1 is None else (y, y1)
    results += (added,) if return_residual else ()
    return results if len(results) > 1 else y


def forward(*arguments) -> FusedForward:
    """What layer_norm_forward and rms_norm_forward return; arguments of prepare_forward."""
    prepared, given = prepare_forward(*arguments, FOR_STATISTICS)
    return FusedForward(*prepared.run(*given))


def backward(
    centered, dy, dy1, x, mean, rstd, extents, weight, zero_centered_weight, dsum, gradients, dweight_dtype, dbias_dtype,
    options, dx_dtype, dresidual_dtype, fused_options, dbias1_dtype=None, of_y=None,
) -> FusedBackward:  # fmt: skip
    """What layer_norm_backward and rms_norm_backward return; arguments of prepare_backward, and dy1, the gradient of y1.

    of_y: forward's (weight, bias) if x is its y.

    Where there are both, what dy1 and dsum bring goes in the arithmetic's dtype to the kernel of dy, as its dsum.
    """
    fused_options = fused_options or NOTHING_FUSED
    # What is fixed for both kernels.
    rows, others = (x, mean, rstd, extents), (options, dx_dtype, dresidual_dtype, fused_options, of_y)

    def run(dy, weight, dsum, names, dweight_dtype, dbias_dtype, others):
        prepared, given = prepare_backward(
            centered, dy, *rows, weight, zero_centered_weight, dsum, names, dweight_dtype, dbias_dtype, *others
        )
        return prepared.run(*given)[:4]

    if isinstance(gradients, str) or not {"dweight1", "dbias1"} & set(gradients) and dy1 is None:
        return FusedBackward(*run(dy, weight, dsum, gradients, dweight_dtype, dbias_dtype, others), None, None)
    if dy1 is None:
        raise TypeError("dy1 is None; expected the gradient of y1")
    norm._check_gradients(gradients, FusedBackward._fields)
    of_sum = tuple(name for name in gradients if name in ("dx", "dresidual"))
    of_second = tuple(name for name in ("dweight", "dbias") if f"{name}1" in gradients)
    if dy is None:
        dx, dweight1, dbias1, dresidual = run(dy1, fused_options.weight1, dsum, of_sum + of_second, None, dbias1_dtype, others)
        return FusedBackward(dx, None, None, dresidual, dweight1, dbias1)
    wide = "float64" if arrays.on_host(x) else arrays.dtype_name(rstd)
    names = of_second + (("dx",) if of_sum else ())
    dsum, dweight1, dbias1, _ = run(
        dy1, fused_options.weight1, dsum, names, None, dbias1_dtype, (options, wide, None, None, of_y)
    )
    names = tuple(name for name in ("dweight", "dbias") if name in gradients) + of_sum
    return FusedBackward(*run(dy, weight, dsum, names, dweight_dtype, dbias_dtype, others), dweight1, dbias1)


# Seeds.


def draw_seed(x: Array) -> Array:
    """An int64 array of one element where x lies, by the generator of x's library there. Nothing waits for its value."""
    most = 2**62  # a power of two: below any other number CuPy may have to draw again, and waits to see whether it has to
    if arrays.is_torch(x):
        torch = sys.modules["torch"]
        return torch.randint(0, most, (1,), dtype=torch.int64, device=x.device)
    if isinstance(x, np.ndarray):
        return np.random.randint(0, most, 1, np.int64)
    return nvrtc.cupy().random.randint(0, most, 1, np.int64)


def _check_seed(seed: object, x: Array) -> object:
    """The seed as it is taken: an array of one int64, an int or None."""
    if seed is None or isinstance(seed, int):
        return seed
    if not hasattr(seed, "__dlpack__"):
        raise TypeError(f"dropout_seed is a {type(seed).__name__}; expected an int or one element of int64")
    seed = arrays.take(seed, "dropout_seed")
    if arrays.dtype_name(seed) != "int64" or math.prod(seed.shape) != 1:
        raise ValueError(
            f"dropout_seed has shape {tuple(seed.shape)} and dtype {arrays.dtype_name(seed)}; expected one element of int64, "
            "or an int"
        )
    norm._check_same_place(seed, x, "dropout_seed", "input")
    return seed


def _dropout(p: float, seed: object, address) -> Dropout:
    return Dropout(p, 0, seed) if isinstance(seed, int) else Dropout(p, address(seed), 0)


# Forward.


def prepare_forward(
    centered, x, extents, weight, bias, eps, residual, zero_centered_weight, out_dtype, out, options, fused_options, purpose
) -> tuple[_PreparedForward | _ReferenceForward, tuple]:  # fmt: skip
    """As norm.prepare_forward."""
    lie = arrays.library(x).lie
    seed, row_scale = fused_options.dropout_seed, fused_options.row_scale
    try:
        key = (
            lie(x), lie(weight), lie(bias), lie(residual), lie(out), _lie_of_constant(lie, row_scale),
            isinstance(seed, int) or lie(seed), lie(fused_options.weight1), lie(fused_options.bias1),
            _key_of(fused_options.quantization, lie), centered, extents,
            eps, eps.__class__, zero_centered_weight, out_dtype, options, purpose, fused_options.residual_dtype,
            fused_options.dropout_p > 0, fused_options.round_x_hat, fused_options.memory_efficient,
        )  # fmt: skip
        prepared = norm.fused_forwards.get(key)
    except (AttributeError, TypeError, RuntimeError):
        key = prepared = None
    if prepared is None:
        x, weight, bias, residual, eps, y_dtype, sum_dtype, fused_options = check_forward(
            centered, x, extents, weight, bias, eps, residual, out_dtype, fused_options
        )
        arrays.check_addresses(
            input=x, weight=weight, bias=bias, residual=residual, out=out, row_scale=fused_options.row_scale,
            dropout_seed=fused_options.dropout_seed, weight1=fused_options.weight1, bias1=fused_options.bias1,
        )  # fmt: skip
        if fused_options.quantization is not None and out is not None:
            raise ValueError(f"out was given with out_dtype {y_dtype}; expected out=None")
        norm._check_out(out, x, y_dtype, len(extents))
        if fused_options.quantization is not None:
            scale, amax = fused_options.quantization[2:4]
            arrays.check_addresses(scale=scale, amax=amax)
        if purpose is FOR_GRADIENTS:
            if out is not None:
                raise ValueError("out was given for tensors that require gradients; expected out=None, or torch.no_grad()")
            dy_dtype = sum_dtype if fused_options.quantization else y_dtype
            _check_backward(centered, x, extents, weight, bias, dy_dtype, sum_dtype, options, fused_options)
        arguments = (
            centered,
            x,
            extents,
            weight,
            bias,
            eps,
            residual,
            zero_centered_weight,
            y_dtype,
            sum_dtype,
            out,
            options,
            fused_options,
        )
        if arrays.on_host(x):
            prepared = _ReferenceForward(*arguments)
        else:
            prepared = _PreparedForward(*arguments, wants_statistics=purpose is not FOR_Y)
            norm.keep(norm.fused_forwards, key, prepared)
    if out is not None:
        others = {name: getattr(fused_options, name) for name in ("row_scale", "weight1", "bias1")}
        norm._check_overlap(out, {"input": x, "weight": weight, "bias": bias, "residual": residual, **others})
    return prepared, (x, weight, bias, residual, out, fused_options)


def _lie_of_constant(lie, array: Array | None) -> tuple:
    """What the checks depend on of an array that takes no gradient."""
    return lie(array), getattr(array, "requires_grad", False)


def _key_of(quantization: Quantization | None, lie) -> tuple | None:
    if quantization is None:
        return None
    scale, amax = quantization.scale, quantization.amax
    constants = _lie_of_constant(lie, scale), _lie_of_constant(lie, amax), quantized.at_one_address(scale, amax)
    return (*constants, *quantization._replace(scale=None, amax=None))


def check_forward(centered, x, extents, weight, bias, eps, residual, out_dtype, fused_options) -> tuple:
    """As norm.check_forward, and the sum's dtype and the fused_options as they are taken."""
    has_eps = eps is not None
    quantization = fused_options.quantization
    out_dtype = None if quantization else out_dtype
    x, weight, bias, _, eps, y_dtype = norm.check_forward(centered, x, extents, weight, bias, eps, None, out_dtype)
    dtype, shape = arrays.dtype_name(x), tuple(x.shape)
    sum_dtype = fused_options.residual_dtype or dtype
    if not has_eps:
        eps = norm._check_eps(None, sum_dtype, has_default=not centered)
    residual = norm._take_like(residual, x, shape, "residual", "input")
    if residual is not None and arrays.dtype_name(residual) not in (dtype, sum_dtype):
        expected = dtype if sum_dtype == dtype else f"the input's or residual_dtype, {dtype} or {sum_dtype}"
        raise TypeError(f"residual is of dtype {arrays.dtype_name(residual)}; expected {expected}")
    row_scale = norm._take_like(fused_options.row_scale, x, shape[: len(shape) - len(extents)], "row_scale", "input")
    if getattr(row_scale, "requires_grad", False):
        raise ValueError("row_scale requires a gradient; it is a constant here, so expected row_scale.detach()")
    weight1, bias1 = (norm._take_like(getattr(fused_options, name), x, extents, name, "input") for name in ("weight1", "bias1"))
    seed = _check_seed(fused_options.dropout_seed, x)
    fused_options = fused_options._replace(row_scale=row_scale, dropout_seed=seed, weight1=weight1, bias1=bias1)
    if quantization is not None:
        if fused_options.has_second or fused_options.memory_efficient:
            name = "memory_efficient" if fused_options.memory_efficient else "a second weight or bias"
            raise ValueError(f"{name} was given with out_dtype {quantization.dtype}; expected only one of them")
        quantization, y_dtype = quantized.check(quantization, x), quantization.dtype
        fused_options = fused_options._replace(quantization=quantization)
    if fused_options.memory_efficient and compute_dtype(y_dtype) != compute_dtype(sum_dtype):
        raise TypeError(
            f"memory_efficient was given for y of {y_dtype} and a sum of {sum_dtype}; expected both float64, or neither"
        )
    return x, weight, bias, residual, eps, y_dtype, sum_dtype, fused_options


def _check_backward(centered, x, extents, weight, bias, y_dtype, sum_dtype, options, fused_options) -> None:
    """As norm._check_backward."""
    if options.strategy is None or arrays.on_host(x):
        return
    num_cols, dtype = arrays.product(extents), arrays.dtype_name(x)
    weight_dtype, bias_dtype = (None if array is None else arrays.dtype_name(array) for array in (weight, bias))
    row_scale = None if fused_options.row_scale is None else arrays.dtype_name(fused_options.row_scale)
    problem = Problem(
        "backward", centered, num_cols, sum_dtype, dy=y_dtype, dx=dtype, weight=weight_dtype, dweight=weight_dtype,
        dbias=bias_dtype, pack_limit=pack_limit(num_cols, ()), row_scale=row_scale, dropout=fused_options.dropout_p > 0,
    )  # fmt: skip
    choose(problem, launch.device(norm._view(x).device), options.strategy)


class _Forward(norm._Forward):
    """A forward that is checked, and what its gradients depend on besides arrays."""

    def __init__(self, centered, x, extents, bias, residual, zero_centered_weight, sum_dtype, options, fused_options) -> None:
        super().__init__(centered, extents, bias, zero_centered_weight, options)
        self.dtype, self.sum_dtype = arrays.dtype_name(x), sum_dtype
        self.residual_dtype = None if residual is None else arrays.dtype_name(residual)
        self.bias1_dtype = None if fused_options.bias1 is None else arrays.dtype_name(fused_options.bias1)
        self.has_second = fused_options.has_second
        self.makes_sum = residual is not None or sum_dtype != self.dtype or fused_options.is_scaled


class _PreparedForward(_Forward):
    """As norm._PreparedForward."""

    def __init__(
        self, centered, x, extents, weight, bias, eps, residual, zero_centered_weight, y_dtype, sum_dtype, out, options,
        fused_options, wants_statistics,
    ) -> None:  # fmt: skip
        super().__init__(centered, x, extents, bias, residual, zero_centered_weight, sum_dtype, options, fused_options)
        num_dims = len(extents)
        view = norm._view(x)
        self.device_index = view.device
        self.library = library = arrays.library(x)(view.device)
        leading = view.shape[: len(view.shape) - num_dims]
        x_rows, copy_x = norm._rows(x, num_dims)
        residual_rows, copy_residual = norm._rows(residual, num_dims)
        weight_parameter, copy_weight = norm._parameter(weight)
        bias_parameter, copy_bias = norm._parameter(bias)
        row_scale, copy_row_scale = norm._parameter(fused_options.row_scale)
        weight1, copy_weight1 = norm._parameter(fused_options.weight1)
        bias1, copy_bias1 = norm._parameter(fused_options.bias1)
        self.copies = norm._copies(copy_x, copy_weight, copy_bias, copy_residual, copy_row_scale, copy_weight1, copy_bias1)
        y_rows = arrays.contiguous_rows(view.shape, num_dims, y_dtype) if out is None else norm._rows(out, num_dims)[0]
        sum_rows = arrays.contiguous_rows(view.shape, num_dims, sum_dtype) if self.makes_sum else None
        y1_rows = arrays.contiguous_rows(view.shape, num_dims, y_dtype) if self.has_second else None
        self.call = call = FusedForwardCall(
            launch.device(view.device), centered, x_rows, y_rows, weight_parameter, bias_parameter, eps, zero_centered_weight,
            residual_rows, sum_rows, options.of("forward" if wants_statistics else "inference"), row_scale=row_scale,
            drops=fused_options.dropout_p > 0, y1=y1_rows, weight1=weight1, bias1=bias1,
            round_x_hat=fused_options.round_x_hat, quantization=fused_options.quantization,
        )  # fmt: skip
        self.kernels = [launch.load(each, view.device) for each in call.plan.launches]
        compute = compute_dtype(sum_dtype).name
        self.new_y = norm._new(library, view.shape, y_dtype)
        self.new_y1 = norm._new(library, view.shape, y_dtype if self.has_second else None)
        self.new_mean = norm._new(library, leading, compute if centered and wants_statistics else None)
        self.new_rstd = norm._new(library, leading, compute if wants_statistics else None)
        self.new_sum = norm._new(library, view.shape, sum_dtype if self.makes_sum else None)
        self.num_rows, self.num_cols = x_rows.num_rows, x_rows.num_cols
        if fused_options.quantization:
            scaling = fused_options.quantization.scaling
            scale_shape = quantized.scale_shape(scaling, leading, self.num_cols)
            self.new_scale_inv = norm._new(library, scale_shape, "uint8" if scaling == "mx" else "float32")
            # Between two launches.
            self.new_amax = norm._new(library, scale_shape, "float32" if len(self.kernels) > 1 else None)

    def run(self, x, weight, bias, residual, out, fused_options: FusedOptions) -> tuple:
        """The fields of FusedForward."""
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            _, row_scale, _, seed, weight1, bias1, *_, quantization = fused_options
            if seed is None and fused_options.dropout_p > 0:
                seed = draw_seed(x)
            added = self.new_sum() if self.makes_sum else x
            if self.copies:
                given = (x, weight, bias, residual, row_scale, weight1, bias1)
                x, weight, bias, residual, row_scale, weight1, bias1 = norm._contiguous(library, self.copies, given)
            y, y1 = self.new_y() if out is None else out, self.new_y1()
            mean, rstd = self.new_mean(), self.new_rstd()
            of_scales = ()
            if quantization is not None:
                scale_inv, found = self.new_scale_inv(), self.new_amax()
                of_scales = (quantization.scale, scale_inv, quantization.amax if found is None else found)
                norm._fill((found,), 0.0)
            if not self.kernels:
                norm._fill((mean, rstd), math.nan)
                if quantization is not None:
                    norm._fill((scale_inv,), 1.0 if quantization.scale is None else 1.0 / quantization.scale)
                    y = quantized.result(quantization, y, scale_inv, self._transposed(y, quantization), x, self.num_cols)
                return y, mean, rstd, added, y1, seed
            address = _address_or_zero(library.address)
            words = self.call.words(
                *map(address, (x, y, weight, bias, mean, rstd, residual, added if self.makes_sum else None, row_scale)),
                _dropout(fused_options.dropout_p, seed, address), *map(address, (y1, weight1, bias1, *of_scales)),
            )  # fmt: skip
            stream = library.stream()
            for kernel, argument in zip(self.kernels, words):
                kernel.enqueue(stream, argument)
            if quantization is not None:
                y = quantized.result(quantization, y, scale_inv, self._transposed(y, quantization), x, self.num_cols)
            return y, mean, rstd, added, y1, seed
        finally:
            if former != self.device_index:
                library.exchange_device(former)

    def _transposed(self, data: Array, quantization: Quantization) -> Array | None:
        if not quantization.transpose:
            return None
        matrix = data.reshape(self.num_rows, self.num_cols)
        return quantized.quantize(matrix, quantization.dtype, wants_data=False, transpose=True).transposed


def _address_or_zero(address):
    return lambda array: 0 if array is None else address(array)


def _scaled(matrix: np.ndarray, row_scale: Array | None, dropout_p: float, seed: object) -> np.ndarray:
    from . import reference

    row_scale = None if row_scale is None else arrays.to_float64(row_scale).reshape(-1)
    seed = int(seed.item()) if hasattr(seed, "item") else seed or 0
    return reference.scaled(matrix, row_scale, dropout_p, seed)


class _ReferenceForward(_Forward):
    """A forward of arrays on the host: the sum by the reference, rounded once, and the norm of that."""

    def __init__(
        self, centered, x, extents, weight, bias, eps, residual, zero_centered_weight, y_dtype, sum_dtype, out, options,
        fused_options,
    ) -> None:  # fmt: skip
        super().__init__(centered, x, extents, bias, residual, zero_centered_weight, sum_dtype, options, fused_options)
        self.arguments = centered, extents, weight, bias, eps, zero_centered_weight, y_dtype, options
        self.matrix_shape = arrays.product(x.shape[: len(x.shape) - len(extents)]), arrays.product(extents)

    def run(self, x, weight, bias, residual, out, fused_options: FusedOptions) -> tuple:
        centered, extents, _, _, eps, zero_centered_weight, y_dtype, options = self.arguments
        seed = fused_options.dropout_seed
        if seed is None and fused_options.dropout_p > 0:
            seed = draw_seed(x)
        added = x
        if self.makes_sum:
            values = arrays.to_float64(x).reshape(self.matrix_shape)
            values = _scaled(values, fused_options.row_scale, fused_options.dropout_p, seed).reshape(tuple(x.shape))
            if residual is not None:
                values = values + arrays.to_float64(residual)
            added = arrays.from_float64(values, self.sum_dtype, x)
        quantization = fused_options.quantization
        plain = norm._ReferenceForward(
            centered,
            added,
            extents,
            weight,
            bias,
            eps,
            None,
            zero_centered_weight,
            "float64" if quantization else y_dtype,
            out,
            options,
        )
        if fused_options.round_x_hat and compute_dtype(self.dtype).name != self.dtype:
            plain.round_x_hat = self._rounded
        y, mean, rstd, _ = plain.run(added, weight, bias, None, out)
        y1 = plain.run(added, fused_options.weight1, fused_options.bias1, None, None)[0] if self.has_second else None
        if quantization is not None:
            y = quantized.on_host(quantization, y, extents, x)
        return y, mean, rstd, added, y1, seed

    def _rounded(self, x_hat: np.ndarray) -> np.ndarray:
        return decode(encode(x_hat, self.dtype), self.dtype)


# Backward.


def prepare_backward(
    centered, dy, x, mean, rstd, extents, weight, zero_centered_weight, dsum, gradients, dweight_dtype, dbias_dtype, options,
    dx_dtype, dresidual_dtype, fused_options, of_y=None, recomputed=None, spends_dy=False,
) -> tuple[_PreparedBackward | _ReferenceBackward, tuple]:  # fmt: skip
    """As norm.prepare_backward; fused_options: those of forward with the seed that it used, or None.

    recomputed: (forward's bias,) if y is to be written again, in dy's dtype, by the kernel that makes the gradients: from mean
    and rstd as they were rounded, so that y may differ from forward's by what backward's x_hat differs.
    spends_dy: as there; the first of dx and dresidual may be in dy's place.
    """
    fused_options = fused_options or NOTHING_FUSED
    lie = arrays.library(x).lie
    seed, row_scale = fused_options.dropout_seed, fused_options.row_scale
    try:
        key = (
            lie(dy), lie(x), lie(mean), lie(rstd), lie(weight), lie(dsum), lie(row_scale), isinstance(seed, int) or lie(seed),
            centered, extents, zero_centered_weight, gradients, dweight_dtype, dbias_dtype, options, dx_dtype, dresidual_dtype,
            fused_options.dropout_p > 0, of_y and tuple(map(lie, of_y)), recomputed and (lie(recomputed[0]),), spends_dy,
        )  # fmt: skip
        prepared = norm.fused_backwards.get(key)
    except (AttributeError, TypeError, RuntimeError):
        key = prepared = None
    if prepared is None:
        dy, x, mean, rstd, weight, dsum, wanted = norm.check_backward(
            centered and of_y is None, dy, x, mean, rstd, extents, weight, dsum, gradients, dweight_dtype, dbias_dtype,
            FusedBackward._fields,
        )  # fmt: skip
        if of_y is not None:
            of_y = tuple(norm._take_like(each, x, extents, name, "x") for each, name in zip(of_y, ("weight", "bias")))
            arrays.check_addresses(weight=of_y[0], bias=of_y[1])
        if recomputed is not None:
            recomputed = (norm._take_like(recomputed[0], x, extents, "bias", "x"),)
        if fused_options.dropout_p > 0 and seed is None:
            raise TypeError("dropout_seed is None; expected the seed that the forward returned")
        row_scale = norm._take_like(row_scale, x, tuple(rstd.shape), "row_scale", "x")
        seed = _check_seed(seed, x)
        fused_options = fused_options._replace(row_scale=row_scale, dropout_seed=seed)
        arrays.check_addresses(
            dy=dy, x=x, mean=mean, rstd=rstd, weight=weight, dsum=dsum, row_scale=row_scale, dropout_seed=seed
        )
        dx, dweight, dbias = wanted
        if dx is not None and dx_dtype is not None:
            dx = norm.check_dtype_name(dx_dtype, "dx_dtype")
        dresidual = arrays.dtype_name(x) if "dresidual" in gradients else None
        if dresidual is not None and dresidual_dtype is not None:
            dresidual = norm.check_dtype_name(dresidual_dtype, "dresidual_dtype")
        wanted = (dx, dweight, dbias, dresidual)
        if arrays.on_host(x):
            prepared = _ReferenceBackward(centered, tuple(x.shape), extents, zero_centered_weight, wanted)
        else:
            prepared = _PreparedBackward(
                centered, dy, x, mean, rstd, extents, weight, zero_centered_weight, dsum, wanted, options, fused_options, of_y,
                recomputed, spends_dy,
            )  # fmt: skip
            norm.keep(norm.fused_backwards, key, prepared)
    return prepared, (dy, x, mean, rstd, weight, dsum, fused_options, of_y, recomputed)


class _PreparedBackward:
    """As norm._PreparedBackward."""

    def __init__(
        self, centered, dy, x, mean, rstd, extents, weight, zero_centered_weight, dsum, wanted, options, fused_options, of_y,
        recomputed, spends_dy,
    ) -> None:  # fmt: skip
        view = norm._view(x)
        num_dims = len(extents)
        self.device_index = view.device
        self.library = library = arrays.library(x)(view.device)
        dx, dweight, dbias, dresidual = wanted
        # One tensor where two would be the same; where only the residual's is wanted it is written as dx is, and not scaled.
        self.is_scaled = dx is not None and fused_options.is_scaled
        self.is_both = None not in (dx, dresidual) and not self.is_scaled and dx == dresidual
        self.is_residual = dx is None
        first, second = (dresidual, None) if self.is_residual else (dx, None if self.is_both else dresidual)
        dy_rows, copy_dy = norm._rows(dy, num_dims)
        x_rows, copy_x = norm._rows(x, num_dims)
        dsum_rows, copy_dsum = norm._rows(dsum if first else None, num_dims)
        weight_parameter, copy_weight = norm._parameter(weight)
        row_scale, copy_row_scale = norm._parameter(fused_options.row_scale if self.is_scaled else None)
        y_weight, copy_y_weight = norm._parameter(of_y and of_y[0])
        y_bias, copy_y_bias = norm._parameter(of_y and of_y[1])
        bias, copy_bias = norm._parameter(recomputed and recomputed[0])
        y_dtype = None if recomputed is None else dy_rows.dtype
        # In the order of run's arguments.
        self.copies = norm._copies(
            copy_dy, copy_x, norm._parameter(mean)[1], norm._parameter(rstd)[1], copy_weight, copy_dsum, copy_row_scale,
            copy_y_weight, copy_y_bias, copy_bias,
        )  # fmt: skip
        dx_rows, dresidual_rows, y_rows = (
            arrays.contiguous_rows(view.shape, num_dims, dtype) if dtype else None for dtype in (first, second, y_dtype)
        )
        dweight_parameter, dbias_parameter = ((0, dtype) if dtype else None for dtype in (dweight, dbias))
        self.call = call = FusedBackwardCall(
            launch.device(view.device), centered, x_rows, dy_rows, weight_parameter, zero_centered_weight, dx_rows,
            dweight_parameter, dbias_parameter, dsum_rows, options.of("backward"), dresidual=dresidual_rows,
            row_scale=row_scale, drops=self.is_scaled and fused_options.dropout_p > 0,
            of_y=None if of_y is None else OfY(y_weight, y_bias, arrays.dtype_name(rstd)),
            recomputed=None if y_rows is None else Recomputed(y_rows, bias),
        )  # fmt: skip
        self.kernels = [launch.load(each, view.device) for each in call.plan.launches] if any((*wanted, y_dtype)) else []
        shapes = (view.shape, extents, extents, view.shape, view.shape)
        self.new = [norm._new(library, *each) for each in zip(shapes, (first, dweight, dbias, second, y_dtype))]
        self.new_partials = norm._new(library, call.partials_shape, call.plan.problem.compute if call.partials_shape else None)
        if spends_dy and call.can_write_over_dy:
            self.new[0] = None

    def run(self, dy, x, mean, rstd, weight, dsum, fused_options: FusedOptions, of_y, recomputed) -> tuple:
        """dx, dweight, dbias, dresidual, y."""
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            row_scale, (y_weight, y_bias), (bias,) = fused_options.row_scale, of_y or (None, None), recomputed or (None,)
            if self.copies:
                given = (dy, x, mean, rstd, weight, dsum, row_scale, y_weight, y_bias, bias)
                dy, x, mean, rstd, weight, dsum, row_scale, y_weight, y_bias, bias = norm._contiguous(
                    library, self.copies, given
                )
            first, dweight, dbias, second, y = (dy if make is None else make() for make in self.new)
            if self.kernels:
                partials = self.new_partials()
                address = _address_or_zero(library.address)
                words = self.call.words(
                    *map(address, (x, dy, weight, first, mean, rstd, dweight, dbias, dsum, partials, second, row_scale)),
                    _dropout(fused_options.dropout_p, fused_options.dropout_seed, address),
                    *map(address, (y_weight, y_bias, y, bias)),
                )  # fmt: skip
                stream = library.stream()
                for kernel, argument in zip(self.kernels, words):
                    kernel.enqueue(stream, argument)
            else:
                norm._fill((dweight, dbias), 0.0)
            if self.is_residual:
                return None, dweight, dbias, first, y
            return first, dweight, dbias, first if self.is_both else second, y
        finally:
            if former != self.device_index:
                library.exchange_device(former)


class _ReferenceBackward:
    """As norm._ReferenceBackward, in float64 until dx is scaled."""

    def __init__(self, centered, shape, extents, zero_centered_weight, wanted) -> None:
        names = ("float64", *wanted[1:3])
        self.plain = norm._ReferenceBackward(centered, shape, extents, zero_centered_weight, names)
        self.wanted = wanted

    def run(self, dy, x, mean, rstd, weight, dsum, fused_options: FusedOptions, of_y, recomputed) -> tuple:
        if of_y is not None:
            x, mean = self._row_of(x, rstd, *of_y)
        total, dweight, dbias = self.plain.run(dy, x, mean, rstd, weight, dsum)
        dx_dtype, _, _, dresidual_dtype = self.wanted
        values = arrays.to_float64(total)
        dx = dresidual = None
        if dx_dtype:
            scaled = _scaled(
                values.reshape(self.plain.matrix_shape),
                fused_options.row_scale,
                fused_options.dropout_p,
                fused_options.dropout_seed,
            )
            dx = arrays.from_float64(scaled.reshape(values.shape), dx_dtype, x)
        if dresidual_dtype:
            dresidual = arrays.from_float64(values, dresidual_dtype, x)
        y = None if recomputed is None else self._recomputed(dy, x, mean, rstd, weight, *recomputed)
        return dx, dweight, dbias, dresidual, y

    def _recomputed(self, dy, x, mean, rstd, weight, bias) -> Array:
        from .reference.layer_norm import affine

        weight, bias = (None if each is None else arrays.to_float64(each).reshape(-1) for each in (weight, bias))
        rows, rstd = arrays.to_float64(x).reshape(self.plain.matrix_shape), arrays.to_float64(rstd).reshape(-1, 1)
        with np.errstate(all="ignore"):
            x_hat = (rows if mean is None else rows - arrays.to_float64(mean).reshape(-1, 1)) * rstd
            y = affine(x_hat, weight, bias, self.plain.zero_centered_weight)
        return arrays.from_float64(y.reshape(tuple(x.shape)), arrays.dtype_name(dy), x)

    def _row_of(self, y: Array, rstd: Array, weight: Array | None, bias: Array | None) -> tuple[Array, Array]:
        """A row of mean 0 that has y's x_hat and rstd, in float64, and that mean."""
        from . import reference

        weight, bias = (None if each is None else arrays.to_float64(each).reshape(-1) for each in (weight, bias))
        rows, rstd64 = arrays.to_float64(y).reshape(self.plain.matrix_shape), arrays.to_float64(rstd)
        smallest = DTYPES[arrays.dtype_name(y)].half_ulp
        x_hat = reference.x_hat_of(rows, weight, bias, smallest, self.plain.zero_centered_weight)
        x = (x_hat / rstd64.reshape(-1, 1)).reshape(tuple(y.shape))
        return arrays.from_float64(x, "float64", y), arrays.from_float64(np.zeros_like(rstd64), "float64", y)
