"""torch.compile: the operator cupynorm::norm_linear, a norm and its product in one kernel.

Compiled layers are torch's norm and product, except where cuda_src/norm_linear.cu is faster than
both: LayerNorm of many rows, of static shape (docs/experiments.md, The norm inside the product).
Backward is written in operations of torch, which inductor fuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch import product_plan
from ..gpu import launch
from ..nn import by_torch, modes
from ..nn.modes import arithmetic, name_of
from ..norm.request import margin_of
from . import one_kernel, products
from .operands import LinearOptions, Operands, concatenate


def takes(operands: Operands, options: LinearOptions) -> bool:
    """Whether the operator computes a call that torch.compile traces."""
    x, _, norm_weight, norm_bias, weights, _ = operands
    if not modes.is_compiling() or modes.is_recorded():
        return False
    if not x.is_cuda or not options.has_norm or options.fused not in (None, "kernel"):
        return False
    if options.return_normalized or options.save_normalized or by_torch.is_any_dtensor(x, *weights):
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if not x.numel() or not all(has_static_value(each) for each in x.shape):
        return False
    if x.dtype != options.dtype or any(each.dtype != x.dtype for each in weights):
        return False
    names = [None if each is None else name_of(each.dtype) for each in (x, norm_weight, norm_bias)]
    margins = (margin_of(options.launch, kind) for kind in ("forward", "inference"))
    sizes = x.numel() // x.shape[-1], x.shape[-1], sum(each.shape[0] for each in weights)
    flags = options.centered, options.zero_centered_weight
    return _is_chosen(x.get_device(), (*sizes, *names, *flags), options.fused, max(margins))


@torch.compiler.assume_constant_result
def _is_chosen(device_index: int, problem: tuple, fused: str | None, sm_margin: int) -> bool:
    """problem: the fields of a NormLinearProblem."""
    device, problem = launch.device(device_index), product_plan.NormLinearProblem(*problem)
    if fused == "kernel":
        return product_plan.why_not(device, problem.dtype, problem.sizes) is None
    if one_kernel.has_ranks() or problem.num_rows < product_plan.FEWEST_ROWS:
        return False
    return product_plan.choose(device, problem, sm_margin=sm_margin).takes_kernel


def normalize_and_project(
    operands: Operands, options: LinearOptions
) -> tuple[Tensor, None, Tensor]:
    """y, None and input + residual, of a call that `takes` accepts."""
    x, residual, norm_weight, norm_bias, weights, biases = operands
    added = x if residual is None else x + residual
    y, _, _ = norm_linear(
        added,
        norm_weight,
        norm_bias,
        concatenate(weights, x.dtype),
        concatenate(biases, x.dtype),
        eps=options.eps,
        centered=options.centered,
        zero_centered_weight=options.zero_centered_weight,
    )
    return y, None, added


@torch.library.custom_op("cupynorm::norm_linear", mutates_args=())
def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float | None,
    centered: bool,
    zero_centered_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [..., out_features], mean [...] (empty for RMSNorm) and rstd [...] of x [..., in_features].

    By the kernel where the memory of the tensors allows it, else by a norm and a product.
    """
    biases = [] if bias is None else [bias]
    operands = Operands(x, None, norm_weight, norm_bias, [weight], biases)
    options = LinearOptions(
        centered, eps, zero_centered_weight, False, False, "kernel", None, x.dtype
    )
    y, _, _, saved = products.forward(products.Products(options), operands, recorded=True)
    return y, saved.mean if centered else saved.rstd.new_empty(0), saved.rstd


@norm_linear.register_fake
def _without_memory(x, norm_weight, norm_bias, weight, bias, *, centered, **_):
    leading, dtype = x.shape[:-1], arithmetic(x)
    rstd = x.new_empty(leading, dtype=dtype)
    y = x.new_empty((*leading, weight.shape[0]))
    return y, x.new_empty(leading if centered else (0,), dtype=dtype), rstd


def _save(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: tuple) -> None:
    x, norm_weight, norm_bias, weight, bias = inputs
    ctx.centered = keyword_only_inputs["centered"]
    ctx.zero_centered_weight = keyword_only_inputs["zero_centered_weight"]
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, mean, rstd, norm_weight, norm_bias, weight, bias)


def _differentiate(ctx: Any, dy: Tensor, _dmean: Any, _drstd: Any) -> tuple[Tensor | None, ...]:
    """By cupynorm.reference.layer_norm's formulas."""
    x, mean, rstd, norm_weight, norm_bias, weight, bias = ctx.saved_tensors
    wide, rstd = rstd.dtype, rstd[..., None]
    x_hat = (x.to(wide) - mean[..., None] if ctx.centered else x.to(wide)) * rstd
    factor = 1.0 if norm_weight is None else norm_weight.to(wide) + float(ctx.zero_centered_weight)
    normalized = x_hat * factor if norm_bias is None else x_hat * factor + norm_bias.to(wide)
    rows, dnormalized = dy.flatten(0, -2), (dy @ weight).to(wide)
    dweight = rows.t() @ normalized.to(x.dtype).flatten(0, -2)
    dx_hat = dnormalized * factor
    dx = dx_hat - x_hat * (dx_hat * x_hat).mean(-1, keepdim=True)
    dx = (dx - dx_hat.mean(-1, keepdim=True) if ctx.centered else dx) * rstd
    of_parameters = (
        (norm_weight, dnormalized * x_hat),
        (norm_bias, dnormalized),
        (bias, dy.to(wide)),
    )
    sums = [
        None if each is None else of.sum_to_size(each.shape).to(each.dtype)
        for each, of in of_parameters
    ]
    return dx.to(x.dtype), sums[0], sums[1], dweight, sums[2]


norm_linear.register_autograd(_differentiate, setup_context=_save)
