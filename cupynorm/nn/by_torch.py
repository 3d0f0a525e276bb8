"""torch: layer_norm and rms_norm by torch's own operations.

Our kernels run eager calls (autograd.py). What torch traces, transforms or fakes is computed here,
so torch sees nothing but its own operations. So are nested tensors and the gradients of gradients.
DTensors are taken apart here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..dispatch.functor_text import BoundFunctor, Functors
from ..dispatch.problem import cols_of_scale
from ..gpu.arrays import type_in_words
from ..norm.checks import check_forward, dtype_name, with_seeds
from ..norm.quantized import arranged, as_quantized_tensor, scale_shape
from ..norm.request import ForwardOperands, ForwardOptions, ForwardRequest, replaced
from . import modes
from . import quantization as of_torch
from .modes import arithmetic
from .private import is_forward_mode


def takes(*tensors: object) -> bool:
    """Whether a call is not eager: no kernel may read memory now, or a tensor has none."""
    return (
        modes.is_compiling()  # torch.compile and torch.export
        or modes.has_functorch_transforms()  # vmap, grad, jacrev
        or is_forward_mode()  # jvp, dual numbers
        or modes.is_jit_traced() is not None  # torch.jit.trace
        or modes.is_faked()  # FakeTensorMode, make_fx, functionalisation
        or any(isinstance(each, Tensor) and each.__class__ not in modes.PLAIN for each in tensors)
        or any(isinstance(each, Tensor) and (each.is_meta or each.is_nested) for each in tensors)
    )


def normalize(request: ForwardRequest) -> tuple[Tensor, Tensor]:
    """y and the sum, as autograd.normalize. memory_efficient and launch do nothing here.

    Raises NotImplementedError for out, for functors without a text of torch, and for an 8-bit y in
    transforms.
    """
    operands, options = request
    refused = {"out": operands.out, "the sum of out": operands.out_sum}
    if not has_texts(operands.functors):
        refused["a functor without torch="] = operands.functors
    if modes.is_transformed() or modes.is_jit_traced() is not None:
        refused["an 8-bit out_dtype"] = options.quantization  # the result is no tensor
    if operands.input.is_nested:
        _check_nested(request)
    for name, given in refused.items():
        if given is not None:
            raise NotImplementedError(
                f"{name} was given to a call that torch traces or transforms; expected a call of "
                "plain tensors, or none"
            )
    is_unchecked = operands.input.is_nested or modes.is_jit_traced() is not None
    if not (modes.is_compiling() or is_unchecked):  # then torch's own operations check
        operands, options = check_forward(request)
    added, functors, given = operands.input, operands.functors, operands.input.dtype
    if functors is not None:
        functors = with_seeds(functors, added)
    if operands.residual is not None:
        if functors is not None:
            added = through(functors.load, added, len(options.extents))
            functors = replaced(functors, load=())
        added = _sum(added, operands.residual)
    in_8_bits, parameters = options.quantization is not None, (operands.weight, operands.bias)
    dtype = torch.float32 if in_8_bits else _dtype(options.out_dtype, given)
    y = normalized_through(added, *parameters, options, dtype, functors, x_hat_dtype=given)
    return (_quantized(y, operands, options) if in_8_bits else y), added


def _check_nested(request: ForwardRequest) -> None:
    operands, options = request
    if operands.input.layout is not torch.jagged:
        raise TypeError("input is nested with layout torch.strided; expected torch.jagged")
    for name, given in (("fuse", operands.functors), ("8-bit out_dtype", options.quantization)):
        if given is not None:
            raise NotImplementedError(
                f"{name} was given and input is nested; expected input.values(), its rows"
            )


def has_texts(functors: Functors | None) -> bool:
    """Whether each functor says what it does in operations of torch."""
    if functors is not None:
        for each in functors.load + functors.store:
            if each.functor.torch is None:
                return False
    return True


def through(parts: Sequence[BoundFunctor], values: Tensor, num_dims: int) -> Tensor:
    """values after the functors, in the arithmetic dtype. num_dims: the normalised ones."""
    shape, wide = values.shape, arithmetic(values)
    if parts:
        values = values.to(wide).flatten(-num_dims)
    for functor, arrays, numbers, seeds in parts:
        given = dict(zip(functor.numbers + functor.seeds, numbers + seeds))
        for name, array in zip(functor.arrays, arrays):
            array = array.to(wide)
            if name in functor.per_row:
                given[name] = array.unsqueeze(-1)
            else:
                given[name] = array.flatten(-min(num_dims, array.ndim) or 0)
        values = functor.torch(values, **given)
    return values.reshape(shape)


def normalized_through(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: ForwardOptions,
    dtype: torch.dtype,
    functors: Functors | None,
    *,
    differentiably: bool = False,
    x_hat_dtype: torch.dtype | None = None,
) -> Tensor:
    """normalized, of x after the functors on x, and its result after those on y."""
    how = {"differentiably": differentiably, "x_hat_dtype": x_hat_dtype}
    if functors is None:
        return normalized(x, weight, bias, options, dtype, **how)
    num_dims, wide = len(options.extents), arithmetic(x)
    x = through(functors.load, x, num_dims)
    y = normalized(x, weight, bias, options, wide, **how)
    return through(functors.store, y, num_dims).to(dtype)


def normalized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: ForwardOptions,
    dtype: torch.dtype,
    *,
    differentiably: bool = False,
    x_hat_dtype: torch.dtype | None = None,
) -> Tensor:
    """y in dtype, rounded once.

    One call of torch's norm where all tensors have one dtype. Compiled, RMSNorm is written out:
    inductor makes fewer kernels of it, and every exporter to ONNX knows its operations.

    x_hat_dtype: what x_hat is rounded to with round_x_hat; None: the dtype of x.
    differentiably: to any order, and by tangents of tangents. torch 2.13 has wrong third
        derivatives of layer_norm. Those of rms_norm are right.
    """
    centered, extents, given, wide = options.centered, options.extents, x.dtype, arithmetic(x)
    dims = tuple(range(-len(extents), 0))
    eps = torch.finfo(wide).eps if options.eps is None else options.eps
    one_more = bool(options.zero_centered_weight) and weight is not None
    x_hat_dtype = given if x_hat_dtype is None else x_hat_dtype
    rounds = options.round_x_hat and x_hat_dtype.itemsize < 4
    by_rms = centered and (differentiably or modes.is_transformed())
    writes_out = not (centered or x.is_nested) and (
        modes.is_compiling()
        or modes.is_faked()
        or x.__class__ not in modes.PLAIN  # torch.export of some versions has no mode
        or modes.is_jit_traced() is not None
    )
    if writes_out:  # inductor then sums and casts the gradient of a parameter in one kernel
        weight, bias = (None if each is None else each.expand(x.shape) for each in (weight, bias))
    of_all = {given, dtype, *(each.dtype for each in (weight, bias) if each is not None)}
    if (
        len(of_all) > 1
        or one_more
        or rounds
        or by_rms
        or writes_out
        or not (centered or bias is None)
    ):
        x, weight, bias = (None if each is None else each.to(wide) for each in (x, weight, bias))
        weight = weight + 1 if one_more else weight
    if by_rms:
        x, centered = x - x.mean(dims, keepdim=True), False
    inside = (None, None) if rounds or writes_out else (weight, bias)
    if writes_out:
        y = x * torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + eps)
    elif centered:
        y = functional.layer_norm(x, extents, *inside, eps)
    else:
        y = functional.rms_norm(x, extents, inside[0], eps)
    if rounds:
        y = y.to(x_hat_dtype).to(wide)
    if inside[0] is not weight:
        y = y * weight
    if bias is not None and (inside[1] is not bias or not centered):
        y = y + bias
    return y.to(dtype)


def _sum(x: Tensor, residual: Tensor) -> Tensor:
    """x + residual, rounded once to the residual's dtype."""
    if x.dtype == residual.dtype:
        return x + residual
    wide = torch.promote_types(arithmetic(residual), x.dtype)
    return (x.to(wide) + residual.to(wide)).to(residual.dtype)


def _dtype(given: Any, default: torch.dtype) -> torch.dtype:
    if given is None or isinstance(given, torch.dtype):
        return default if given is None else given
    return getattr(torch, dtype_name(given, "dtype"))


def _quantized(y: Tensor, operands: ForwardOperands, options: ForwardOptions) -> Any:
    """y as a QuantizedTensor, which torch.compile traces as its tensors."""
    rule, num_cols = options.quantization, math.prod(options.extents)
    matrix, dtype = y.reshape(-1, num_cols), getattr(torch, rule.dtype)
    of_scale = {"power_of_two": rule.power_of_two, "upper_bound": rule.upper_bound}
    leading = y.shape[: y.ndim - len(options.extents)]
    if rule.scaling.startswith("block"):
        block_cols = cols_of_scale(rule.scaling, num_cols)
        blocks = of_torch.quantize_blocks(matrix, dtype, block_cols=block_cols, **of_scale)
        data, scale_inv = blocks.data, blocks.scale_inv
        if rule.layout == "row":
            scale_inv = scale_inv.reshape(*leading, scale_inv.shape[1])
        else:
            scale_inv = arranged(of_torch.arranged(scale_inv, rule.layout), rule, leading)
    else:
        by_row, scale = rule.scaling == "row", operands.scale
        amax = of_torch.amax_of(matrix, 1) if by_row else of_torch.amax_of(matrix, 0, 1).reshape(1)
        if rule.scaling != "given":
            scale = of_torch.scale_of(amax, dtype, smallest_amax=rule.smallest_amax, **of_scale)
        elif operands.amax is not None:
            operands.amax.copy_(torch.maximum(operands.amax, amax))
        scale = y.new_ones(1) if scale is None else scale
        inverse = 1.0 / scale
        scale, scale_inv = (inverse, scale.clone()) if rule.divides else (scale, inverse)
        data = of_torch.encode(matrix, scale[:, None] if by_row else scale, dtype)
        scale_inv = scale_inv.reshape(scale_shape(rule.scaling, leading, num_cols))
    transposed = of_torch.transpose_data(data) if rule.transpose else None
    result = as_quantized_tensor(
        rule, data.reshape(y.shape), scale_inv, transposed, operands.input, num_cols
    )
    if y.requires_grad:
        result.attach(lambda values: values.detach() + (y - y.detach()).to(values.dtype))
    return result


# Gradients of gradients.


def is_differentiated(*gradients: Tensor | None) -> bool:
    """In a backward: whether its results are differentiated, batched, traced or have tangents."""
    # takes first: torch.compile cannot trace is_mapped.
    return takes(*gradients) or torch.is_grad_enabled() or any(map(modes.is_mapped, gradients))


def pull_back(
    compute: Callable[[], Iterable[Tensor]],
    upstream: Iterable[Tensor | None],
    tensors: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of tensors, from those of what compute() returns, for torch to differentiate.

    compute: the forward once more, from these tensors, which the backward saved.
    upstream: the gradient of each result, or None. Tensors that need no gradient get None.
    """
    with torch.enable_grad():
        pairs = [(y, dy.to(y.dtype)) for y, dy in zip(compute(), upstream) if dy is not None]
        wanted = [each for each in tensors if each is not None and each.requires_grad]
        if not pairs or not wanted:
            return [None] * len(tensors)
        ys, dys = zip(*pairs)
        found = iter(torch.autograd.grad(ys, wanted, dys, create_graph=True, allow_unused=True))
    return [next(found) if each is not None and each.requires_grad else None for each in tensors]


# DTensors. A norm acts on each row alone. So it runs on each rank's part of the rows.


def is_any_dtensor(*tensors: object) -> bool:
    """Whether one of them is a DTensor, whose class takes seconds to import."""
    for each in tensors:
        # torch.compile cannot trace hasattr of a symbolic number.
        if isinstance(each, Tensor) and hasattr(each, "device_mesh"):
            return True
    return False


def normalize_dtensors(
    request: ForwardRequest, of_local: Callable[[ForwardRequest], tuple]
) -> tuple[Tensor, Tensor]:
    """What of_local returns for the rows of each rank, as DTensors.

    Rows that ranks have parts of are gathered first. A plain parameter is the same on every rank.
    Gradients of parameters are partial sums where rows are sharded, as those of torch's norms.
    """
    from torch.distributed.tensor import Partial, Replicate

    operands, options = request
    input, by_row = operands.input, ("input", "residual")
    refused = {"an 8-bit out_dtype": options.quantization}
    refused |= {"out": operands.out, "the sum of out": operands.out_sum, "fuse": operands.functors}
    for name, given in refused.items():
        if given is not None:
            raise NotImplementedError(
                f"{name} was given and an argument is a DTensor; expected to_local()"
            )
    first = input.ndim - len(options.extents)
    for name in by_row:
        each = getattr(operands, name)
        if each is None:
            continue
        if not is_any_dtensor(each):
            raise TypeError(
                f"{name} is {type_in_words(each)} and another argument is a DTensor; "
                "expected a DTensor too"
            )
        if each.shape != input.shape:  # parts of some ranks may fit
            raise ValueError(f"{name} has shape {tuple(each.shape)}; expected {tuple(input.shape)}")
    mesh = input.device_mesh
    rows = [
        each if each.is_shard() and each.dim < first else Replicate() for each in input.placements
    ]
    whole = [Replicate()] * mesh.ndim
    sums = [Partial() if each.is_shard() else each for each in rows]
    local = {}
    for name in (*by_row, "weight", "bias"):
        each = getattr(operands, name)
        placements, of_gradient = (rows, rows) if name in by_row else (whole, sums)
        if each is None:
            continue
        each = on_every_rank(each, input)
        if list(each.placements) != placements:
            each = each.redistribute(placements=placements)
        local[name] = _to_local(each, of_gradient)
    results = of_local(ForwardRequest(replaced(operands, **local), options))
    return tuple(
        None if each is None else _from_local(each, mesh, input.shape, rows) for each in results
    )


# torch's own to_local and from_local, whose gradients have no graph before torch 2.13: second
# derivatives were lost without a word.


def _to_local(tensor: Tensor, of_gradient: list) -> Tensor:
    """This rank's part. of_gradient: the placements of its gradient."""
    if modes.is_compiling():
        return tensor.to_local(grad_placements=of_gradient)
    return _ToLocal.apply(tensor, of_gradient)


def _from_local(part: Tensor, mesh: Any, shape: torch.Size, placements: list) -> Tensor:
    if modes.is_compiling():
        return _FromLocal.forward(None, part, mesh, shape, placements)
    return _FromLocal.apply(part, mesh, shape, placements)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, of_gradient):
        ctx.of_whole = tensor.device_mesh, tensor.shape, of_gradient
        part = tensor.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx, gradient):
        return _from_local(gradient, *ctx.of_whole), None


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, mesh, shape, placements):
        from torch.distributed.tensor import DTensor

        if ctx is not None:
            ctx.placements = placements
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part, mesh, placements, shape=shape, stride=stride)

    @staticmethod
    def backward(ctx, gradient):
        from torch.distributed.tensor import Replicate

        placements = [Replicate() if each.is_partial() else each for each in ctx.placements]
        if list(gradient.placements) != placements:
            gradient = gradient.redistribute(placements=placements)
        return _to_local(gradient, placements), None, None, None


def on_every_rank(tensor: Tensor, like: Tensor) -> Tensor:
    """A plain tensor as a DTensor that is the same on all ranks of another's mesh."""
    if is_any_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
