"""layer_norm_linear and rms_norm_linear: a norm and the linear layer after it.

Here are the functions that users call. They make a request (call.py) and give it to the library of
its arrays:

    torch    function.py   differentiable
             compute.py    explicit forward and backward
    CuPy     on_cupy.py
    NumPy    host.py

Derivation: cupynorm.reference.layer_norm_linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from ..gpu import arrays
from ..norm import route
from ..norm.request import Array
from . import kernels
from .call import (
    GRADIENTS,
    LinearBackwardCall,
    LinearCall,
    LinearOptions,
    Operands,
    ProjectedBackward,
    ProjectedForward,
    check,
    check_backward,
    has_no_normalized,
    is_fused,
    launch_options,
    take_operands,
)


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
) -> Any:
    """linear(layer_norm(input), weight, bias): layer normalisation, then a linear layer.

    Examples:
        >>> x, weight = np.array([[1.0, 3.0]]), np.array([[1.0, 0.0], [2.0, 3.0]])
        >>> cupynorm.layer_norm_linear(x, None, None, weight, eps=0.0)
        array([[-1.,  1.]])

    input: shape (..., in_features), float16, bfloat16, float32 or float64; normalised over the last
        dimension. A CuPy array, a torch tensor, a NumPy array or any object with __dlpack__.
    norm_weight, norm_bias: shape (in_features,), each optional, of any of the four dtypes.
    weight: shape (out_features, in_features), as torch.nn.Linear has it.
    bias: shape (out_features,), optional. weight and bias have input's dtype, except under
        torch.autocast, which casts them.
    residual, zero_centered_weight, eps, sm_margin: as for cupynorm.layer_norm.
    return_normalized: also return the normalised tensor.
    return_residual: also return input + residual (the input itself without a residual).
    save_normalized: keep the normalised tensor for the gradient of weight. By default backward
        recomputes it, so that only the input and two numbers a row are kept: in bfloat16 2 bytes
        an element instead of 4. The kernel of the input's gradient writes it, equal to that of
        forward except for the last bits of its mean.
    fused: None takes one kernel for the norm and the product where it is measured to be faster and
        as exact, and keeps no memory for it: cupynorm.plan.product_choice.choose says why or why
        not. "plain" takes a norm and a product after it. "fold", for torch and NumPy: y = rstd *
        (input folded^T) + folded_bias, with the norm's weight folded into the linear one. The
        normalised tensor then never exists. Numerics: cupynorm.linear.fold.fold. Without gradients
        the folded weight, as large as weight, is cached until a parameter changes:
        cupynorm.linear.fold.cached_fold. "kernel" computes the same in one kernel: torch tensors in
        16 bits on a GPU of compute capability 9.0. Its limits: cupynorm.plan.products.why_not; for
        few rows, that of few_products. Other calls take the plain path.

    Returns y of shape (..., out_features), of input's dtype and library, or (y, normalized, sum)
    with those that were requested.

    torch: differentiable in every tensor, any number of times; torch.compile sees one operator.
    Under torch.autocast y and normalized have the autocast dtype. On the CPU the norm is computed
    in float64, the products by torch. NumPy arrays are computed in float64 and rounded once.

    Raises ValueError or TypeError, before anything is launched, for shapes, dtypes, devices or
    options that do not fit.
    """
    operands = Operands(
        input, residual, norm_weight, norm_bias, (weight,), () if bias is None else (bias,)
    )
    options = LinearOptions(
        True,
        eps,
        bool(zero_centered_weight),
        return_normalized,
        save_normalized and not is_fused(fused),
        fused,
        launch_options(sm_margin),
        _product_dtype(input),
    )
    return _normalize_and_project(LinearCall(operands, options), return_residual)


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
) -> Any:
    """linear(rms_norm(input), weight, bias).

    Examples:
        >>> cupynorm.rms_norm_linear(np.array([[3.0, 4.0]]), None, np.array([[1.0, 1.0]])).round(3)
        array([[1.98]])

    eps: as for cupynorm.rms_norm; all other arguments, with their shapes and dtypes, as for
        layer_norm_linear.

    Returns y [..., out_features], or a tuple that begins with it, as layer_norm_linear, and raises
    as it.
    """
    operands = Operands(
        input, residual, norm_weight, norm_bias, (weight,), () if bias is None else (bias,)
    )
    options = LinearOptions(
        False,
        eps,
        bool(zero_centered_weight),
        return_normalized,
        save_normalized and not is_fused(fused),
        fused,
        launch_options(sm_margin),
        _product_dtype(input),
    )
    return _normalize_and_project(LinearCall(operands, options), return_residual)


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
    """layer_norm_linear that also returns what backward needs, outside any autograd.

    Examples:
        >>> x, weight = np.array([[1.0, 3.0]]), np.array([[1.0, 0.0], [2.0, 3.0]])
        >>> result = cupynorm.layer_norm_linear_forward(x, None, None, weight, eps=0.0)
        >>> result.y, result.mean, result.rstd
        (array([[-1.,  1.]]), array([2.]), array([1.]))

    x: the input [..., in_features]; all other arguments, with their shapes and dtypes, as for
        layer_norm_linear.

    Returns ProjectedForward(y, normalized, mean, rstd, sum). Raises as layer_norm_linear.
    """
    operands = Operands(
        x, residual, norm_weight, norm_bias, (weight,), () if bias is None else (bias,)
    )
    options = _explicit_options(True, eps, zero_centered_weight, sm_margin)
    return _forward(LinearCall(operands, options))


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
    """rms_norm_linear that also returns what backward needs, outside any autograd.

    Examples:
        >>> x, weight = np.array([[3.0, 4.0]]), np.array([[1.0, 1.0]])
        >>> cupynorm.rms_norm_linear_forward(x, None, weight).rstd.round(3)
        array([0.283])

    All arguments, with their shapes and dtypes, as for layer_norm_linear_forward. Returns
    ProjectedForward, with mean None, and raises as layer_norm_linear_forward.
    """
    operands = Operands(
        x, residual, norm_weight, norm_bias, (weight,), () if bias is None else (bias,)
    )
    options = _explicit_options(False, eps, zero_centered_weight, sm_margin)
    return _forward(LinearCall(operands, options))


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
    """Gradients of layer_norm_linear at x, for statistics of layer_norm_linear_forward.

    Examples:
        >>> x, weight = np.array([[1.0, 3.0]]), np.array([[1.0, 0.0], [2.0, 3.0]])
        >>> result = cupynorm.layer_norm_linear_forward(x, None, None, weight, eps=0.0)
        >>> back = cupynorm.layer_norm_linear_backward(
        ...     np.ones((1, 2)), x, result.mean, result.rstd, None, None, weight, eps=0.0
        ... )
        >>> back.dweight
        array([[-1.,  1.],
               [-1.,  1.]])

    dy: gradient of y, of its shape and dtype.
    x: what was normalised (ProjectedForward.sum). mean, rstd: its statistics.
    norm_weight, norm_bias, weight, eps, zero_centered_weight: those of the forward.
    normalized: what the forward returned, if it was kept; otherwise it is recomputed from x where
        dweight is wanted.
    dnormalized, dsum: gradients of the returned normalised tensor and of the returned sum.
    gradients: names of those to compute; the others are None.
    sm_margin: as for layer_norm_linear.

    Returns ProjectedBackward(dx, dnorm_weight, dnorm_bias, dweight, dbias). Those of absent norm
    parameters are as for weight 1 and bias 0. Raises as layer_norm_linear.
    """
    call = LinearBackwardCall(
        dy,
        x,
        mean,
        rstd,
        norm_weight,
        norm_bias,
        weight,
        normalized,
        dnormalized,
        dsum,
        options=_explicit_options(True, eps, zero_centered_weight, sm_margin),
        gradients=gradients,
    )
    return _backward(call)


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
    """Gradients of rms_norm_linear at x, for the rstd of rms_norm_linear_forward.

    Examples:
        >>> x, weight = np.array([[3.0, 4.0]]), np.array([[1.0, 1.0]])
        >>> rstd = cupynorm.rms_norm_linear_forward(x, None, weight).rstd
        >>> back = cupynorm.rms_norm_linear_backward(np.ones((1, 1)), x, rstd, None, weight)
        >>> back.dweight.round(3)
        array([[0.849, 1.131]])

    All arguments, with their shapes and dtypes, as for layer_norm_linear_backward. Returns
    ProjectedBackward, as layer_norm_linear_backward, and raises as it.
    """
    call = LinearBackwardCall(
        dy,
        x,
        None,
        rstd,
        norm_weight,
        norm_bias,
        weight,
        normalized,
        dnormalized,
        dsum,
        options=_explicit_options(False, eps, zero_centered_weight, sm_margin),
        gradients=gradients,
    )
    return _backward(call)


def _explicit_options(
    centered: bool, eps: Any, zero_centered_weight: Any, sm_margin: Any
) -> LinearOptions:
    """The options of an explicit forward or backward."""
    return LinearOptions(
        centered=centered,
        eps=eps,
        zero_centered_weight=bool(zero_centered_weight),
        return_normalized=True,
        save_normalized=False,
        fused=None,
        launch=launch_options(sm_margin),
    )


# By library.


def _import_torch_modules() -> tuple[ModuleType, ModuleType]:
    from ..nn import dtypes
    from . import function

    return dtypes, function


_imported_torch_modules = cache(_import_torch_modules)


def _torch_modules() -> tuple[ModuleType, ModuleType]:
    """nn/dtypes.py and function.py. torch.compile warns about functools.cache."""
    if route.torch_part().torch.compiler.is_dynamo_compiling():
        return _import_torch_modules()
    return _imported_torch_modules()


def _product_dtype(input: Array) -> Any:
    """The dtype of the products of a torch tensor, None for other arrays."""
    if not route.is_tensor(input):
        return None
    dtypes, _ = _torch_modules()
    return dtypes.product_dtype(input)


def _normalize_and_project(call: LinearCall, return_residual: bool) -> Array | tuple[Array, ...]:
    options = call.options
    if options.dtype is not None:
        _, function = _torch_modules()
        y, normalized, added = function.normalize_and_project(call)
    else:
        y, normalized, _, _, added = _on_arrays(call)
    if not options.return_normalized and not return_residual:
        return y
    results = (normalized,) if options.return_normalized else ()
    return y, *results, *((added,) if return_residual else ())


def _on_arrays(call: LinearCall) -> ProjectedForward:
    """A call of arrays other than torch's."""
    fused = call.options.fused
    if is_fused(fused) and call.options.return_normalized:
        raise ValueError(has_no_normalized("return_normalized", fused))
    if fused == "fold":
        # NumPy: the fold is exact in float64, so y is that of a call without it.
        input = call.operands.input
        if not isinstance(input, np.ndarray):
            place = arrays.where(arrays.take(input, "input"))
            raise TypeError(
                f"fused='fold' was given for {place}; expected a torch tensor or a NumPy array"
            )
    return _forward(call)


def _forward(call: LinearCall) -> ProjectedForward:
    operands = take_operands(call.operands)
    check(operands, call.options.fused)
    call = LinearCall(operands, call.options)
    rows, mean, rstd, added = kernels.forward(call.options, operands, None)
    if arrays.is_torch(operands.input):
        from . import compute

        y = compute.project(call, rows)
    elif isinstance(operands.input, np.ndarray):
        from . import host

        y = host.project(call, added)
    else:
        from . import on_cupy

        y = on_cupy.project(call, rows)
    return ProjectedForward(y, rows, mean, rstd, added)


def _backward(call: LinearBackwardCall) -> ProjectedBackward:
    call = check_backward(call)
    if arrays.is_torch(call.x):
        from . import compute

        gradients = compute.explicit_gradients(call)
    elif isinstance(call.x, np.ndarray):
        from . import host

        gradients = host.gradients(call)
    else:
        from . import on_cupy

        gradients = on_cupy.gradients(call)
    wanted = (name in call.gradients for name in GRADIENTS)
    return ProjectedBackward(
        *(each if is_wanted else None for is_wanted, each in zip(wanted, gradients))
    )
