"""torch: layer_norm and rms_norm of tensors, on CUDA by the kernels, on the CPU by the reference.

Eager calls of plain tensors are ours: `normalize` runs them, and `_Norm` records them. by_torch.py
computes all others, and the gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..norm import calls
from ..norm.calls import DIFFERENTIABLE, FOR_GRADIENTS, FOR_Y, prepare_backward, prepare_forward
from ..norm.checks import check_differentiable, check_forward, fields_of_forward
from ..norm.prepared import Prepared, keep, repeated
from ..norm.request import (
    Backward,
    BackwardOperands,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    FusedBackward,
    replaced,
)
from . import by_torch
from .modes import (
    arithmetic,
    has_functorch_transforms,
    is_compiling,
    is_faked,
    is_jit_traced,
    num_dispatch_modes,
    present_tracer,
    run_untraced,
    wants_gradient,
)
from .private import is_forward_mode, same_layouts

# Called by these names in each call: an attribute of a module takes longer.
_is_grad_enabled = torch.is_grad_enabled
_is_cuda_autocast = torch.is_autocast_enabled  # with "cuda" as its argument it takes twice the time


def norm(
    centered: bool, normalized_shape: object, tensors: tuple, options: tuple, return_residual: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What layer_norm and rms_norm return. tensors, options: as fields_of_forward takes them."""
    operands, options = fields_of_forward(
        centered, normalized_shape, tensors, options, return_residual
    )
    # A call like the last one of its kind needs no request: making one takes a microsecond.
    results = None
    if not (
        is_compiling()
        or has_functorch_transforms()
        or is_forward_mode()
        or (num_dispatch_modes() and is_faked())
        or is_jit_traced()
    ):
        try:
            known = repeated.get(_key_of(operands, options))
        except (AttributeError, TypeError, RuntimeError):  # the checks say what is wrong
            known = None
        if known is not None:
            prepared, again = known
            results = again(operands[:4])
    if results is None:
        y, added = normalize(ForwardRequest(ForwardOperands(*operands), ForwardOptions(*options)))
    elif prepared.records:
        y, added = _recorded(prepared, operands, results)
    else:
        y, _, _, added = results
    return (y, added) if return_residual else y


def normalize(request: ForwardRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, input + residual), differentiable in input, weight, bias and residual.

    Under torch.autocast of "cuda" a 16-bit input has a float32 y, as torch's own norms, unless
    out_dtype or out is given.
    """
    operands, options = original = request
    if options.out_dtype is None and operands.out is None and _is_cuda_autocast():
        if getattr(operands.input, "is_cuda", False):
            options = replaced(options, out_dtype=arithmetic(operands.input))
            request = ForwardRequest(operands, options)
    compiling = is_compiling()
    if (not compiling and present_tracer()) or (
        compiling and not by_torch.has_texts(operands.functors)
    ):
        # It would trace what reads memory, or a functor without a text of torch.
        return torch.compiler.disable(normalize)(request)
    input, weight, bias, residual, *_ = operands
    own = () if operands.functors is None else operands.functors.arrays()
    tensors = (input, weight, bias, residual)
    if by_torch.is_any_dtensor(*tensors):
        return by_torch.normalize_dtensors(request, normalize)
    if by_torch.takes(*tensors, *own):
        return by_torch.normalize(request)
    outs = operands.out, operands.out_sum
    recorded = _is_grad_enabled() and wants_gradient(*tensors, *own, *outs)
    if recorded and operands.functors is not None:
        check_differentiable(operands.functors)
    prepared, operands = prepare_forward(request, FOR_GRADIENTS if recorded else FOR_Y)
    key = _key_of(*original)
    if key is not None and is_repeatable(prepared.on_gpu, operands):
        keep(repeated, key, (prepared, forward_again(prepared.on_gpu, operands)))
    results = prepared.run(operands)
    return _recorded(prepared, operands, results) if recorded else (results[0], results[3])


def _recorded(prepared: Any, operands: tuple, results: tuple) -> tuple:
    """y and the sum of what a prepared forward has made, with their derivatives."""
    y, mean, rstd, added = results
    tensors = prepared.read_differentiable(operands)
    if prepared.is_plain:
        # Backward needs no row but the normalised one: the input, or the sum that is returned.
        saved = added, mean, rstd, operands[1]
        if prepared.makes_sum:
            return _apply((prepared, None, saved, (y, added)), *tensors)
        return _apply((prepared, None, saved, y), *tensors), added
    input, weight, bias, *_, functors = operands
    own, keeps_y = () if functors is None else functors.arrays(), prepared.options.memory_efficient
    in_8_bits = prepared.options.quantization is not None
    load = () if functors is None else functors.load
    reads_input = prepared.makes_sum and any(each.functor.reads_argument for each in load)
    saved = (
        *((y, None) if keeps_y else (added, mean)),
        rstd,
        weight,
        bias if keeps_y or functors is not None else None,
        input if reads_input else None,
        *own,
    )
    # 8-bit floats take no gradient: a tensor of y's shape without its memory takes it.
    carrier = added.new_empty(1).expand(added.shape) if in_8_bits else y
    outputs = prepared.pick_outputs((carrier, mean, rstd, added))
    outputs = _apply((prepared, functors, saved, outputs), *tensors, *own)
    carrier, added = prepared.split_outputs(outputs)
    if in_8_bits:
        y.attach(partial(_PassingGradients.apply, carrier))
    return y if in_8_bits else carrier, operands[0] if added is None else added


def _key_of(operands: tuple, options: tuple) -> tuple | None:
    """What a forward's prepared call depends on besides the layouts of its input, weight, bias and
    residual. None if it depends on more."""
    input, weight, bias, residual, out, out_sum, scale, amax, own = operands
    _, _, eps, _, _, _, quantization, *_ = options
    has_no_more = out is out_sum is scale is amax is own is None
    if not has_no_more or quantization is not None:
        return None
    return (
        options,
        eps.__class__,  # True equals 1.0 and is refused
        weight is None,
        bias is None,
        residual is None,
        _is_grad_enabled(),
        _is_cuda_autocast(),  # decides the dtype of y
        input.numel(),  # so that calls with rows of other numbers keep their own
    )


def names_of(names, wanted) -> tuple[str, ...]:
    """The names of what is wanted."""
    return tuple(name for name, is_wanted in zip(names, wanted) if is_wanted)


def is_recorded_by_jit() -> bool:
    """Whether torch.jit.trace records what runs now."""
    return not is_compiling() and is_jit_traced() is not None


def forward_of_meta(request: ForwardRequest) -> tuple:
    """y, mean, rstd and the sum of meta tensors: shapes and dtypes without memory."""
    request = check_forward(request)
    y, added = by_torch.normalize(request)
    leading = added.shape[: added.ndim - len(request.options.extents)]
    rstd = added.new_empty(leading, dtype=arithmetic(added))
    return y, rstd.clone() if request.options.centered else None, rstd, added


# Calls like one before. torch compares the layouts of all tensors in one call; a key of them, as
# norm/calls.py makes it, takes six calls for each tensor. Every line runs in each call, and in
# backward on a thread whose caches are cold.


def _launching(launches: Prepared, order: tuple[str, ...]) -> Callable[..., None]:
    """A function that launches a prepared call; it takes the tensors' addresses, 0 if absent."""
    arguments = launches.call.arguments_of(order)
    constants, sums, stream = arguments.constants, arguments.sums, launches.library.stream
    steps = [(each.enqueue, pick) for (each, _), pick in zip(launches.steps, arguments.picks)]

    def launch(*addresses: int) -> None:
        words = addresses + constants
        if sums:
            words += tuple([addresses[at] + offset for at, offset in sums])
        current = stream()
        for enqueue, pick in steps:
            enqueue(current, pick(words))

    return launch


def forward_again(
    launches: Prepared, operands: tuple, given: tuple = (), count: list[int] | None = None
) -> Callable[..., tuple | None]:
    """What runs a forward like one before, which is_repeatable: the fields of a Forward.

    Its arguments: (input, weight, bias, residual), and what is equal to given. Which of them are
    None never changes. It returns None where what is given or a layout differs, or an address is no
    multiple of 16. operands: those of the first. count: of such runs.
    """
    read, index = launches.read, launches.device_index
    are_same = same_layouts(read(operands))
    order = "x", "weight", "bias", "residual", "y", "mean", "rstd", "sum"
    new_y, new_mean, new_rstd, new_sum = map(launches.new.get, order[4:])
    launch, exchange_device = _launching(launches, order), launches.library.exchange_device
    count = [0] if count is None else count

    def again(operands, *rest):
        if rest != given or not are_same(*read(operands)):
            return None
        x, weight, bias, residual = operands
        of_x, of_mean, of_rstd, of_sum, added = x.data_ptr(), 0, 0, 0, x
        of_weight = 0 if weight is None else weight.data_ptr()
        of_bias = 0 if bias is None else bias.data_ptr()
        of_residual = 0 if residual is None else residual.data_ptr()
        if (of_x | of_weight | of_bias | of_residual) & 15:
            return None
        former = exchange_device(index)
        try:
            y, mean, rstd = new_y(), None, None
            if new_mean is not None:
                of_mean = (mean := new_mean()).data_ptr()
            if new_rstd is not None:
                of_rstd = (rstd := new_rstd()).data_ptr()
            if new_sum is not None:
                of_sum = (added := new_sum()).data_ptr()
            of_read = of_x, of_weight, of_bias, of_residual
            launch(*of_read, y.data_ptr(), of_mean, of_rstd, of_sum)
        finally:
            if former != index:
                exchange_device(former)
        count[0] += 1
        return y, mean, rstd, added

    return again


def backward_again(
    launches: Prepared, operands: tuple, given: tuple = (), count: list[int] | None = None
) -> Callable[..., tuple | None]:
    """As forward_again, of a backward: dx, dweight and dbias. Its first argument: (dy, x, mean,
    rstd, weight, dsum)."""
    read, index = launches.read, launches.device_index
    are_same = same_layouts(read(operands))
    order = "dy", "x", "mean", "rstd", "weight", "dsum", "dx", "dweight", "dbias", "partials"
    new_dx, new_dweight, new_dbias, new_partials = map(launches.new.get, order[6:])
    launch, exchange_device = _launching(launches, order), launches.library.exchange_device
    count = [0] if count is None else count

    def again(operands, *rest):
        if rest != given or not are_same(*read(operands)):
            return None
        dy, x, mean, rstd, weight, dsum = operands
        of_dy, of_x, of_rstd = dy.data_ptr(), x.data_ptr(), rstd.data_ptr()
        of_mean = 0 if mean is None else mean.data_ptr()
        of_weight = 0 if weight is None else weight.data_ptr()
        of_dsum = 0 if dsum is None else dsum.data_ptr()
        if (of_dy | of_x | of_rstd | of_mean | of_weight | of_dsum) & 15:
            return None
        former = exchange_device(index)
        dx = dweight = dbias = None
        of_dx = of_dweight = of_dbias = of_partials = 0
        try:
            if new_dx is not None:
                of_dx = (dx := new_dx()).data_ptr()
            if new_dweight is not None:
                of_dweight = (dweight := new_dweight()).data_ptr()
            if new_dbias is not None:
                of_dbias = (dbias := new_dbias()).data_ptr()
            if new_partials is not None:
                partials = new_partials()  # lives until the kernels are enqueued
                of_partials = partials.data_ptr()
            of_read = of_dy, of_x, of_mean, of_rstd, of_weight, of_dsum
            launch(*of_read, of_dx, of_dweight, of_dbias, of_partials)
        finally:
            if former != index:
                exchange_device(former)
        count[0] += 1
        return dx, dweight, dbias

    return again


def is_repeatable(launches: Prepared | None, operands: tuple) -> bool:
    """Whether a call only allocates and launches, and reads tensors aligned to 16 bytes."""
    if launches is None or not launches.is_simple():
        return False
    tensors = launches.read(operands)
    if any(each is None or each.data_ptr() & 15 for each in tensors):
        return False
    return same_layouts(tensors)(*tensors)  # False if one is given twice


# Eager.


class _Norm(torch.autograd.Function):
    """Records what a forward has made. Arrays of functors have gradients too.

    Inputs and outputs are the tensors that there are: each one costs host time.
    """

    @staticmethod
    def forward(ctx, call, *tensors):
        """call: a prepared forward, its functors, what is saved, and y alone or y and the sum."""
        ctx.prepared, ctx.functors, saved, outputs = call
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, dy, dsum=None):
        """None for the call, and the gradient of each tensor that was recorded."""
        prepared, of_own = ctx.prepared, ()
        if dy is None and (dsum is None or prepared.is_plain):
            dx, dweight, dbias, dresidual = dsum, None, None, dsum
            of_own = (None,) * (0 if ctx.functors is None else len(ctx.functors.arrays()))
        elif not prepared.is_plain:
            (dx, dweight, dbias, dresidual), of_own = _gradients_with_options(ctx, dy, dsum)
        elif by_torch.is_differentiated(dy):
            (dx, dweight, dbias, dresidual), _ = _differentiable(ctx, dy, dsum)
        else:
            dx, dweight, dbias = _gradients(ctx, (dy, *ctx.saved_tensors, dsum))
            dresidual = dx
        # Autograd drops the gradients of tensors that want none.
        gradients = prepared.pick_gradients((dx, dweight, dbias, dresidual, None))
        return (*gradients, *of_own) if of_own else gradients


# _Norm.apply without its work for functorch's transforms (vmap, grad, jvp): a third of its time.
_apply = super(torch.autograd.Function, _Norm).apply


def _gradients(ctx, operands: tuple) -> tuple:
    """dx, dweight, dbias: those that ctx needs. operands: the first of BackwardOperands."""
    forward = ctx.prepared
    key = ctx.needs_input_grad, operands[5] is None
    known = forward.backwards.get(key)
    # What was saved may have another layout now: torch lets hooks pack and unpack it.
    if known is not None and (results := known(operands)) is not None:
        return results
    request = BackwardRequest(BackwardOperands(*operands), _with_wanted(ctx))
    prepared, checked = prepare_backward(request)
    if isinstance(prepared, Prepared) and is_repeatable(prepared, checked):
        forward.backwards[key] = backward_again(prepared, checked)
    return prepared.run(checked)[:3]


def _with_wanted(ctx):
    wants_input, wants_weight, wants_bias, wants_residual = _wanted(ctx)
    wanted = (wants_input or wants_residual, wants_weight, wants_bias)
    gradients = names_of(Backward._fields, wanted)
    return ctx.prepared.backward._replace(gradients=gradients)


def _wanted(ctx) -> tuple[bool, ...]:
    """Whether each of DIFFERENTIABLE needs its gradient."""
    wants = dict(zip(ctx.prepared.differentiable, ctx.needs_input_grad[1:]))
    return tuple(wants.get(name, False) for name in DIFFERENTIABLE)


def _gradients_with_options(ctx, dy, dsum) -> tuple:
    """The gradients of DIFFERENTIABLE, and those of the functors' arrays and seeds."""
    options, functors = ctx.prepared.options, ctx.functors
    keeps_y = options.memory_efficient
    # Compiled autograd traces what runs now.
    is_ours = keeps_y or not by_torch.has_texts(functors)
    runs_untraced = is_ours and bool(is_compiling() or present_tracer())
    if by_torch.is_differentiated(dsum if dy is None else dy) and not runs_untraced:
        return _differentiable(ctx, dy, dsum)
    if keeps_y:
        run = run_untraced(_gradients_from_y) if runs_untraced else _gradients_from_y
        return run(ctx, dy, dsum), ()
    x, mean, rstd, weight, bias, input, *own = ctx.saved_tensors
    names, wanted_own = names_of(FusedBackward._fields, _wanted(ctx)), ()
    if functors is not None:
        functors = functors.with_arrays(own)
        wanted_own = names_of(functors.names(), ctx.needs_input_grad[-len(own) :] if own else ())
        names = names if "dx" in names else ("dx", *names)
    dy = torch.zeros_like(x) if dy is None else dy
    operands = BackwardOperands(dy, x, mean, rstd, weight, dsum, bias, input, functors)
    wanted = ctx.prepared.backward._replace(gradients=names, functor_gradients=wanted_own)
    run = run_untraced(calls.backward) if runs_untraced else calls.backward
    made = run(BackwardRequest(operands, wanted))
    found = dict(zip(wanted_own, made.functors))
    return made[:4], () if functors is None else map(found.get, functors.names())


def _gradients_from_y(ctx, dy, dsum) -> tuple:
    """The four gradients of a norm that kept y, from x_hat = (y - bias) / weight.

    x_hat is a row whose mean is 0 and whose rstd is 1. Its dx times rstd is that of the sum.
    """
    y, _, rstd, weight, bias, _ = ctx.saved_tensors
    options, backward, wide = ctx.prepared.options, ctx.prepared.backward, rstd.dtype
    x_hat = y.to(wide) if bias is None else y.to(wide) - bias.to(wide)
    if weight is not None:
        divisor = weight.to(wide) + bool(options.zero_centered_weight)
        least = torch.finfo(y.dtype).eps / 2  # of a smaller weight y holds no digit of x_hat
        divisor = divisor.where(
            divisor >= least, divisor.clamp(max=-least).where(divisor < 0, least)
        )
        x_hat = x_hat / divisor
    mean = torch.zeros_like(rstd) if options.centered else None
    dy = torch.zeros_like(y) if dy is None else dy
    operands = BackwardOperands(dy, x_hat, mean, torch.ones_like(rstd), weight)
    changes = {"dx_dtype": str(wide).removeprefix("torch."), "dresidual_dtype": None}
    request = BackwardRequest(operands, _with_wanted(ctx)._replace(**changes))
    total, dweight, dbias, *_ = calls.backward(request)
    if total is None:
        return None, dweight, dbias, None
    total = total * rstd[(..., *(None,) * len(options.extents))]
    total = total if dsum is None else total + dsum
    dx = total.to(getattr(torch, backward.dx_dtype))
    dresidual = backward.dresidual_dtype and total.to(getattr(torch, backward.dresidual_dtype))
    return dx, dweight, dbias, dresidual


def _differentiable(ctx, dy, dsum) -> tuple:
    """As _gradients_with_options, by torch."""
    options, functors, makes_sum = ctx.prepared.options, ctx.functors, ctx.prepared.makes_sum
    for given, is_given, expected in (
        ("memory_efficient", options.memory_efficient, "memory_efficient=False"),
        ("a functor without torch=", not by_torch.has_texts(functors), "functors with it"),
    ):
        if is_given:
            raise NotImplementedError(
                f"a gradient of a norm with {given} was asked for with create_graph=True or in a "
                f"batch; expected {expected}"
            )
    saved = ctx.saved_tensors + (None, None) * ctx.prepared.is_plain
    with torch.enable_grad():  # a tensor that comes twice has a gradient in each place
        x, _, _, weight, bias, input, *own = (
            each if each is None else each.view_as(each) for each in saved
        )
    load, inner = (), functors
    if functors is not None:
        inner = functors = functors.with_arrays(own)
        if makes_sum:
            load, inner = functors.load, functors._replace(load=())
    dtype = x.dtype if options.quantization else getattr(torch, options.out_dtype)
    total, dweight, dbias, *of_own = by_torch.pull_back(
        lambda: [
            by_torch.normalized_through(x, weight, bias, options, dtype, inner, differentiably=True)
        ],
        [dy],
        (x, weight, bias, *own),
    )
    wanted = _wanted(ctx)
    if functors is None and dy is not None and wanted[2]:  # then no bias was saved
        dbias = dy.to(arithmetic(dy)).sum_to_size(options.extents)
    if dsum is not None:
        total = dsum if total is None else total + dsum
    dx = total
    if load and total is not None:
        # No derivative depends on an input that was not saved.
        input = x.detach() if input is None else input
        with torch.enable_grad():
            argument = input if input.requires_grad else input.detach().requires_grad_()
        dx, *of_load = by_torch.pull_back(
            lambda: [by_torch.through(load, argument, len(options.extents))],
            [total],
            (argument, *own),
        )
        of_own = [one if other is None else other for one, other in zip(of_own, of_load)]
    gradients = dx, dweight, dbias, total
    return [each if is_wanted else None for each, is_wanted in zip(gradients, wanted)], of_own


class _PassingGradients(torch.autograd.Function):
    """values, whose gradient is that of the tensor that stands for an 8-bit y."""

    @staticmethod
    def forward(ctx, carrier, values):
        ctx.dtype = carrier.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx, dy):
        return dy.to(ctx.dtype), None
