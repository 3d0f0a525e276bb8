"""layer_norm_linear, rms_norm_linear and their explicit forward and backward: a norm and the linear layer after it.

The norm is cupynorm.norm's; the products are torch's for tensors (cupynorm.linear), cuBLAS's for CuPy arrays (cupynorm.cublas)
and for NumPy arrays those of the float64 reference. Derivation: cupynorm.reference.layer_norm_linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from . import arrays, cublas, fused, launch, norm
from .norm import Array

FUSED = (None, "fold")
GRADIENTS = ("dx", "dnorm_weight", "dnorm_bias", "dweight", "dbias")


class ProjectedForward(NamedTuple):
    """What a forward returns: y [..., out_features] and normalized as the input, in its dtype;
    mean, rstd, sum as of cupynorm.Forward."""

    y: Array
    normalized: Array
    mean: Array | None
    rstd: Array
    sum: Array


class ProjectedBackward(NamedTuple):
    """The gradients that were asked for, None for the others. dx is of the input and of the residual alike."""

    dx: Array | None
    dnorm_weight: Array | None
    dnorm_bias: Array | None
    dweight: Array | None
    dbias: Array | None


# What users call.


def layer_norm_linear(
    input: Array,
    norm_weight: Array | None,
    norm_bias: Array | None,
    weight: Array,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    residual: Array | None = None,
    return_normalized: bool = False,
    return_residual: bool = False,
    zero_centered_weight: bool = False,
    save_normalized: bool = False,
    fused: str | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> Array | tuple[Array, ...]:
    """linear(layer_norm(input), weight, bias): layer normalisation over the last dimension, then a linear layer.

    input: shape (..., in_features), float16, bfloat16, float32 or float64; a CuPy array, a torch tensor, a NumPy array or any
        object with __dlpack__.
    norm_weight, norm_bias: shape (in_features,), each optional, of any of the four dtypes.
    weight: shape (out_features, in_features), as torch.nn.Linear has it. bias: shape (out_features,), optional. Both of input's
        dtype, but under torch.autocast, which casts them.
    residual, zero_centered_weight, eps, sm_margin: as of cupynorm.layer_norm, whose other rules hold too.
    return_normalized, return_residual: also return the normalised tensor, and input + residual (the input itself without one).
    save_normalized: keep the normalised tensor for the gradient of weight. By default it is made again in backward, so that
        what waits is the input and two numbers a row: 2 bytes an element in bfloat16 in place of 4. The kernel that makes the
        gradient of the input writes it beside that, as forward did but for the last bits of its mean.
    fused: None, or "fold": y = rstd * (input folded^T) + folded_bias with the norm's weight folded into the linear one, so that
        the normalised tensor never exists (torch and NumPy). Its numerics: cupynorm.linear.fold. Without gradients the folded
        weight is kept, as large as weight, and made anew when a parameter changes: cupynorm.linear.kept_fold says what is seen
        of that.

    Returns y of shape (..., out_features), of input's dtype and library, or (y, normalized, sum) with those that were asked
    for. For torch differentiable in every tensor, any number of times; torch.compile sees one operator. Under torch.autocast y
    and normalized are of the autocast dtype. NumPy arrays are computed in float64 and rounded once, CPU tensors by torch after
    a norm in float64.

    Raises ValueError or TypeError, before anything is launched, for shapes, dtypes, devices or options that do not fit.
    """
    return _normalize_and_project(
        True, input, norm_weight, norm_bias, weight, bias, eps, residual, return_normalized, return_residual,
        zero_centered_weight, save_normalized, fused, sm_margin,
    )  # fmt: skip


def rms_norm_linear(
    input: Array,
    norm_weight: Array | None,
    weight: Array,
    bias: Array | None = None,
    eps: float | None = None,
    *,
    norm_bias: Array | None = None,
    residual: Array | None = None,
    return_normalized: bool = False,
    return_residual: bool = False,
    zero_centered_weight: bool = False,
    save_normalized: bool = False,
    fused: str | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> Array | tuple[Array, ...]:
    """linear(rms_norm(input), weight, bias). eps: as of cupynorm.rms_norm. All else, errors too, as for layer_norm_linear."""
    return _normalize_and_project(
        False, input, norm_weight, norm_bias, weight, bias, eps, residual, return_normalized, return_residual,
        zero_centered_weight, save_normalized, fused, sm_margin,
    )  # fmt: skip


def layer_norm_linear_forward(
    x: Array,
    norm_weight: Array | None,
    norm_bias: Array | None,
    weight: Array,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    residual: Array | None = None,
    zero_centered_weight: bool = False,
    sm_margin: int | Mapping[str, int] = 0,
) -> ProjectedForward:
    """layer_norm_linear that also returns what backward needs, outside any autograd: ProjectedForward(y, normalized, mean,
    rstd, sum).

    x: the input. Arguments and errors as for layer_norm_linear.
    """
    return _forward(True, x, norm_weight, norm_bias, weight, bias, eps, residual, zero_centered_weight, sm_margin)


def rms_norm_linear_forward(
    x: Array,
    norm_weight: Array | None,
    weight: Array,
    bias: Array | None = None,
    eps: float | None = None,
    *,
    norm_bias: Array | None = None,
    residual: Array | None = None,
    zero_centered_weight: bool = False,
    sm_margin: int | Mapping[str, int] = 0,
) -> ProjectedForward:
    """rms_norm_linear that also returns what backward needs; mean is None. Arguments as for layer_norm_linear_forward."""
    return _forward(False, x, norm_weight, norm_bias, weight, bias, eps, residual, zero_centered_weight, sm_margin)


def layer_norm_linear_backward(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    norm_weight: Array | None,
    norm_bias: Array | None,
    weight: Array,
    eps: float = 1e-5,
    *,
    normalized: Array | None = None,
    zero_centered_weight: bool = False,
    dnormalized: Array | None = None,
    dsum: Array | None = None,
    gradients: Sequence[str] = GRADIENTS,
    sm_margin: int | Mapping[str, int] = 0,
) -> ProjectedBackward:
    """Gradients of layer_norm_linear at x, for the statistics that layer_norm_linear_forward returned.

    dy: gradient of y, of its shape and dtype. x: what was normalised (ProjectedForward.sum). mean, rstd: its statistics.
    norm_weight, norm_bias, weight, eps: those of the forward. normalized: what the forward returned, if it was kept; else it is
    made again from x where dweight is wanted. dnormalized, dsum: gradients that reach the returned normalised tensor and the
    returned sum from elsewhere. gradients: which to compute; the others are None.
    Returns ProjectedBackward(dx, dnorm_weight, dnorm_bias, dweight, dbias); those of absent norm parameters are as for weight 1
    and bias 0. Raises as layer_norm_linear.
    """
    if mean is None:
        raise TypeError("mean is None; expected the statistic that the forward returned")
    return _backward(
        dy, x, mean, rstd, norm_weight, norm_bias, weight, eps, normalized, zero_centered_weight, dnormalized, dsum, gradients,
        sm_margin,
    )  # fmt: skip


def rms_norm_linear_backward(
    dy: Array,
    x: Array,
    rstd: Array,
    norm_weight: Array | None,
    weight: Array,
    eps: float | None = None,
    *,
    norm_bias: Array | None = None,
    normalized: Array | None = None,
    zero_centered_weight: bool = False,
    dnormalized: Array | None = None,
    dsum: Array | None = None,
    gradients: Sequence[str] = GRADIENTS,
    sm_margin: int | Mapping[str, int] = 0,
) -> ProjectedBackward:
    """Gradients of rms_norm_linear at x. All else as for layer_norm_linear_backward."""
    return _backward(
        dy, x, None, rstd, norm_weight, norm_bias, weight, eps, normalized, zero_centered_weight, dnormalized, dsum, gradients,
        sm_margin,
    )  # fmt: skip


# Checks.


def check(input, norm_weight, norm_bias, weight, bias, fused=None, weight_dtype=None) -> None:
    """Raises for linear parameters that do not fit the input. weight_dtype: of weight and bias, by default the input's."""
    if fused not in FUSED:
        raise ValueError(f"fused is {fused!r}; expected None or 'fold'")
    for name, parameter in (("weight", weight), ("bias", bias), ("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if not hasattr(parameter, "shape") and (parameter is not None or name == "weight"):
            raise TypeError(f"{name} is a {type(parameter).__name__}; expected an array like the input")
    shape = tuple(input.shape)
    if not shape:
        raise ValueError("input has no dimension to normalise over; expected at least one")
    if len(weight.shape) != 2 or weight.shape[1] != shape[-1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, input {shape}; expected (out_features, {shape[-1]})")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},), a number for each row of weight")
    for name, parameter in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if parameter is not None and tuple(parameter.shape) != shape[-1:]:
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}; expected {shape[-1:]}")
        if parameter is not None:
            norm._check_same_place(parameter, input, name, "input")
    norm._check_dtype(input, "input")
    expected = arrays.dtype_name(input) if weight_dtype is None else weight_dtype
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            norm._check_same_place(parameter, input, name, "input")
            if arrays.dtype_name(parameter) != expected:
                raise TypeError(
                    f"{name} is of dtype {arrays.dtype_name(parameter)}, input of {expected}; expected both the same"
                )


def _take(**given: Array | None) -> list[Array | None]:
    return [None if array is None else arrays.take(array, name) for name, array in given.items()]


# Dispatch by library.


@cache
def _linear():
    from . import linear

    return linear


def _normalize_and_project(
    centered, input, norm_weight, norm_bias, weight, bias, eps, residual, return_normalized, return_residual,
    zero_centered_weight, save_normalized, fused, sm_margin,
):  # fmt: skip
    options = norm._options(None, None, None, sm_margin)
    if norm.is_tensor(input):
        if norm._torch_part().torch.compiler.is_dynamo_compiling():  # torch.compile follows an import, and warns of a cache
            from . import linear
        else:
            linear = _linear()
        y, normalized, added = linear.normalize_and_project(
            centered, input, norm_weight, norm_bias, (weight,), () if bias is None else (bias,), eps, residual,
            return_normalized, zero_centered_weight, save_normalized, fused, options,
        )  # fmt: skip
    else:
        if fused == "fold":
            y, normalized, added = _folded(
                centered, input, norm_weight, norm_bias, weight, bias, eps, residual, return_normalized, zero_centered_weight
            )
        else:
            made = _forward(
                centered, input, norm_weight, norm_bias, weight, bias, eps, residual, zero_centered_weight, sm_margin, fused
            )
            y, normalized, added = made.y, made.normalized, made.sum
    results = (y, *((normalized,) if return_normalized else ()), *((added,) if return_residual else ()))
    return results if len(results) > 1 else y


def _forward(
    centered, x, norm_weight, norm_bias, weight, bias, eps, residual, zero_centered_weight, sm_margin, fused=None
) -> ProjectedForward:  # fmt: skip
    x, norm_weight, norm_bias, weight, bias, residual = _take(
        x=x, norm_weight=norm_weight, norm_bias=norm_bias, weight=weight, bias=bias, residual=residual
    )
    check(x, norm_weight, norm_bias, weight, bias, fused)
    extents = tuple(x.shape[-1:])
    prepared, given = norm.prepare_forward(
        centered, x, extents, norm_weight, norm_bias, eps, residual, zero_centered_weight, None, None,
        norm._options(None, None, None, sm_margin),
    )  # fmt: skip
    normalized, mean, rstd, added = prepared.run(*given)
    shape = (*x.shape[:-1], weight.shape[0])
    if arrays.is_torch(x):
        y = _linear().project(normalized, weight, bias)
    elif isinstance(x, np.ndarray):
        # From the exact normalised tensor, not from its rounding: one rounding in all.
        made = _reference_forward(centered, added, norm_weight, norm_bias, weight, bias, prepared.eps, zero_centered_weight)
        y = arrays.from_float64(made.y.reshape(shape), arrays.dtype_name(x), x)
    else:
        with launch.on_device(x.device.id):
            rows, weight = (_contiguous(each) for each in (_matrix(normalized), weight))
            y = _repeated(bias, len(rows))
            y = cublas.multiply(rows, weight, transpose_b=True, out=y, accumulate=y is not None).reshape(shape)
    return ProjectedForward(y, normalized, mean, rstd, added)


def _reference_forward(centered, added, norm_weight, norm_bias, weight, bias, eps, zero_centered_weight):
    from . import reference

    given = [None if each is None else arrays.to_float64(each) for each in (norm_weight, norm_bias, weight, bias)]
    rows = arrays.to_float64(added)
    rows = rows.reshape(arrays.product(rows.shape[:-1]), rows.shape[-1])
    return reference.norm_linear(rows, *given, eps, centered=centered, zero_centered_weight=bool(zero_centered_weight))


def _folded(
    centered, x, norm_weight, norm_bias, weight, bias, eps, residual, return_normalized, zero_centered_weight
):  # fmt: skip
    """NumPy: the fold is exact in float64, so y is that of the plain path."""
    if return_normalized:
        raise ValueError(
            "return_normalized is given with fused='fold', in which no normalised tensor exists; expected one of them"
        )
    if not isinstance(x, np.ndarray):
        raise TypeError(
            f"fused='fold' was given for {arrays.where(arrays.take(x, 'input'))}; expected a torch tensor or a NumPy array"
        )
    made = _forward(centered, x, norm_weight, norm_bias, weight, bias, eps, residual, zero_centered_weight, 0)
    return made.y, None, made.sum


def _backward(
    dy, x, mean, rstd, norm_weight, norm_bias, weight, eps, normalized, zero_centered_weight, dnormalized, dsum, gradients,
    sm_margin,
) -> ProjectedBackward:  # fmt: skip
    if not isinstance(gradients, Iterable):
        raise TypeError(f"gradients is {gradients!r}; expected some of {', '.join(GRADIENTS)}")
    gradients = gradients if isinstance(gradients, str) else tuple(gradients)
    if isinstance(gradients, str) or any(name not in GRADIENTS for name in gradients):
        raise ValueError(f"gradients is {gradients!r}; expected some of {', '.join(GRADIENTS)}")
    dy, x, mean, rstd, norm_weight, norm_bias, weight, normalized, dnormalized, dsum = _take(
        dy=dy, x=x, mean=mean, rstd=rstd, norm_weight=norm_weight, norm_bias=norm_bias, weight=weight, normalized=normalized,
        dnormalized=dnormalized, dsum=dsum,
    )  # fmt: skip
    check(x, norm_weight, norm_bias, weight, None)
    if dy is None or tuple(dy.shape) != (*x.shape[:-1], weight.shape[0]):
        given = None if dy is None else tuple(dy.shape)
        raise ValueError(f"dy has shape {given}; expected that of y, {(*x.shape[:-1], weight.shape[0])}")
    if arrays.dtype_name(dy) != arrays.dtype_name(x):
        raise TypeError(f"dy is of dtype {arrays.dtype_name(dy)}, x of {arrays.dtype_name(x)}; expected both the same")
    for name, array in (("normalized", normalized), ("dnormalized", dnormalized), ("dsum", dsum)):
        norm._take_like(array, x, tuple(x.shape), name, "x")
    if normalized is not None and arrays.dtype_name(normalized) != arrays.dtype_name(x):
        raise TypeError(f"normalized is of dtype {arrays.dtype_name(normalized)}; expected x's, {arrays.dtype_name(x)}")
    if arrays.dtype_name(dnormalized if dnormalized is not None else x) != arrays.dtype_name(x):
        raise TypeError(f"dnormalized is of dtype {arrays.dtype_name(dnormalized)}; expected x's, {arrays.dtype_name(x)}")
    options = norm._options(None, None, None, sm_margin)
    arguments = (dy, x, mean, rstd, norm_weight, norm_bias, weight, eps, normalized, zero_centered_weight, dnormalized, dsum)
    if arrays.is_torch(x):
        made = _linear().explicit_gradients(*arguments, gradients, options)
    elif isinstance(x, np.ndarray):
        made = _reference_gradients(*arguments)
    else:
        with launch.on_device(x.device.id):
            made = _cupy_gradients(*arguments, gradients, options)
    return ProjectedBackward(*(each if name in gradients else None for name, each in zip(GRADIENTS, made)))


def _reference_gradients(
    dy, x, mean, rstd, norm_weight, norm_bias, weight, _, normalized, zero_centered_weight, dnormalized, dsum
) -> list:  # fmt: skip
    from . import reference

    num_rows = arrays.product(x.shape[:-1])

    def values(array, *shape):
        return None if array is None else arrays.to_float64(array).reshape(shape)

    in_features = x.shape[-1]
    made = reference.norm_linear_backward(
        values(dy, num_rows, weight.shape[0]), values(x, num_rows, in_features), values(mean, num_rows), values(rstd, num_rows),
        *(None if each is None else arrays.to_float64(each) for each in (norm_weight, norm_bias, weight)),
        zero_centered_weight=bool(zero_centered_weight), dnormalized=values(dnormalized, num_rows, in_features),
        dsum=values(dsum, num_rows, in_features),
    )  # fmt: skip
    of_norm = arrays.dtype_name(x if norm_weight is None else norm_weight)
    of_norm_bias = of_norm if norm_bias is None else arrays.dtype_name(norm_bias)
    dtypes = (arrays.dtype_name(x), of_norm, of_norm_bias, arrays.dtype_name(weight), arrays.dtype_name(weight))
    shapes = (tuple(x.shape), *(each.shape for each in made[1:]))
    return [arrays.from_float64(each.reshape(shape), dtype, x) for each, shape, dtype in zip(made, shapes, dtypes)]


# CuPy.


def _matrix(array: Array) -> Array:
    return array.reshape(arrays.product(array.shape[:-1]), array.shape[-1])


def _contiguous(array: Array) -> Array:
    return array if array.flags.c_contiguous else arrays.CuPyLibrary.contiguous(array)


def _repeated(bias: Array | None, num_rows: int) -> Array | None:
    """[num_rows, out_features], each row the bias: what a product is added to."""
    if bias is None:
        return None
    made = type(bias)((num_rows, bias.shape[0]), bias.dtype)
    cublas.bits(made)[...] = cublas.bits(_contiguous(bias))
    return made


def _cupy_gradients(
    dy, x, mean, rstd, norm_weight, norm_bias, weight, eps, normalized, zero_centered_weight, dnormalized, dsum, gradients,
    options,
) -> list:  # fmt: skip
    centered, extents = mean is not None, tuple(x.shape[-1:])
    rows, weight = _contiguous(_matrix(dy)), _contiguous(weight)
    of_norm: list[Array | None] = [None] * 3
    wanted = [name for name, mine in zip(norm.Backward._fields, GRADIENTS) if mine in gradients]
    if wanted:
        reaches = None
        if dnormalized is not None:  # what a product is added to, and so must not be the caller's
            reaches = type(x)(_matrix(x).shape, x.dtype)
            cublas.bits(reaches)[...] = cublas.bits(_contiguous(_matrix(dnormalized)))
        reaches = cublas.multiply(rows, weight, out=reaches, accumulate=reaches is not None).reshape(x.shape)
        bias_dtype = None if norm_bias is None else arrays.dtype_name(norm_bias)
        arguments = (
            centered, reaches, x, mean, rstd, extents, norm_weight, zero_centered_weight, dsum, tuple(wanted), None, bias_dtype,
            options
        )  # fmt: skip
        if normalized is None and "dweight" in gradients:
            prepared, given = fused.prepare_backward(
                *arguments, None, None, None, recomputed=(norm_bias,), spends_dy=True
            )  # fmt: skip
            *of_norm, _, normalized = prepared.run(*given)
        else:
            prepared, given = norm.prepare_backward(*arguments, spends_dy=True)
            of_norm = list(prepared.run(*given))
    dweight = None
    if "dweight" in gradients:
        if normalized is None:
            prepared, given = norm.prepare_forward(
                centered, x, extents, norm_weight, norm_bias, eps, None, zero_centered_weight, None, None, options, norm.FOR_Y
            )  # fmt: skip
            normalized = prepared.run(*given)[0]
        dweight = cublas.multiply(rows, _contiguous(_matrix(normalized)), transpose_a=True)
    return [*of_norm, dweight, cublas.sum_rows(rows) if "dbias" in gradients else None]
