"""Forwards and backwards: found by a key, or checked and prepared for a GPU or the host.

Two calls whose arrays have the same dtypes, shapes, strides and alignment, and whose options are
equal, share one prepared call. It is found by one dictionary lookup.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any

from ..dispatch.dispatch import choose
from ..dispatch.problem import Layout, Problem
from ..dtypes import compute_dtype
from ..gpu import arrays, launch
from .arguments import (
    backward_call,
    forward_call,
    layouts_of,
    parameter_of,
    place_all,
    rows_of,
    summed,
)
from .checks import (
    check_backward,
    check_forward,
    check_out,
    check_overlap,
    dtype_or_none,
    share_an_address,
    with_seeds,
)
from .host import HostBackward, HostForward
from .prepared import Prepared, backwards, forwards, keep, reader
from .quantized import arranged, as_quantized_tensor, quantize, scale_memory, scale_shape
from .request import (
    BackwardOperands,
    BackwardOptions,
    BackwardRequest,
    Forward,
    ForwardOperands,
    ForwardRequest,
    Gradients,
    is_plain,
    of_backward,
    warn_on_host,
)

# What a forward is for.
FOR_Y = "y"
FOR_STATISTICS = "statistics"  # y, mean and rstd
FOR_GRADIENTS = "gradients"  # the same, where autograd records the call
FOR_ATEN = "aten"  # the same, as aten's operators return them: statistics have the input's rank

# The operands of a forward that have gradients.
DIFFERENTIABLE = ("input", "weight", "bias", "residual")


def forward(request: ForwardRequest, purpose: str = FOR_STATISTICS) -> Forward:
    """y, statistics and sum, outside any autograd."""
    prepared, operands = prepare_forward(request, purpose)
    return Forward(*prepared.run(operands))


def backward(request: BackwardRequest) -> Gradients:
    """The gradients of one output, outside any autograd."""
    prepared, operands = prepare_backward(request)
    return Gradients(*prepared.run(operands))


# Keys.


def _key(operands: tuple, *rest: object) -> tuple:
    """All that a prepared call depends on. operands: of a forward or backward, functors last.

    The numbers of functors count as text: 0.0 equals -0.0, and NaN no NaN. Raises AttributeError,
    TypeError or RuntimeError for arrays of several libraries, none at all, or sparse ones.
    """
    *given, functors = operands
    layout_key = arrays.library(given[0]).layout_key
    key = (*rest, *[None if each is None else layout_key(each) for each in given])
    if functors is None:
        return key
    parts = [(each.functor, str(each.numbers)) for each in functors.parts()]
    return *key, *parts, *map(layout_key, functors.arrays())


# Forward.


class PreparedForward:
    """A checked forward with what computes it, and what its gradients depend on besides arrays.

    run: takes operands like those for which it was prepared, and returns the fields of a Forward.
    on_gpu: what a GPU runs; None on the host. records: whether autograd records the call.
    backward: the options of its backward, which selects its own gradients. backwards: backwards
    that autograd prepared. sum_dtype: of what is normalised.
    """

    def __init__(self, request: ForwardRequest, purpose: str) -> None:
        """purpose: what is wanted, one of the names above."""
        operands, options = request
        self.options, self.records = options, purpose is FOR_GRADIENTS
        self.dtype = arrays.dtype_name(operands.input)
        load = () if operands.functors is None else operands.functors.load
        # What functors on x make alone is a sum where it is stored.
        stores_sum = purpose is FOR_STATISTICS and bool(load)
        self.makes_sum = operands.residual is not None or stores_sum
        self.sum_dtype = dtype_or_none(operands.residual) or self.dtype
        self.is_plain = self.sum_dtype == self.dtype and is_plain(request)
        self.backward = BackwardOptions(
            options.centered,
            options.extents,
            bool(options.zero_centered_weight),
            dx_dtype=None if self.is_plain else self.dtype,
            dbias_dtype=dtype_or_none(operands.bias),
            dresidual_dtype=None if self.is_plain else dtype_or_none(operands.residual),
            applies_load=bool(load) and not self.makes_sum,
            launch=of_backward(options.launch),
        )
        self.backwards: dict[tuple, object] = {}
        # What autograd records.
        self.differentiable = tuple(
            name for name in DIFFERENTIABLE if getattr(operands, name) is not None
        )
        self.read_differentiable = reader(operands._fields, self.differentiable)
        # From gradients in the order of DIFFERENTIABLE, and None.
        self.pick_gradients = itemgetter(-1, *map(DIFFERENTIABLE.index, self.differentiable))
        # From a Forward, what autograd returns: y, or a tuple where there is more.
        outputs = ["y", *["sum"] * self.makes_sum]
        self.pick_outputs = itemgetter(*map(Forward._fields.index, outputs))
        self.on_gpu = self.plan = None
        if arrays.on_host(operands.input):
            self.run = HostForward(request, self.sum_dtype, self.makes_sum).run
        else:
            self.on_gpu = _forward_on_gpu(request, self.sum_dtype, self.makes_sum, purpose)
            self.run, self.plan = self.on_gpu.run, self.on_gpu.plan

    def split_outputs(self, outputs: Any) -> tuple:
        """(y, sum) of what pick_outputs picked, or of the gradients of that."""
        if self.makes_sum:
            return outputs
        return (outputs[0] if outputs.__class__ is tuple else outputs), None


def prepare_forward(
    request: ForwardRequest, purpose: str = FOR_STATISTICS
) -> tuple[PreparedForward, ForwardOperands]:
    """Checks everything, or finds what was checked before: an object whose `run` takes the operands
    that are returned beside it. Nothing is allocated or launched.

    An eps of True equals 1.0 and is refused, so its class counts. Other equal values mean the same.
    """
    operands, options = request
    has_out = operands.out is not None or operands.out_sum is not None
    try:
        if operands.functors is not None:
            functors = with_seeds(operands.functors, operands.input)
            operands = operands._replace(functors=functors)
        key = _key(operands, options, options.eps.__class__, purpose)
        if options.quantization is not None:
            scale, amax = operands.scale, operands.amax
            constants = [getattr(each, "requires_grad", False) for each in (scale, amax)]
            key += (*constants, share_an_address(scale, amax))
        prepared = forwards.get(key)
    except (AttributeError, TypeError, RuntimeError):  # the checks say what is wrong
        key = prepared = None
    if prepared is None:
        checked = check_forward(ForwardRequest(operands, options))
        operands = checked.operands
        _check_addresses(operands)
        check_out(checked)
        if purpose is FOR_GRADIENTS:
            if has_out:
                raise ValueError(
                    "out was given for tensors that require gradients; "
                    "expected out=None, or torch.no_grad()"
                )
            _check_backward_strategy(checked)
        if arrays.on_host(operands.input):
            warn_on_host(options.launch)
        prepared = PreparedForward(checked, purpose)
        keep(forwards, key, prepared)
    if has_out:
        check_overlap(operands)
        for each in (operands.out, operands.out_sum):
            arrays.mark_written(each)
    return prepared, operands


def _check_addresses(operands: ForwardOperands | BackwardOperands) -> None:
    there = {name: array for name, array in operands._asdict().items() if array is not None}
    functors = there.pop("functors", None)
    if functors is not None:
        there |= zip(functors.names(), functors.arrays())
    arrays.check_addresses(**there)


def _check_backward_strategy(request: ForwardRequest) -> None:
    """Raises ValueError now if a strategy forced on a differentiable forward does not fit its
    backward."""
    operands, options = request
    x = operands.input
    if options.launch is None or options.launch.strategy is None or arrays.on_host(x):
        return
    num_cols = arrays.product(options.extents)
    sum_dtype = dtype_or_none(operands.residual) or dtype_or_none(x)
    y_dtype = sum_dtype if options.quantization else options.out_dtype
    problem = Problem(
        "backward",
        options.centered,
        num_cols,
        sum_dtype,
        dy=y_dtype,
        dx=dtype_or_none(x),
        weight=dtype_or_none(operands.weight),
        dweight=dtype_or_none(operands.weight),
        dbias=dtype_or_none(operands.bias),
        layout=Layout.of_new_arrays(num_cols),
    )
    choose(problem, launch.device(arrays.view(x).device), options.launch.strategy)


def _forward_on_gpu(
    request: ForwardRequest, sum_dtype: str, makes_sum: bool, purpose: str
) -> Prepared:
    operands, options = request
    x, how, functors = operands.input, options.quantization, operands.functors
    shape, num_dims = tuple(x.shape), len(options.extents)
    leading = shape[: len(shape) - num_dims]
    names = [name for name, array in zip(operands._fields, operands) if array is not None]
    read = ("input", "weight", "bias", "residual", "scale")
    layouts = layouts_of(operands, read, ("input", "residual"), num_dims)
    placed, own_copied = place_all(functors, x, num_dims)
    # Named as the kernel's. What is written is never copied.
    in_kernel = {"input": "x", "out": "y", "out_sum": "sum"}
    copied = {
        in_kernel.get(name, name): name in layouts and layouts[name][1]
        for name in names
        if name != "functors"
    }
    if functors is not None:
        copied |= zip(functors.names(), own_copied)
    tensors = {
        in_kernel.get(name, name): rows for name, (rows, _) in layouts.items() if name != "scale"
    }
    made = {}
    for name, dtype, out in (
        ("y", options.out_dtype, operands.out),
        ("sum", sum_dtype if makes_sum else None, operands.out_sum),
    ):
        if dtype and out is None:
            made[name] = shape, dtype
            tensors[name] = arrays.contiguous_rows(shape, num_dims, dtype)
        elif dtype:
            tensors[name] = rows_of(out, num_dims)[0]
    if operands.amax is not None:
        tensors["amax"] = parameter_of(operands.amax)[0]
    wants_statistics = purpose is not FOR_Y
    kind = "forward" if wants_statistics else "inference"
    device = launch.device(arrays.view(x).device)
    call = forward_call(device, tensors, options, kind, placed)
    finish = None
    if operands.out_sum is not None and call.plan.strategy == "uncached":
        # It reads the residual again after it has written the sum: a run copies the sum.
        copied = {"out_sum" if name == "sum" else name: copies for name, copies in copied.items()}
        made["sum"] = shape, sum_dtype
        tensors["sum"] = arrays.contiguous_rows(shape, num_dims, sum_dtype)
        call = forward_call(device, tensors, options, kind, placed)

        def finish(operands: ForwardOperands, tensors: dict, results: tuple) -> tuple:
            operands.out_sum[...] = tensors["sum"]
            return (*results[:3], operands.out_sum)

    if wants_statistics:
        of_rows = leading + (1,) * (num_dims if purpose is FOR_ATEN else 0)
        compute = compute_dtype(sum_dtype).name
        made["rstd"] = of_rows, compute
        if options.centered:
            made["mean"] = of_rows, compute
    fills = {}
    if not call.launches:  # no rows, or rows without columns, which have no statistics
        fills = {name: math.nan for name in ("mean", "rstd") if name in made}
    if how is not None:
        num_rows, num_cols = tensors["x"].num_rows, tensors["x"].num_cols
        made["scale_inv"] = scale_memory(how, leading, num_cols)
        if len(call.launches) > 1:  # what the first launch hands to the second
            made["amax"] = scale_shape(how.scaling, leading, num_cols), "float32"
            fills["amax"] = 0.0

        def finish(operands: ForwardOperands, tensors: dict, results: tuple) -> tuple:
            data, scale_inv, transposed = results[0], tensors["scale_inv"], None
            if not call.launches:
                given = 1.0 if operands.scale is None else operands.scale
                scale_inv[...] = given if how.divides else 1.0 / given
            if how.transpose:
                matrix = data.reshape(num_rows, num_cols)
                transposed = quantize(matrix, how.dtype, wants_data=False, transpose=True)
                transposed = transposed.transposed
            scale_inv = arranged(scale_inv, how, leading)
            y = as_quantized_tensor(how, data, scale_inv, transposed, operands.input, num_cols)
            return (y, *results[1:])

    returns = ("y", "mean", "rstd", "sum" if makes_sum else "given")
    return Prepared(
        x,
        reader(operands._fields, names),
        copied,
        made,
        call,
        returns[:3] if purpose is FOR_ATEN else returns,
        fills=fills,
        finish=finish,
    )


# Backward.


def prepare_backward(request: BackwardRequest) -> tuple[Prepared | HostBackward, BackwardOperands]:
    """Checks everything, or finds what was checked before, as prepare_forward."""
    operands, options = request
    try:
        key = _key(operands, options)
        prepared = backwards.get(key)
    except (AttributeError, TypeError, RuntimeError):
        key = prepared = None
    if prepared is None:
        checked = check_backward(request)
        operands = checked.operands
        _check_addresses(operands)
        if arrays.on_host(operands.x):
            warn_on_host(options.launch)
            prepared = HostBackward(checked)
        else:
            prepared = _backward_on_gpu(checked)
        keep(backwards, key, prepared)
    return prepared, operands


def _backward_on_gpu(request: BackwardRequest) -> Prepared:
    operands, options = request
    functors, extents, shape = operands.functors, options.extents, tuple(operands.x.shape)
    # dx and dresidual are one tensor where they would be the same. Where only dresidual is wanted,
    # the kernel writes it as dx.
    dx, dresidual = options.dx_dtype, options.dresidual_dtype
    is_one = dx == dresidual and not (functors is not None and functors.load)
    outputs = {
        "dx": (shape, dx or dresidual),
        "dweight": (extents, options.dweight_dtype),
        "dbias": (extents, options.dbias_dtype),
        "dresidual": (shape, None if dx is None or is_one else dresidual),
        "y": (shape, arrays.dtype_name(operands.dy) if options.recompute else None),
    }
    names = [name for name, array in zip(operands._fields, operands) if array is not None]
    if not (dx or dresidual) and "dsum" in names:  # it has nothing to be added to
        names.remove("dsum")
    read = [name for name in names if name != "functors"]
    layouts = layouts_of(operands, read, ("dy", "x", "dsum", "input"), len(extents))
    placed, own_copied = place_all(functors, operands.x, len(extents), options.functor_gradients)
    copied = {name: layouts[name][1] for name in read}
    if functors is not None:
        copied |= zip(functors.names(), own_copied)
    # Statistics do not decide a plan.
    tensors = {name: layouts[name][0] for name in read if name not in ("mean", "rstd")}
    for name, (own_shape, dtype) in outputs.items():
        if dtype:  # a new array is aligned
            tensors[name] = arrays.contiguous_rows(own_shape, len(extents), dtype)
    compute, device = arrays.dtype_name(operands.rstd), arrays.view(operands.x).device
    call = backward_call(launch.device(device), tensors, options, compute, placed)
    outputs |= {name: (shape, dtype) for name, dtype in placed.gradients().items()}
    made = {name: (own_shape, dtype) for name, (own_shape, dtype) in outputs.items() if dtype}
    wants_any = bool(made)
    if call.partials_shape:
        made["partials"] = call.partials_shape, call.plan.problem.compute
    of_x = "dx"
    if options.overwrite_dy and call.can_write_over_dy:
        del made["dx"]
        of_x, call = "dy", call.over_dy()
    fills = {}
    if not (wants_any and call.launches):  # no rows or no columns: sums of nothing
        fills = {name: 0.0 for name in ("dweight", "dbias") if name in made}
    # Where a run has the gradients of the functors' arrays, before they are summed.
    of_functors = [
        (name.replace(".", ".d", 1), tuple(array.shape), per_row, array.dtype)
        for name, array, per_row in (functors.named_arrays() if functors else ())
        if name in options.functor_gradients
    ]

    def finish(operands: BackwardOperands, tensors: dict, results: tuple) -> tuple:
        own = []
        for name, own_shape, per_row, dtype in of_functors:
            gradient = summed(tensors[name], own_shape, per_row)
            is_torch = arrays.is_torch(gradient)
            own.append(gradient.to(dtype) if is_torch else gradient.astype(dtype, copy=False))
        return (*results, tuple(own))

    of_residual = "dresidual" if "dresidual" in made else dresidual and of_x
    returns = (of_x if dx else None, "dweight", "dbias", of_residual, "y")
    prepared = Prepared(
        operands.x,
        reader(operands._fields, names),
        copied,
        made,
        call if wants_any else None,
        returns,
        fills=fills,
        finish=finish if of_functors else None,
    )
    prepared.plan = call.plan
    return prepared
