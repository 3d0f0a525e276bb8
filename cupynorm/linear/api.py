"""torch: layer_norm_linear and rms_norm_linear, a norm and the linear layer after it.

Derivation: cupynorm.reference.layer_norm_linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..gpu.arrays import type_in_words
from ..nn.modes import product_dtype
from . import function
from .call import LinearCall, LinearOptions, Operands, is_fused, launch_of


def layer_norm_linear(
    input: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    return_normalized: bool = False,
    return_residual: bool = False,
    zero_centered_weight: bool = False,
    save_normalized: bool = False,
    fused: str | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> Any:
    """linear(layer_norm(input), weight, bias): layer normalisation, then a linear layer.

    Examples:
        >>> x, weight = torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 0.0], [2.0, 3.0]])
        >>> cupynorm.layer_norm_linear(x, None, None, weight, eps=0.0)
        tensor([[-1.,  1.]])

    input: shape (..., in_features), float16, bfloat16, float32 or float64; normalised over the last
        dimension. All arguments are torch tensors. For other arrays call cupynorm.layer_norm, and
        multiply by weight.T with @.
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
        not. "plain" takes a norm and a product after it. "kernel" names the kernel, in 16 bits on a
        GPU of compute capability 9.0. The normalised tensor then never exists. Its limits:
        cupynorm.plan.products.why_not; for few rows, that of few_products. Other calls take the
        plain path. Numerics: cupynorm.linear.one_kernel. Without gradients the folded weight, as
        large as weight, is cached until a parameter changes: cupynorm.linear.fold.cached_fold.

    Returns y of shape (..., out_features), of input's dtype, or (y, normalized, sum) with those
    that were requested. It is differentiable in every tensor, any number of times. Under
    torch.autocast y and normalized have the autocast dtype. On the CPU the norm is computed in
    float64, the products by torch.

    Raises ValueError or TypeError, before anything is launched, for shapes, dtypes, devices or
    options that do not fit.
    """
    _check_tensor(input, "layer_norm")
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
        launch_of(sm_margin),
        product_dtype(input),
    )
    return _call(LinearCall(operands, options), return_residual)


def rms_norm_linear(
    input: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    norm_bias: Tensor | None = None,
    residual: Tensor | None = None,
    return_normalized: bool = False,
    return_residual: bool = False,
    zero_centered_weight: bool = False,
    save_normalized: bool = False,
    fused: str | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> Any:
    """linear(rms_norm(input), weight, bias).

    Examples:
        >>> x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0]])
        >>> cupynorm.rms_norm_linear(x, None, weight).round(decimals=2)
        tensor([[1.9800]])

    eps: as for cupynorm.rms_norm; all other arguments, with their shapes and dtypes, as for
        layer_norm_linear.

    Returns y [..., out_features], or a tuple that begins with it, as layer_norm_linear, and raises
    as it.
    """
    _check_tensor(input, "rms_norm")
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
        launch_of(sm_margin),
        product_dtype(input),
    )
    return _call(LinearCall(operands, options), return_residual)


def _check_tensor(input: object, norm: str) -> None:
    """Raises TypeError for other arrays."""
    if not isinstance(input, Tensor):
        raise TypeError(
            f"input is {type_in_words(input)}; expected a torch tensor. For other arrays call "
            f"{norm}, and multiply by weight.T with @"
        )


def _call(call: LinearCall, return_residual: bool) -> Tensor | tuple[Tensor, ...]:
    y, normalized, added = function.normalize_and_project(call)
    if not call.options.return_normalized and not return_residual:
        return y
    results = (normalized,) if call.options.return_normalized else ()
    return y, *results, *((added,) if return_residual else ())
