"""torch: LayerNormLinear, and layer_norm_linear of tensors. A norm by the kernels,
products by torch (cuBLASLt, torch's TF32 switch).

Reading order: `normalize_and_project` (which way a call takes) -> `_Projected` (eager) or the operator cupynorm::norm_linear
(traced, the same formulas) -> `_gradients` -> `LayerNormLinear`.

What waits for backward is x, mean and rstd. The normalised tensor is made again there, by the kernel that makes the norm's
gradients where they are wanted too, unless save_normalized keeps it.
"""

from __future__ import annotations

import contextlib
import numbers
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from . import arrays, autograd, formulas, fp8, fp8_linear, fused, norm, norm_linear, torch_ops
from .calls import Options
from .dtypes import DTYPES
from .fp8_linear import as_rows, sum_rows

_is_compiling = torch.compiler.is_dynamo_compiling
_is_transformed = torch._C._are_functorch_transforms_active


class _Call(NamedTuple):
    """What a call depends on besides its tensors. dtype: of the products, and of y and normalized.
    folded: a fold made before."""

    centered: bool
    eps: float | None
    zero_centered_weight: bool
    dtype: torch.dtype
    return_normalized: bool
    save_normalized: bool
    fused: str | None
    options: Options
    folded: Folded | None = None


def _product_dtype(input: Tensor) -> torch.dtype:
    """The input's, or that of autocast, which leaves float64 alone, and what is no float."""
    kind = input.device.type
    if input.dtype == torch.float64 or not input.is_floating_point() or not torch.is_autocast_enabled(kind):
        return input.dtype
    return torch.get_autocast_dtype(kind)


def normalize_and_project(
    centered, input, norm_weight, norm_bias, weights, biases, eps, residual, return_normalized, zero_centered_weight,
    save_normalized, fused, options, take=None, folded=None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(y, normalized or None, input + residual). weights, biases: parts of one linear layer, whose rows follow each other.

    take: makes the gradients of weights and biases in place of `_gradients` (a _WeightGradients). folded: what `fold` makes of
    the parameters, if it was made before; else a call without gradients looks for it in `kept_fold`, and what torch traces
    folds anew.
    """
    call = _check(
        centered, input, norm_weight, norm_bias, weights, biases, eps, residual, return_normalized, zero_centered_weight,
        save_normalized, fused, options,
    )  # fmt: skip
    tensors = (input, residual, norm_weight, norm_bias, *weights, *biases)
    compiling = _is_compiling()
    if take is not None and not compiling and any(each.__class__ not in autograd._PLAIN for each in tensors):
        # The operator knows no `take`, and a subclass that torch does not ask needs none.
        input, residual, norm_weight, norm_bias, *parts = map(_without_subclass, tensors)
        weights, biases = parts[: len(weights)], parts[len(weights) :]
        tensors = (input, residual, norm_weight, norm_bias, *parts)
    if (autograd._compiler_sees_transforms or not compiling) and (_is_transformed() or forward_ad._current_level >= 0):
        return _composed(call, *tensors[:4], weights, biases)
    # What goes to `take` is hidden from a dispatch mode, rather than lost.
    watched = not compiling and take is None and autograd._num_dispatch_modes()
    if compiling or watched or any(each.__class__ not in autograd._PLAIN for each in tensors):
        names = ("input", "residual", "norm_weight", "norm_bias", *["weight"] * len(weights), *["bias"] * len(biases))
        for name, each in () if compiling else zip(names, tensors):
            if hasattr(each, "device_mesh"):
                raise NotImplementedError(f"{name} of a norm with a linear layer is a DTensor; expected {name}.to_local()")
            if each is not None and not isinstance(each, Tensor):
                raise TypeError(f"{name} is a {type(each).__name__}; expected a torch tensor, as input is")
        y, normalized, _, _, added = _by_operator(call, *tensors[:4], weights, biases)
        return y, normalized if return_normalized else None, input if residual is None else added
    if torch.is_grad_enabled() and autograd._wants_gradient(*tensors):
        if fused is not None:
            _folds.pop(weights[0], None)  # an optimizer may step without telling torch
        y, normalized, added = _apply(call._replace(folded=folded), take, len(weights), *tensors)
        return y, normalized, input if residual is None else added
    if fused is not None:
        call = call._replace(folded=folded or kept_fold(call, norm_weight, norm_bias, weights, biases))
    y, normalized, _, _, added = _forward(call, *tensors[:4], _joined(weights), _joined(biases), norm.FOR_Y)
    return y, normalized, added


def _without_subclass(tensor: Tensor | None) -> Tensor | None:
    if tensor.__class__ in autograd._PLAIN or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor
    return tensor.as_subclass(Tensor)


def _check(
    centered, input, norm_weight, norm_bias, weights, biases, eps, residual, return_normalized, zero_centered_weight,
    save_normalized, fused, options,
) -> _Call:  # fmt: skip
    if input.is_meta:
        arrays.take(input, "input")  # finds words for it
    in_autocast, dtype = torch.is_autocast_enabled(input.device.type), _product_dtype(input)
    if _is_compiling():  # shapes are checked by what knows the operator's
        for part in () if in_autocast else (*weights, *biases):
            if part.dtype != input.dtype:
                raise TypeError(f"weight or bias is of dtype {part.dtype}, input of {input.dtype}; expected both the same")
    elif fused is not None or not _obviously_fit(input, norm_weight, norm_bias, weights, biases):
        for at, weight in enumerate(weights):
            bias = biases[at] if biases else None
            weight_dtype = _name(weight.dtype) if in_autocast and isinstance(weight, Tensor) else None
            norm_linear.check(input, norm_weight, norm_bias, weight, bias, fused, weight_dtype)
    if fused == "fold" and return_normalized:
        raise ValueError(
            "return_normalized is given with fused='fold', in which no normalised tensor exists; expected one of them"
        )
    return _Call(
        centered, eps, bool(zero_centered_weight), dtype, return_normalized, save_normalized and fused is None, fused, options
    )


def _obviously_fit(input, norm_weight, norm_bias, weights, biases) -> bool:
    """Whether norm_linear.check would find nothing, in a tenth of its time. False: it is to look, and to find words."""
    try:
        in_features, dtype, device = input.shape[-1], input.dtype, input.device
        for at, weight in enumerate(weights):
            rows, cols = weight.shape
            if cols != in_features or weight.dtype != dtype or weight.device != device:
                return False
            if biases:
                bias = biases[at]
                if bias.shape != (rows,) or bias.dtype != dtype or bias.device != device:
                    return False
        for parameter in (norm_weight, norm_bias):
            if parameter is not None and (parameter.shape != (in_features,) or parameter.device != device):
                return False
        return dtype in _DTYPES
    except (AttributeError, IndexError, ValueError):
        return False


_DTYPES = frozenset(getattr(torch, name) for name in DTYPES)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Parts in one tensor: without a copy where they lie one after the other in one storage. Its gradient is not recorded."""
    if len(parts) < 2:
        return parts[0].detach() if parts else None
    first, at = parts[0], parts[0].data_ptr()
    for part in parts:
        if (
            part.data_ptr() != at or part.dtype != first.dtype or not part.is_contiguous()
            or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):  # fmt: skip
            with fp8.outside_autocast(first):  # it has no cat of the other dtype of 16 bits
                return torch.cat([part.detach() for part in parts])
        at += part.numel() * part.element_size()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride())


# Norms: by the kernels at once; by the operators, which are recorded and traced; by formulas, which torch maps over.


class _Kernels:
    sum_rows = staticmethod(sum_rows)

    @staticmethod
    def normalize(call, input, residual, norm_weight, norm_bias, purpose=norm.FOR_STATISTICS):
        """normalized, mean, rstd, input + residual."""
        prepared, given = norm.prepare_forward(
            call.centered, input, tuple(input.shape[-1:]), norm_weight, norm_bias, call.eps, residual,
            call.zero_centered_weight, call.dtype, None, call.options, purpose,
        )  # fmt: skip
        return prepared.run(*given)

    @staticmethod
    def gradients(call, dy, x, mean, rstd, norm_weight, norm_bias, dsum, wanted, recomputes=False, spends_dy=False):
        """dx, dnorm_weight, dnorm_bias, None where not wanted; and the normalised tensor if it is to be made again.
        spends_dy: dx may take its place."""
        names = tuple(name for name, is_wanted in zip(norm.Backward._fields, wanted) if is_wanted)
        arguments = (
            call.centered, dy, x, mean, rstd, tuple(x.shape[-1:]), norm_weight, call.zero_centered_weight, dsum, names, None,
            None if norm_bias is None else norm_bias.dtype, call.options,
        )  # fmt: skip
        if not recomputes:
            prepared, given = norm.prepare_backward(*arguments, spends_dy=spends_dy)
            return *prepared.run(*given), None
        prepared, given = fused.prepare_backward(
            *arguments, None, None, None, recomputed=(norm_bias,), spends_dy=spends_dy
        )  # fmt: skip
        dx, dnorm_weight, dnorm_bias, _, normalized = prepared.run(*given)
        return dx, dnorm_weight, dnorm_bias, normalized


class _Operators:
    @staticmethod
    def sum_rows(rows, dtype):
        return rows.sum(0, dtype=dtype)

    @staticmethod
    def normalize(call, input, residual, norm_weight, norm_bias, purpose=None):
        return torch_ops.forward(
            call.centered, input, tuple(input.shape[-1:]), norm_weight, norm_bias, call.eps, residual,
            call.zero_centered_weight, call.dtype, call.options,
        )  # fmt: skip

    @staticmethod
    def gradients(call, dy, x, mean, rstd, norm_weight, norm_bias, dsum, wanted, recomputes=False, spends_dy=False):
        mean, margin = mean if call.centered else None, call.options.of("backward").sm_margin
        if recomputes and not torch.is_grad_enabled():  # else each is to be differentiable
            return torch_ops.gradients_and_y(
                dy, x, mean, rstd, norm_weight, norm_bias, dsum, tuple(x.shape[-1:]), wanted, call.zero_centered_weight, margin
            )
        return *torch_ops.gradients(
            dy, x, mean, rstd, norm_weight, dsum, tuple(x.shape[-1:]), wanted, call.zero_centered_weight,
            None if norm_bias is None else norm_bias.dtype, margin, None,
        ), None  # fmt: skip


class _Formulas:
    sum_rows = _Operators.sum_rows

    @staticmethod
    def normalize(call, input, residual, norm_weight, norm_bias, purpose=None):
        eps = norm._check_eps(call.eps, _name(input.dtype), has_default=not call.centered)
        x_hat = formulas.x_hat(input, 1, call.centered, eps)
        y = x_hat * formulas.scale(norm_weight, call.zero_centered_weight, x_hat.dtype)
        return ((y if norm_bias is None else y + norm_bias).to(call.dtype),)

    @staticmethod
    def gradients(call, dy, x, mean, rstd, norm_weight, norm_bias, dsum, wanted, recomputes=False, spends_dy=False):
        made = formulas.gradients(dy, x, mean, rstd, norm_weight, dsum, tuple(x.shape[-1:]), call.zero_centered_weight)
        return *(gradient if is_wanted else None for gradient, is_wanted in zip(made, wanted)), None


# Forward.


def project(normalized: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """normalized weight^T + bias, of tensors of one dtype, outside autograd."""
    with torch.no_grad(), fp8.outside_autocast(normalized):
        return functional.linear(normalized, weight, bias)


def _forward(call, input, residual, norm_weight, norm_bias, weight, bias, purpose) -> tuple:
    """y, normalized, mean, rstd, input + residual."""
    if call.fused == "fold":
        mean, rstd, added = _statistics(call, input, residual)
        with fp8.outside_autocast(input):
            folded = call.folded or fold(
                norm_weight, norm_bias, weight, bias, centered=call.centered, zero_centered_weight=call.zero_centered_weight,
                dtype=call.dtype,
            )  # fmt: skip
            return project_folded(added, mean, rstd, folded), None, mean, rstd, added
    normalized, mean, rstd, added = _Kernels.normalize(call, input, residual, norm_weight, norm_bias, purpose)
    y = functional.linear(normalized, weight.to(call.dtype), None if bias is None else bias.to(call.dtype))
    return y, normalized, mean, rstd, added


def _statistics(call, input, residual) -> tuple[Tensor | None, Tensor, Tensor]:
    """mean, rstd, input + residual: one pass over x that writes no y."""
    _, mean, rstd, added = _Kernels.normalize(call, input, residual, None, None, norm.FOR_STATISTICS_ALONE)
    return mean, rstd, added


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, take, num_parts, input, residual, norm_weight, norm_bias, *parts):
        weights, biases = parts[:num_parts], parts[num_parts:]
        weight = _joined(weights)
        cast = weight.to(call.dtype)
        y, normalized, mean, rstd, added = _forward(
            call, input, residual, norm_weight, norm_bias, cast if call.fused is None else weight, _joined(biases),
            norm.FOR_STATISTICS,
        )  # fmt: skip
        ctx.save_for_backward(
            added, mean, rstd, norm_weight, norm_bias, normalized if call.save_normalized else None,
            None if cast is weight else cast, *parts,
        )  # fmt: skip
        ctx.call, ctx.take, ctx.num_parts = call, take, num_parts
        ctx.set_materialize_grads(False)
        return y, normalized if call.return_normalized else None, None if residual is None else added

    @staticmethod
    def backward(ctx, dy, dnormalized, dsum):
        added, mean, rstd, norm_weight, norm_bias, normalized, cast, *parts = ctx.saved_tensors
        weights, biases = parts[: ctx.num_parts], parts[ctx.num_parts :]
        wanted = ctx.needs_input_grad[3:]
        given = [each for each in (dy, dnormalized, dsum) if each is not None]
        transformed = _is_transformed() or any(map(autograd._is_mapped, given)) or forward_ad._current_level >= 0
        if transformed or torch.is_grad_enabled():  # create_graph=True, is_grads_batched=True, or a tangent
            if ctx.take is not None:
                raise RuntimeError(
                    "a differentiable gradient was asked for of a layer that hands its weight gradients on "
                    "(fuse_wgrad_accumulation or delay_wgrad_compute); expected create_graph=False"
                )
            norms, normalized, weight = _Formulas if transformed else _Operators, None, None
        else:
            norms, weight = _Kernels, _joined(weights) if cast is None else cast
        with fp8.outside_autocast(added):  # in which backward() may be called
            if weight is None:
                weight = (torch.cat(weights) if len(weights) > 1 else weights[0]).to(ctx.call.dtype)
            made = _gradients(
                norms, ctx.call, dy, dnormalized, dsum, added, mean, rstd, norm_weight, norm_bias, normalized, weight, weights,
                biases, wanted, ctx.take,
            )  # fmt: skip
        return None, None, None, *made


# Less what it does for functorch's transforms, which come another way.
_apply = super(torch.autograd.Function, _Projected).apply


def _gradients(
    norms, call, dy, dnormalized, dsum, added, mean, rstd, norm_weight, norm_bias, normalized, weight, weights, biases, wanted,
    take,
) -> tuple:  # fmt: skip
    """The gradients of input, residual, norm_weight, norm_bias, *weights, *biases: those that `wanted` asks for."""
    wants_input, wants_residual, wants_norm_weight, wants_norm_bias, *wants_parts = wanted
    of_norm = (wants_input or wants_residual, wants_norm_weight, wants_norm_bias)
    dx, dnorm_weight, dnorm_bias = dsum, None, None
    rows = None if dy is None else as_rows(dy)
    dweights, dbiases = [None] * len(weights), [None] * len(biases)
    # Each tensor goes before the next is made: few are there at a time.
    if rows is not None and take is None and biases and any(wants_parts[len(weights) :]):
        dbiases = norms.sum_rows(rows, biases[0].dtype).split([len(part) for part in biases])
    reaches = dnormalized
    if rows is not None and any(of_norm):
        if dnormalized is None:
            reaches = rows @ weight
        else:
            reaches = torch.addmm(as_rows(dnormalized).to(rows.dtype), rows, weight)
        reaches = reaches.reshape(added.shape)
    wants_normalized = rows is not None and any(wants_parts[: len(weights)])
    if reaches is not None and any(of_norm):
        recomputes = wants_normalized and normalized is None
        dx, dnorm_weight, dnorm_bias, made = norms.gradients(
            call, reaches, added, mean, rstd, norm_weight, norm_bias, dsum, of_norm, recomputes, spends_dy=rows is not None
        )
        normalized = made if recomputes else normalized
    reaches = made = None

    # Either way one tensor waits where `take` delays the product: the normalised one, or x.
    if normalized is None:

        def normalized_rows() -> Tensor:
            return as_rows(norms.normalize(call, added, None, norm_weight, norm_bias, norm.FOR_Y)[0])
    else:
        normalized_rows = partial(as_rows, normalized)

    if take is not None and rows is None:
        take.nothing()
    elif take is not None:
        reads = {"the normalised tensor": normalized}
        if normalized is None:
            reads = {"the input": added, "the norm's weight": norm_weight, "the norm's bias": norm_bias}
        dweights, dbiases = take(rows, normalized_rows, wants_parts, reads=reads)
    elif wants_normalized:
        dweight = rows.t() @ normalized_rows()
        parts = dweight.split([len(part) for part in weights])
        dweights = [each.to(part.dtype) for each, part in zip(parts, weights)]
    made = (dx, dx, dnorm_weight, dnorm_bias, *dweights, *dbiases)
    return tuple(gradient if is_wanted else None for gradient, is_wanted in zip(made, wanted))


def _composed(call, input, residual, norm_weight, norm_bias, weights, biases) -> tuple[Tensor, Tensor | None, Tensor]:
    """By functions that torch's transforms and forward mode know."""
    normalized, added = autograd.normalize(
        call.centered, input, tuple(input.shape[-1:]), norm_weight, norm_bias, call.eps, residual, call.zero_centered_weight,
        _name(call.dtype), None, call.options,
    )  # fmt: skip
    weight, bias = (
        None if not parts else (torch.cat(parts) if len(parts) > 1 else parts[0]).to(call.dtype) for parts in (weights, biases)
    )
    y = functional.linear(normalized, weight, bias)
    return y, normalized if call.return_normalized else None, added


def explicit_gradients(
    dy, x, mean, rstd, norm_weight, norm_bias, weight, eps, normalized, zero_centered_weight, dnormalized, dsum, gradients,
    options,
) -> tuple:  # fmt: skip
    """dx, dnorm_weight, dnorm_bias, dweight, dbias outside autograd, None where `gradients` does not name them."""
    call = _Call(mean is not None, eps, bool(zero_centered_weight), x.dtype, False, False, None, options)
    wants = [name in gradients for name in norm_linear.GRADIENTS]
    with torch.no_grad(), fp8.outside_autocast(x):
        made = _gradients(
            _Kernels, call, dy, dnormalized, dsum, x, mean, rstd, norm_weight, norm_bias, normalized, weight, (weight,),
            (weight[:, 0],), (wants[0], False, *wants[1:]), None,
        )  # fmt: skip
    return made[0], *made[2:]


# Folded.


class Folded(NamedTuple):
    """weight: [out_features, in_features]. sums: of its rows as they are after rounding; None for RMSNorm.
    bias: [out_features]."""

    weight: Tensor
    sums: Tensor | None
    bias: Tensor


def fold(
    norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None = None, *, centered: bool = True,
    zero_centered_weight: bool = False, dtype: torch.dtype | None = None,
) -> Folded:  # fmt: skip
    """The norm's weight and bias folded into the linear ones: y = rstd * (x folded^T - mean * sums) + bias.

    Formed in float32 (float64 for float64); folded.weight is rounded once, to dtype (weight's). Its rows are centred, so that
    in exact arithmetic sums would be 0 and the mean cancel. What rounding leaves of them is subtracted again, so that a large
    mean meets no error of a weight: what is left is

        y    rstd * sum |x - mean| |folded| * half_ulp(weight's dtype)    the folded weights' rounding, in place of normalized's
           + rstd * sum |x| |folded| * in_features * 2^-24                the product's additions, which see x and not x - mean

    The first is no larger than that of the plain path. The second grows with |mean| * rstd, where that of the plain path does
    not; and so does, under autocast, the rounding of a float32 x to dtype.
    """
    compute = formulas.arithmetic(weight)
    wide = weight.to(compute)
    folded = wide * formulas.scale(norm_weight, zero_centered_weight, compute)
    if centered:
        folded = folded - folded.mean(1, keepdim=True)
    rounded = folded.to(dtype or weight.dtype)
    of_bias = wide.new_zeros(len(wide)) if bias is None else bias.to(compute)
    if norm_bias is not None:
        of_bias = torch.addmv(of_bias, wide, norm_bias.to(compute))
    return Folded(rounded, rounded.sum(1, dtype=compute) if centered else None, of_bias)


_folds = WeakIdKeyDictionary()  # first weight -> (what the fold was made of, the fold)


def kept_fold(
    call: _Call, norm_weight: Tensor | None, norm_bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Folded:
    """The fold of the parameters for calls without gradients: made once, kept as long as the weight lives,
    made anew after a change.

    Seen are other tensors in their places, what torch writes to one (load_state_dict, optimizers: its version), and data that
    lies elsewhere; a recorded call, too, drops the fold. Not seen is what is written to `tensor.data`, or by foreign kernels,
    with no recorded call in between. Nothing is kept while a CUDA graph is captured, whose replays are to see new parameters,
    nor of inference tensors, which have no version.
    """
    first = weights[0]
    others = (norm_weight, norm_bias, *weights[1:], *biases)
    stream = None
    if first.is_cuda:
        stream = torch._C._cuda_getCurrentRawStream(first.get_device())
        keeps = not torch.cuda.is_current_stream_capturing()
    else:
        keeps = True
    keeps = keeps and not any(each is not None and each.is_inference() for each in (first, *others))
    if keeps:
        state = tuple(None if each is None else (each._version, each.data_ptr()) for each in (first, *others))
        state = (call.centered, call.zero_centered_weight, call.dtype, stream, *state)
        kept = _folds.get(first)
        if kept is not None and kept[0] == state and all(one is other for one, other in zip(kept[1], others)):
            return kept[2]
    with torch.no_grad(), fp8.outside_autocast(first):
        folded = fold(
            norm_weight, norm_bias, _joined(weights), _joined(biases), centered=call.centered,
            zero_centered_weight=call.zero_centered_weight, dtype=call.dtype,
        )  # fmt: skip
    if keeps:
        _folds[first] = (state, others, folded)
    return folded


def project_folded(x: Tensor, mean: Tensor | None, rstd: Tensor, folded: Folded) -> Tensor:
    """y [..., out_features] of x [..., in_features] and its statistics, in the dtype of folded.weight, which x is cast to."""
    dtype = folded.weight.dtype
    y = _wide_product(as_rows(x.to(dtype)), folded.weight.t())
    if folded.sums is not None:
        y.addr_(mean.reshape(-1), folded.sums, alpha=-1)
    # Scaled, shifted and rounded in one pass over y: torch rounds as it writes.
    rounded = torch.empty_like(y, dtype=dtype)
    torch.addcmul(folded.bias, y, rstd.reshape(-1, 1), out=rounded)
    return rounded.reshape(*x.shape[:-1], len(folded.weight))


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 (float64 for float64), unrounded where torch can: on a GPU since 2.8, on the CPU by wide factors."""
    compute = formulas.arithmetic(a)
    if a.dtype == compute:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=compute) if _has_wide_products else (a @ b).to(compute)
    return a.to(compute) @ b.to(compute)


_has_wide_products = "dtype" in torch.ops.aten.mm.overloads()


# Weight gradients that do not go to autograd.


class _Step:
    """The forwards whose gradients main_grad adds up. is_stale: what it holds is of a former step,
    and is to be written over."""

    def __init__(self, is_stale: bool) -> None:
        self.is_stale = is_stale


_NOTHING: Mapping[str, Tensor | None] = {}


class _WeightGradients:
    """Where the gradients of one forward's weights and biases go: to main_grad, or into a queue for backward_dw, or both."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor], step: _Step | None, queue: deque | None) -> None:
        """step: None where there is no main_grad. queue: None where nothing is delayed."""
        self.weights, self.biases, self.step, self.queue = weights, biases, step, queue

    def __call__(
        self, rows: Tensor, make_normalized: Callable[[], Tensor] | None, wanted: Sequence[bool],
        make_dweight: Callable[[torch.dtype], Tensor] | None = None, *, reads: Mapping[str, Tensor | None] = _NOTHING,
    ) -> tuple[list, list]:  # fmt: skip
        """What autograd is given for weights and biases. rows: dy [num_rows, out_features]. wanted: of weights, then biases.

        make_dweight: gives the product of rows and the normalised tensor in a dtype, where that is not simply theirs.
        reads: what make_normalized reads, by name.
        """
        weights = [weight if is_wanted else None for weight, is_wanted in zip(self.weights, wanted)]
        biases = [bias if is_wanted else None for bias, is_wanted in zip(self.biases, wanted[len(weights) :])]
        if self.queue is not None:
            reads = dict(reads)
            if make_dweight is None or any(bias is not None for bias in biases):
                reads["the gradient of y"] = rows
            reads = [(name, each, each._version) for name, each in reads.items() if each is not None]
            self.queue.append(partial(self._add, rows, make_normalized, weights, biases, make_dweight, reads))
            return [None] * len(weights), [None] * len(biases)
        of_biases = self._bias_gradients(rows, biases)
        self._add_weights(rows, make_normalized, weights, make_dweight)
        return [_placeholder(weight) for weight in weights], of_biases

    def nothing(self) -> None:
        """A backward that no gradient of y has reached."""
        if self.queue is not None:
            self.queue.append(_do_nothing)

    def _bias_gradients(self, rows: Tensor, biases: Sequence[Tensor | None]) -> list[Tensor | None]:
        if all(bias is None for bias in biases):
            return list(biases)
        parts = sum_rows(rows, self.biases[0].dtype).split([len(bias) for bias in self.biases])
        return [None if bias is None else part for bias, part in zip(biases, parts)]

    def _add(self, rows, make_normalized, weights, biases, make_dweight, reads) -> None:
        for name, each, version in reads:
            if each._version != version:
                raise RuntimeError(
                    f"{name} was written to between a backward and its backward_dw(), which reads it; expected it as it was "
                    "(another gradient may be added up in the memory of that of y: y.register_hook(torch.clone) parts them)"
                )
        for bias, gradient in zip(biases, self._bias_gradients(rows, biases)):
            if bias is not None:
                _accumulate(bias, gradient)
        self._add_weights(rows, make_normalized, weights, make_dweight)

    def _add_weights(self, rows, make_normalized, weights, make_dweight) -> None:
        if all(weight is None for weight in weights):
            return
        sizes = [len(weight) for weight in self.weights]
        normalized = make_normalized() if make_dweight is None else None
        if self.step is None:
            dweight = rows.t() @ normalized if make_dweight is None else make_dweight(self.weights[0].dtype)
            for weight, part in zip(weights, dweight.split(sizes)):
                if weight is not None:
                    _accumulate(weight, part.to(weight.dtype))
            return
        writes_over, self.step.is_stale = self.step.is_stale, False
        products = (rows if make_dweight is None else make_dweight(torch.float32).t()).split(sizes, 1)
        for weight, part in zip(weights, products):
            if weight is not None:
                over = writes_over or getattr(weight, "overwrite_main_grad", False)
                _add_product(_main_grad(weight), part.t(), normalized, accumulate=not over)
                if hasattr(weight, "grad_added_to_main_grad"):
                    weight.grad_added_to_main_grad = True


def _do_nothing() -> None:
    pass


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _main_grad(weight: Tensor) -> Tensor:
    """torch FSDP of Megatron makes it when it is asked for."""
    return weight.get_main_grad() if hasattr(weight, "__fsdp_param__") else weight.main_grad


def _placeholder(weight: Tensor | None) -> Tensor | None:
    """What stands for a gradient that is in main_grad already: hooks of those who marked the weight wait for a tensor."""
    if weight is None or not hasattr(weight, "grad_added_to_main_grad"):
        return None
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def _add_product(to: Tensor, a: Tensor, b: Tensor | None, *, accumulate: bool) -> None:
    """to += a @ b, or to = a @ b, in to's dtype: unrounded before the addition where torch can. b None: a is the product."""
    if b is None:
        to.add_(a) if accumulate else to.copy_(a)
    elif to.dtype == a.dtype:
        torch.addmm(to, a, b, beta=int(accumulate), out=to)
    elif to.is_cuda and to.dtype == torch.float32 and _has_wide_products:
        torch.addmm(to, a, b, out_dtype=to.dtype, beta=int(accumulate), out=to)
    elif accumulate:
        to.add_(_wide_product(a, b))
    else:
        to.copy_(_wide_product(a, b))


# The operator.

_library = torch.library.Library("cupynorm", "FRAGMENT")
_library.define(
    "norm_linear(Tensor input, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, Tensor[] weights, Tensor[] biases, "
    "float? eps, bool centered, bool zero_centered_weight, ScalarType dtype, bool return_normalized, bool save_normalized, "
    "str? fused, int sm_margin, int backward_sm_margin) "
    "-> (Tensor y, Tensor normalized, Tensor mean, Tensor rstd, Tensor sum)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_norm_linear = torch.ops.cupynorm.norm_linear.default


def _by_operator(call, input, residual, norm_weight, norm_bias, weights, biases):
    """y, normalized, mean, rstd, input + residual: those that a flag does not ask for are empty."""
    margin = call.options.of("forward" if torch.is_grad_enabled() else "inference").sm_margin
    return _norm_linear(
        input, residual, norm_weight, norm_bias, list(weights), list(biases), call.eps, call.centered,
        call.zero_centered_weight, call.dtype, call.return_normalized, call.save_normalized, call.fused, margin,
        call.options.of("backward").sm_margin,
    )  # fmt: skip


def _run(
    input, residual, norm_weight, norm_bias, weights, biases, eps, centered, zero_centered_weight, dtype, return_normalized,
    save_normalized, fused, sm_margin, _,
):  # fmt: skip
    call = _Call(
        centered, eps, zero_centered_weight, dtype, return_normalized, save_normalized, fused, Options(sm_margin=sm_margin)
    )
    y, normalized, mean, rstd, added = _forward(
        call, input, residual, norm_weight, norm_bias, _joined(weights), _joined(biases), norm.FOR_STATISTICS
    )
    # An operator returns tensors, and none that it was given.
    return (
        y, normalized if return_normalized or save_normalized else y.new_empty(0), mean if centered else rstd.new_empty(0),
        rstd, input.new_empty(0) if residual is None else added,
    )  # fmt: skip


def _run_without_memory(
    input, residual, norm_weight, norm_bias, weights, biases, eps, centered, zero_centered_weight, dtype, return_normalized,
    save_normalized, fused, *_,
):  # fmt: skip
    for at, weight in enumerate(weights):
        norm_linear.check(input, norm_weight, norm_bias, weight, biases[at] if biases else None, fused, _name(weight.dtype))
    leading, compute = input.shape[:-1], formulas.arithmetic(input)
    return (
        input.new_empty((*leading, sum(len(part) for part in weights)), dtype=dtype),
        input.new_empty(input.shape if return_normalized or save_normalized else 0, dtype=dtype),
        input.new_empty(leading if centered else 0, dtype=compute),
        input.new_empty(leading, dtype=compute),
        input.new_empty(0 if residual is None else input.shape),
    )


def _save(ctx, inputs, output):
    input, residual, norm_weight, norm_bias, weights, biases, eps, centered, zero_centered_weight, dtype, *rest = inputs
    return_normalized, save_normalized, fused, _, backward_sm_margin = rest
    _, normalized, mean, rstd, added = output
    unused = [mean, rstd, *(() if return_normalized else (normalized,)), *(() if residual is not None else (added,))]
    ctx.mark_non_differentiable(*unused)
    ctx.save_for_backward(
        input if residual is None else added,
        mean,
        rstd,
        norm_weight,
        norm_bias,
        normalized if save_normalized else None,
        *weights,
        *biases,
    )
    ctx.set_materialize_grads(False)
    ctx.num_parts = len(weights), len(biases)
    ctx.call = _Call(
        centered,
        eps,
        zero_centered_weight,
        dtype,
        return_normalized,
        save_normalized,
        fused,
        Options(sm_margin=backward_sm_margin),
    )


def _differentiate(ctx, dy, dnormalized, _dmean, _drstd, dsum):
    added, mean, rstd, norm_weight, norm_bias, normalized, *parts = ctx.saved_tensors
    num_weights, num_biases = ctx.num_parts
    weights, biases = parts[:num_weights], parts[num_weights:]
    wants_input, wants_residual, wants_norm_weight, wants_norm_bias, wants_weights, wants_biases, *rest = ctx.needs_input_grad
    wanted = (
        wants_input, wants_residual, wants_norm_weight, wants_norm_bias, *fp8_linear.each_of(wants_weights, num_weights),
        *fp8_linear.each_of(wants_biases, num_biases),
    )  # fmt: skip
    if torch.is_grad_enabled():  # create_graph=True: what was saved is no function of x to autograd, what is made again is
        normalized = None
    with fp8.outside_autocast(added):
        weight = (torch.cat(weights) if num_weights > 1 else weights[0]).to(ctx.call.dtype)
        made = _gradients(
            _Operators, ctx.call, dy, dnormalized, dsum, added, mean, rstd, norm_weight, norm_bias, normalized, weight, weights,
            biases, wanted, None,
        )  # fmt: skip
    dweights, dbiases = list(made[4 : 4 + num_weights]), list(made[4 + num_weights :])
    return *made[:4], dweights, dbiases, *(None for _ in rest)


for _device in ("CPU", "CUDA"):
    _library.impl("norm_linear", _run, _device)
torch.library.register_fake("cupynorm::norm_linear", _run_without_memory, lib=_library)
torch.library.register_autograd("cupynorm::norm_linear", _differentiate, setup_context=_save, lib=_library)


# The module.

NORMALIZATIONS = ("LayerNorm", "RMSNorm")
# Arguments of tensor parallelism and overlap: the one value that means a single GPU.
_SINGLE = {
    "sequence_parallel": False, "tp_group": None, "tp_size": 1, "ub_overlap_ag": False, "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False, "ub_bulk_wgrad": False, "ub_bulk_dgrad": False, "symmetric_ar_type": None,
}  # fmt: skip


def _refuse_parallel(given: Mapping[str, object]) -> None:
    for name, single in _SINGLE.items():
        size = getattr(given[name], "size", None)
        if name == "tp_group" and callable(size) and size() == 1:
            continue
        if given[name] is not single and given[name] != single:
            raise ValueError(f"{name} is {given[name]!r}; expected {single!r}: this layer works on one GPU")


class LayerNormLinear(torch.nn.Module):
    """A norm and the linear layer after it: TransformerEngine's module, its arguments in its order, parameters and state dict.

    in_features: the width of the norm. out_features: rows of the linear weight, of all splits together. eps: of the norm.
    normalization: "LayerNorm" or "RMSNorm" (no bias in the norm).
        zero_centered_gamma: multiply by 1 + layer_norm_weight, which starts at 0.
    bias: whether the linear layer has one. return_bias: do not add it, return it.
    return_layernorm_output: also return the normalised tensor;
        return_layernorm_output_gathered: that of all ranks, here the same.
    parameters_split: names, which share out_features evenly, or a dict of names and sizes: parameters name_weight and name_bias
        in place of weight and bias, which lie one after the other in one storage.
    init_method: fills each weight in place, by default normal with standard deviation 0.023. get_rng_state_tracker: init_method
        runs inside get_rng_state_tracker().fork(), or fork(name) where the module's attribute rng_tracker_name is set.
    params_dtype: of the parameters, by default torch's. device: "meta" leaves memory and values to to_empty() and
        reset_parameters().
    fuse_wgrad_accumulation: add the weight's gradient to weight.main_grad, which must be there; it is written over by the first
        backward after a forward with is_first_microbatch=True, or if weight.overwrite_main_grad is true. A weight with an
        attribute grad_added_to_main_grad gets it set to True, and a gradient of no meaning.
    delay_wgrad_compute: backward() leaves the gradients of weights and biases to backward_dw(), one call for each backward.
    parallel_mode: None or "column", which for one GPU differ in the attributes that biases get: with "column" those of weights,
        tensor_model_parallel, partition_dim and partition_stride.
    ub_name, name: for the user.
    sequence_parallel, tp_group, tp_size, ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_wgrad, ub_bulk_dgrad,
    symmetric_ar_type: as TransformerEngine has them by default, or a tp_group of one rank; any other value is refused.

    By keyword only, and not TransformerEngine's: save_normalized, fused, sm_margin, as of cupynorm.layer_norm_linear.

    Called with input (..., in_features) of the parameters' dtype, or of any under torch.autocast, it returns out (...,
    out_features), or a tuple of out, the bias (an empty tensor without one) and the normalised tensor, those that were asked
    for.
    is_first_microbatch: True for the first of several forwards with the same parameters, False for the others: what is made of
        the weight, in 8-bit floats or folded, is then made once. None: each time; but without gradients, folded, after a change
        of the parameters alone, which True asks for where torch cannot see it (cupynorm.linear.kept_fold).

    Raises ValueError, TypeError or NotImplementedError with a sentence for what does not fit.
    """

    rng_tracker_name: str | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
        *,
        save_normalized: bool = False,
        fused: str | None = None,
        sm_margin: int | Mapping[str, int] = 0,
    ) -> None:
        _refuse_parallel(locals())
        if parallel_mode == "row":
            raise NotImplementedError(
                "parallel_mode is 'row'; expected 'column' or None: a norm needs whole rows, which row parallelism splits"
            )
        if parallel_mode not in (None, "column"):
            raise ValueError(f"parallel_mode is {parallel_mode!r}; expected 'column' or None")
        if normalization not in NORMALIZATIONS:
            raise ValueError(f"normalization is {normalization!r}; expected {' or '.join(map(repr, NORMALIZATIONS))}")
        if fused not in norm_linear.FUSED:
            raise ValueError(f"fused is {fused!r}; expected None or 'fold'")
        if fused is not None and return_layernorm_output:
            raise ValueError(
                "return_layernorm_output is given with fused='fold', in which no normalised tensor exists; expected one of them"
            )
        if params_dtype is not None and not (isinstance(params_dtype, torch.dtype) and params_dtype in _DTYPES):
            raise TypeError(f"params_dtype is {params_dtype!r}; expected {', '.join(sorted(map(str, _DTYPES)))}, or None")
        norm._options(None, None, None, sm_margin)
        norm._check_eps(eps, "float32", has_default=normalization == "RMSNorm")
        _check_features(in_features=in_features, out_features=out_features)
        super().__init__()
        self.in_features, self.out_features, self.eps = in_features, out_features, eps
        self.normalization, self.zero_centered_gamma = normalization, zero_centered_gamma
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered and return_layernorm_output
        self.fuse_wgrad_accumulation, self.delay_wgrad_compute = fuse_wgrad_accumulation, delay_wgrad_compute
        self.parallel_mode, self.ub_name, self.name = parallel_mode, ub_name, name
        self.save_normalized, self.fused, self.sm_margin = save_normalized, fused, sm_margin
        self.init_method, self.get_rng_state_tracker = init_method, get_rng_state_tracker
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        self._step, self._begins_later = _Step(False), False
        self._delayed: deque[Callable[[], None]] = deque()
        self._fp8_states: dict[str, fp8.Scales] = {}
        self._fp8_group: Any = None
        self._fp8_weight: tuple[fp8.Recipe, fp8.QuantizedTensor] | None = None
        self._folded: Folded | None = None

        self._number = fp8_linear.number_of(self)

        names, self.parameter_split_sizes = _splits(parameters_split, out_features)
        self.weight_names = [f"{name}weight" for name in names]
        self.bias_names = [f"{name}bias" for name in names]
        made = {"device": device, "dtype": params_dtype}
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(in_features, **made))
        is_centered = normalization == "LayerNorm"
        self.layer_norm_bias = torch.nn.Parameter(torch.empty(in_features, **made)) if is_centered else None
        weight, biases = torch.empty(out_features, in_features, **made), torch.empty(out_features, **made)
        for each, part in zip(self.weight_names, weight.split(self.parameter_split_sizes)):
            self.register_parameter(each, torch.nn.Parameter(part))
        for each, part in zip(self.bias_names, biases.split(self.parameter_split_sizes)):
            if bias:
                self.register_parameter(each, torch.nn.Parameter(part))
            else:
                setattr(self, each, torch.empty(0, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """layer_norm_weight 1 (0 if zero-centred), each weight by init_method, biases 0; on "meta" nothing but attributes."""
        self._mark_parameters()
        if self.layer_norm_weight.is_meta:
            return
        with torch.no_grad():
            self.layer_norm_weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            if self.layer_norm_bias is not None:
                self.layer_norm_bias.zero_()
            for weight in self._weights():
                with self._random_state():
                    (self.init_method or _initialize)(weight)
            for bias in self._biases():
                bias.zero_()

    def _random_state(self) -> Any:
        if self.get_rng_state_tracker is None:
            return contextlib.nullcontext()
        given = () if self.rng_tracker_name is None else (self.rng_tracker_name,)
        return self.get_rng_state_tracker().fork(*given)

    def _weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.weight_names]

    def _biases(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.bias_names] if self.use_bias else []

    def _mark_parameters(self) -> None:
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = False
        for parameter in (*self._weights(), *(self._biases() if self.parallel_mode == "column" else ())):
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
        if self.delay_wgrad_compute:
            for parameter in (*self._weights(), *self._biases()):
                parameter.skip_backward_post_hook = True

    def _join_parameters(self) -> None:
        """Puts split parameters one after the other in one storage again, after something has moved each by itself."""
        for parts in (self._weights(), self._biases()):
            if len(parts) > 1 and all(part.data.__class__ is Tensor and not part.is_meta for part in parts):
                joined = _joined(parts)
                if joined.data_ptr() == parts[0].data_ptr():
                    continue
                for part, view in zip(parts, joined.split([len(part) for part in parts])):
                    part.data = view

    def _apply(self, function: Callable, recurse: bool = True) -> LayerNormLinear:
        super()._apply(function, recurse)
        if not self.use_bias:
            for name in self.bias_names:
                setattr(self, name, function(getattr(self, name)))
        moved = {name: fp8.moved(state, function) for name, state in self._fp8_states.items()}
        self._fp8_states = {name: state for name, state in moved.items() if state is not None}
        self._join_parameters()
        self._mark_parameters()
        self._drop_made()
        return self

    def _drop_made(self) -> None:
        """What was made of parameters that are others now."""
        self._fp8_weight = self._folded = None
        _folds.pop(self._weights()[0], None)

    def __getstate__(self) -> dict:
        return self.__dict__ | {
            "_delayed": deque(),
            "_step": _Step(False),
            "_begins_later": False,
            "_fp8_group": None,
            "_fp8_weight": None,
            "_folded": None,
        }  # what a step holds belongs to this module alone

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._number = fp8_linear.number_of(self)
        self._join_parameters()
        self._mark_parameters()  # a deep copy of a parameter loses its attributes

    def get_extra_state(self) -> Tensor:
        """The state of delayed scaling as bytes, without pickle: an empty uint8 tensor where there is none."""
        return fp8.pack(self._fp8_states)

    def set_extra_state(self, state: Any) -> None:
        """Takes what get_extra_state gave. Of TransformerEngine's it takes an empty one,
        and leaves a pickle unopened with a warning."""
        self._fp8_states = fp8_linear.states_from(fp8.unpack(state), self._fp8_states)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments) -> None:
        state_dict = {f"{prefix}_extra_state": None, **state_dict}  # a state dict of another origin has none
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._drop_made()
        self._mark_parameters()  # load_state_dict(assign=True) brings other parameters

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Tensor | tuple[Tensor, ...]:
        """The call. Inside cupynorm.fp8_autocast also, without gradients, fp8_output: out as a QuantizedTensor of its rows,
        whose scale, but with BlockScaling, is of its own amax; and fp8_grad: the gradient of the normalised tensor is rounded
        to an 8-bit float too.
        """
        if not isinstance(inp, Tensor):
            raise TypeError(f"input is a {type(inp).__name__}; expected a torch tensor")
        if inp.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"input has shape {tuple(inp.shape)}; expected (..., {self.in_features}), in_features of this layer"
            )
        hands_on = self.fuse_wgrad_accumulation or self.delay_wgrad_compute
        if self.fuse_wgrad_accumulation and is_first_microbatch and self.training and not torch.is_grad_enabled():
            self._begins_later = True
        region = fp8.active()
        if region is not None and _is_compiling() and region.text and not (fp8_output or self._hands_on_in_fp8()):
            plain, recorded = self._check_in_fp8(inp, fp8_output)
            y, normalized = fp8_linear.by_operator(
                self, self._number, region, inp, plain.dtype, is_first_microbatch, fp8_grad, recorded
            )
        elif region is not None:
            y, normalized = _untraced(self._project_in_fp8)(region, inp, is_first_microbatch, fp8_output, fp8_grad)
        elif fp8_output or fp8_grad:
            name = "fp8_output" if fp8_output else "fp8_grad"
            raise ValueError(f"{name} is True outside of fp8_autocast; expected False, or the call inside of it")
        elif hands_on and torch.is_grad_enabled() and any(each.requires_grad for each in (*self._weights(), *self._biases())):
            y, normalized = _untraced(self._project_and_hand_on)(inp, is_first_microbatch)
        else:
            y, normalized = self._project(inp, is_first_microbatch)
        bias = (self._returned_bias(inp, y.dtype),) if self.return_bias else ()
        results = (y, *bias, *((normalized,) if self.return_layernorm_output else ()))
        return results if len(results) > 1 else y

    def _project(
        self, inp: Tensor, is_first_microbatch: bool | None, take: _WeightGradients | None = None
    ) -> tuple[Tensor, Tensor | None]:
        folds = self.fused == "fold" and is_first_microbatch is not None and not _is_compiling()
        y, normalized, _ = normalize_and_project(
            self.normalization == "LayerNorm", inp, self.layer_norm_weight, self.layer_norm_bias, self._weights(),
            [] if self.return_bias else self._biases(), self.eps, None, self.return_layernorm_output, self.zero_centered_gamma,
            self.save_normalized, self.fused, norm._options(None, None, None, self.sm_margin), take,
            self._fold(is_first_microbatch, _product_dtype(inp)) if folds else None,
        )  # fmt: skip
        return y, normalized

    def _project_and_hand_on(self, inp: Tensor, is_first_microbatch: bool | None) -> tuple[Tensor, Tensor | None]:
        return self._project(inp, is_first_microbatch, self._weight_gradients(is_first_microbatch))

    def _fold(self, is_first_microbatch: bool, dtype: torch.dtype) -> Folded:
        """True: folded and kept; False: what is kept."""
        if is_first_microbatch or self._folded is None or self._folded.weight.dtype != dtype:
            _folds.pop(self._weights()[0], None)
            with torch.no_grad(), fp8.outside_autocast(self.layer_norm_weight):
                self._folded = fold(
                    self.layer_norm_weight, self.layer_norm_bias, _joined(self._weights()),
                    None if self.return_bias else _joined(self._biases()), centered=self.normalization == "LayerNorm",
                    zero_centered_weight=self.zero_centered_gamma, dtype=dtype,
                )  # fmt: skip
        return self._folded

    def _weight_gradients(self, is_first_microbatch: bool | None) -> _WeightGradients:
        weights, step = self._weights(), None
        if self.fuse_wgrad_accumulation:
            for name, weight in zip(self.weight_names, weights):
                if (
                    weight.requires_grad
                    and not hasattr(weight, "__fsdp_param__")
                    and getattr(weight, "main_grad", None) is None
                ):
                    raise RuntimeError(
                        f"{name} has no main_grad, to which fuse_wgrad_accumulation=True adds its gradient; expected a tensor "
                        f"of shape {tuple(weight.shape)}, made before the forward"
                    )
                given = getattr(weight, "main_grad", None)
                if given is not None and given.shape != weight.shape:
                    raise ValueError(f"{name}.main_grad has shape {tuple(given.shape)}; expected {tuple(weight.shape)}")
            # A forward that says it is the first begins a step, unless one that has begun was not written to yet; one that a
            # checkpoint runs again inside of backward does not, unless its first run recorded nothing (use_reentrant=True).
            begins = self._begins_later if _inside_backward() else is_first_microbatch
            self._begins_later = False
            if begins and not self._step.is_stale:
                self._step = _Step(True)
            step = self._step
        biases = [] if self.return_bias else self._biases()
        return _WeightGradients(weights, biases, step, self._delayed if self.delay_wgrad_compute else None)

    def _project_in_fp8(
        self, region: fp8.Region, inp: Tensor, is_first_microbatch: bool | None, fp8_output: bool, fp8_grad: bool
    ) -> tuple[Tensor | fp8.QuantizedTensor, Tensor | None]:
        if _is_transformed():
            raise NotImplementedError("torch.func was asked to transform a layer inside fp8_autocast; expected it outside")
        plain, recorded = self._check_in_fp8(inp, fp8_output)
        weights, biases = self.parts_in_fp8()
        tensors = (inp, self.layer_norm_weight, self.layer_norm_bias, *weights, *biases)
        call, weight = self.begin_in_fp8(
            region, inp, weights, plain.dtype, is_first_microbatch, fp8_grad, torch.is_grad_enabled(), recorded
        )
        if recorded:
            take = self._weight_gradients(is_first_microbatch) if self._hands_on_in_fp8() else None
            return fp8_linear.Projected.apply(call, weight, take, len(weights), *tensors)
        with torch.no_grad():
            y, normalized, _ = fp8_linear.forward(call, weight, *tensors[:3], _joined(biases), False)
            if fp8_output:
                rows, quantizers = fp8_linear.as_rows(y), call.quantizers
                y = quantizers.quantize("output", rows)
            return y, normalized

    def _check_in_fp8(self, inp: Tensor, fp8_output: bool) -> tuple[_Call, bool]:
        """The call without 8 bits, and whether it is recorded."""
        if self.fused is not None:
            raise ValueError(f"fused is {self.fused!r} inside fp8_autocast; expected None")
        if inp.dtype == torch.float64:
            raise TypeError("input is of dtype float64 inside fp8_autocast; expected float16, bfloat16 or float32")
        weights, biases = self.parts_in_fp8()
        plain = _check(
            self.normalization == "LayerNorm", inp, self.layer_norm_weight, self.layer_norm_bias, weights, biases, self.eps,
            None, self.return_layernorm_output, self.zero_centered_gamma, self.save_normalized, None,
            norm._options(None, None, None, self.sm_margin),
        )  # fmt: skip
        tensors = (inp, self.layer_norm_weight, self.layer_norm_bias, *weights, *biases)
        recorded = torch.is_grad_enabled() and autograd._wants_gradient(*tensors)
        if recorded and fp8_output:
            raise ValueError("fp8_output is True where gradients are recorded; expected False, or torch.no_grad()")
        return plain, recorded

    def _hands_on_in_fp8(self) -> bool:
        hands_on = self.fuse_wgrad_accumulation or self.delay_wgrad_compute
        return hands_on and any(each.requires_grad for parts in self.parts_in_fp8() for each in parts)

    def parts_in_fp8(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases that enter the product."""
        return self._weights(), [] if self.return_bias else self._biases()

    def begin_in_fp8(
        self, region: fp8.Region, inp: Tensor, weights: Sequence[Tensor], dtype: torch.dtype, is_first_microbatch: bool | None,
        fp8_grad: bool, records: bool, recorded: bool,
    ) -> tuple[fp8_linear.Call, fp8.QuantizedTensor]:  # fmt: skip
        """What cupynorm.fp8_linear.forward needs. weights: what an operator is given in place of the layer's own, which torch
        may write to behind a graph. records: whether the region's step counts; recorded: whether this call has a backward."""
        self._fp8_group = region.group
        call = self.call_in_fp8(region.recipe, inp, dtype, fp8_grad, records)
        if isinstance(region.recipe, fp8.DelayedScaling) and records:
            region.ended[id(self)] = fp8.UsedScales(self._fp8_states["forward"], region.recipe, region.group)
        return call, self._quantized_weight(weights, call.quantizers, is_first_microbatch, dtype, recorded)

    def call_in_fp8(
        self, recipe: fp8.Recipe, inp: Tensor, dtype: torch.dtype, fp8_grad: bool, records: bool
    ) -> fp8_linear.Call:  # fmt: skip
        """What a call depends on besides its tensors."""
        plain = _Call(
            self.normalization == "LayerNorm", self.eps, self.zero_centered_gamma, dtype, self.return_layernorm_output,
            self.save_normalized, None, norm._options(None, None, None, self.sm_margin),
        )  # fmt: skip
        quantizers = fp8_linear.Quantizers(recipe, fp8_linear.states_of(self._fp8_states, recipe, inp.device, records), records)
        wide = plain._replace(dtype=torch.float32)

        def of_norm(*given, wanted, spends_dy):
            return _Kernels.gradients(plain, *given, None, wanted, spends_dy=spends_dy)[:3]

        return fp8_linear.Call(
            lambda x, norm_weight, norm_bias: _Kernels.normalize(wide, x, None, norm_weight, norm_bias),
            of_norm, plain.centered, plain.eps, plain.zero_centered_weight, plain.options, plain.dtype,
            self.return_layernorm_output, self.save_normalized, quantizers, fp8_grad, self._fp8_group,
        )  # fmt: skip

    def _quantized_weight(
        self, weights: Sequence[Tensor], quantizers: fp8_linear.Quantizers, is_first_microbatch: bool | None,
        dtype: torch.dtype, recorded: bool,
    ) -> fp8.QuantizedTensor:  # fmt: skip
        """is_first_microbatch True: quantised and kept; False: the one that is kept, if the recipe is still the same; None:
        quantised, and not kept."""
        recipe, kept = self._fp8_weight or (None, None)
        if is_first_microbatch is False and recipe == quantizers.recipe and not (recorded and kept.transposed is None):
            return kept
        with torch.no_grad():
            weight = _joined(weights)
            made = quantizers.quantize("weight", weight, transpose=recorded)
            made.dtype = dtype
        if is_first_microbatch is not None:
            self._fp8_weight = quantizers.recipe, made
        return made

    def _returned_bias(self, inp: Tensor, dtype: torch.dtype) -> Tensor:
        biases = self._biases()
        if not biases:
            return inp.new_empty(0, dtype=dtype)
        return torch.cat([each.to(dtype) for each in biases]) if len(biases) > 1 else biases[0].to(dtype)

    def backward_dw(self) -> None:
        """Makes the gradients of weights and biases that the oldest backward left, adds them to .grad (or main_grad),
        runs the hooks.

        Once for each backward, in any number before a step. Does nothing without delay_wgrad_compute. Raises RuntimeError if no
        backward has left anything, or if something has written to what it left: the gradient of y and the normalised tensor (in
        8 bits copies of its own), or, where nothing had made that, the input and the norm's parameters.
        """
        if not self.need_backward_dw():
            return
        if not self._delayed:
            raise RuntimeError(
                "backward_dw() was called and no backward has left a weight gradient; expected one call for each backward"
            )
        with torch.no_grad(), fp8.outside_autocast(self.layer_norm_weight):
            self._delayed.popleft()()
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    def need_backward_dw(self) -> bool:
        """Whether this layer leaves its weight gradients to backward_dw()."""
        return self.delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """hook() runs at the end of each backward_dw()."""
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def extra_repr(self) -> str:
        shown = {
            "eps": 1e-5,
            "bias": True,
            "normalization": "LayerNorm",
            "zero_centered_gamma": False,
            "save_normalized": False,
            "fused": None,
        }
        values = {name: self.use_bias if name == "bias" else getattr(self, name) for name in shown}
        extras = [f"{name}={values[name]!r}" for name, default in shown.items() if values[name] != default]
        return ", ".join([f"in_features={self.in_features}, out_features={self.out_features}", *extras])


def _inside_backward() -> bool:
    """As torch.utils.checkpoint asks it."""
    return torch._C._current_graph_task_id() != -1


def _untraced(method: Callable) -> Callable:
    """A method that keeps Python objects from step to step (scales, what backward hands on): torch.compile runs it as it is."""
    return torch.compiler.disable(method) if _is_compiling() else method


def _initialize(weight: Tensor) -> None:
    torch.nn.init.normal_(weight, 0.0, 0.023)


def _check_features(**given: object) -> None:
    for name, features in given.items():
        if isinstance(features, bool) or not isinstance(features, numbers.Integral):
            raise TypeError(f"{name} is {features!r}; expected an int, 1 or more")
        if features < 1:
            raise ValueError(f"{name} is {features}; expected an int, 1 or more")


def _splits(given: Sequence[str] | Mapping[str, int] | None, out_features: int) -> tuple[list[str], list[int]]:
    """What stands before "weight" in the names of the splits, and their sizes."""
    if given is None:
        return [""], [out_features]
    if not isinstance(given, Sequence | Mapping):
        raise TypeError(f"parameters_split is {given!r}; expected names, or a dict of names and sizes")
    if not given:
        raise ValueError(f"parameters_split is {given!r}; expected at least one name")
    names = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"parameters_split is {given!r}; expected names, or a dict of names and sizes")
    first = [name.rstrip("_") for name in names]
    if len(set(first)) < len(first) or "layer_norm" in first or any("." in name for name in first):
        raise ValueError(
            f"parameters_split is {given!r}; expected names without a dot, which differ in more than underscores at their end, "
            "and none of which is layer_norm, the norm's"
        )
    if isinstance(given, Mapping) and any(
        isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in given.values()
    ):
        raise TypeError(f"parameters_split is {given!r}; expected sizes that are numbers of rows")
    sizes = list(given.values()) if isinstance(given, Mapping) else [out_features // len(names)] * len(names)
    if sum(sizes) != out_features:
        raise ValueError(f"parameters_split has sizes {sizes}, {sum(sizes)} together; expected out_features, {out_features}")
    return [f"{name}_" for name in first], sizes
