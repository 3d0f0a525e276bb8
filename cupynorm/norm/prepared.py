"""Prepared calls: what is checked, planned and compiled once, and then only allocated and launched.

Two calls whose arrays have the same dtypes, shapes, strides and alignment, and whose options are
equal, share one prepared call. It is found by one dictionary lookup.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..dtypes import compute_dtype
from ..gpu import arrays, launch
from ..gpu.arrays import Rows
from ..plan.dispatch import choose
from ..plan.problem import Layout, Problem
from . import host
from .arguments import backward_call, forward_call
from .cache import backwards, forwards, keep
from .checked_forward import CheckedForward, dtype_or_none
from .checks import check_backward, check_forward, check_out, check_overlap, share_an_address
from .functors import PlacedFunctors, key_of, summed, with_seeds
from .launch_choice import warn_on_host
from .on_gpu import OnGpu, TensorOrder, allocator, fill, layouts_of, parameter_of, rows_of
from .quantize import quantize
from .quantized_tensor import arranged, as_quantized_tensor, scale_memory, scale_shape
from .request import (
    Array,
    BackwardOperands,
    BackwardRequest,
    ForwardOperands,
    ForwardRequest,
)

# What a forward is for.
FOR_Y = "y"
FOR_STATISTICS = "statistics"  # y, mean and rstd
FOR_GRADIENTS = "gradients"  # the same, where autograd records the call

# Forward.

_READ_FORWARD = ("input", "weight", "bias", "residual")


def prepare_forward(
    request: ForwardRequest, purpose: str = FOR_STATISTICS
) -> tuple[PreparedForward | host.HostForward, ForwardOperands]:
    """Checks everything, or finds what was checked before: an object whose `run` takes the operands
    that are returned beside it. Nothing is allocated or launched.

    The key is everything that a prepared forward depends on. An eps of True equals 1.0 and is
    refused, so its class counts. Other equal values mean the same.
    """
    operands, options = request
    input, weight, bias, residual, out, out_sum, scale, amax, functors = operands
    layout_key = arrays.library(input).layout_key
    try:
        key = (
            layout_key(input),
            None if weight is None else layout_key(weight),
            None if bias is None else layout_key(bias),
            None if residual is None else layout_key(residual),
            None if out is None else layout_key(out),
            None if out_sum is None else layout_key(out_sum),
            options,
            options.eps.__class__,
            purpose,
        )
        if options.quantization is not None:
            constants = (
                (layout_key(each), getattr(each, "requires_grad", False)) for each in (scale, amax)
            )
            key += (*constants, share_an_address(scale, amax))
        if functors is not None:
            functors = with_seeds(functors, input)
            operands = operands._replace(functors=functors)
            key += key_of(functors, layout_key)
        prepared = forwards.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Arrays of several libraries, none at all, or sparse ones: the checks say so.
        key = prepared = None
    if prepared is None:
        checked = check_forward(ForwardRequest(operands, options))
        operands = checked.operands
        _check_addresses(operands)
        check_out(checked)
        if purpose is FOR_GRADIENTS:
            if out is not None or out_sum is not None:
                raise ValueError(
                    "out was given for tensors that require gradients; "
                    "expected out=None, or torch.no_grad()"
                )
            _check_backward_strategy(checked)
        if arrays.on_host(operands.input):
            warn_on_host(options.launch)
            prepared = host.HostForward(checked, purpose is FOR_STATISTICS)
        else:
            prepared = PreparedForward(checked, purpose)
            keep(forwards, key, prepared)
    if out is not None or out_sum is not None:
        check_overlap(operands)
        for each in (out, out_sum):
            arrays.mark_written(each)
    return prepared, operands


def _check_addresses(operands: ForwardOperands | BackwardOperands) -> None:
    there = {name: array for name, array in operands._asdict().items() if array is not None}
    functors = there.pop("functors", None)
    for name, array in there.items():
        arrays.check_addresses(**{name: array})
    if functors is not None:
        arrays.check_addresses(**dict(zip(functors.names(), functors.arrays())))


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


class PreparedForward(CheckedForward, OnGpu):
    """A forward that is planned and compiled.

    records: whether autograd records it. scale_inv, zeroed: places among a run's tensors, or None:
    of the inverse scales of an 8-bit y; of amaxes, which are zeroed before the launch that raises
    them.
    """

    def __init__(self, request: ForwardRequest, purpose: str) -> None:
        """purpose: what is wanted, one of FOR_Y, FOR_STATISTICS and FOR_GRADIENTS."""
        operands, options = request
        CheckedForward.__init__(self, request, purpose is FOR_STATISTICS)
        self.records = purpose is FOR_GRADIENTS
        read, tensors, functors = self._place_inputs(operands)
        written = {
            "y": options.out_dtype,
            "sum": self.sum_dtype if self.makes_sum else None,
        }
        shape, num_dims = tuple(operands.input.shape), len(options.extents)
        for name, dtype in written.items():
            if dtype:
                tensors[name] = arrays.contiguous_rows(shape, num_dims, dtype)
        if operands.out is not None and written["y"]:
            tensors["y"] = rows_of(operands.out, num_dims)[0]
            written["y"] = None  # not made
        if operands.out_sum is not None and written["sum"]:
            tensors["sum"] = rows_of(operands.out_sum, num_dims)[0]
            written["sum"] = None
        if operands.amax is not None:
            tensors["amax"] = parameter_of(operands.amax)[0]
        wants_statistics = purpose is not FOR_Y
        kind = "forward" if wants_statistics else "inference"
        device = launch.device(self.device_index)
        call = forward_call(device, tensors, options, kind, functors)
        # This strategy reads the residual again after it has written the sum: a run copies the sum.
        self.copies_sum = operands.out_sum is not None and call.plan.strategy == "uncached"
        if self.copies_sum:
            read[read.index("sum")] = "out_sum"
            written["sum"] = self.sum_dtype
            tensors["sum"] = arrays.contiguous_rows(shape, num_dims, self.sum_dtype)
            call = forward_call(device, tensors, options, kind, functors)
        self.plan = call.plan
        self.num_rows, self.num_cols = tensors["x"].num_rows, tensors["x"].num_cols
        makers = self._makers(shape, written, wants_statistics, len(call.launches))
        order = TensorOrder(read, makers)
        self.make = order.make
        added = "sum" if self.makes_sum else "given"
        self.results = order.returns("y", "mean", "rstd", added)
        self.scale_inv = order.place("scale_inv") if "scale_inv" in makers else None
        self.zeroed = order.place("amaxes") if "amaxes" in makers else None
        self.compile(call, ["amax" if name == "amaxes" else name for name in order.names])

    def _place_inputs(
        self, operands: ForwardOperands
    ) -> tuple[list[str], dict[str, Rows], PlacedFunctors]:
        """What a run reads: the names in order, the layouts of rows and parameters, functors."""
        num_dims = len(self.options.extents)
        names = [name for name in _READ_FORWARD if getattr(operands, name) is not None]
        layouts = layouts_of(operands, names, ("input", "residual"), num_dims)
        numbers = ["scale"] * (operands.scale is not None)
        written = [
            name for name in ("amax", "out", "out_sum") if getattr(operands, name) is not None
        ]
        names += numbers + written
        read = layouts | layouts_of(operands, numbers, (), num_dims)
        OnGpu.__init__(self, operands.input, ForwardOperands._fields, names, read)
        functors = self.read_functors(operands.functors, operands.input, num_dims)
        if operands.functors is not None:
            names += operands.functors.names()
        in_kernel = {"input": "x", "out": "y", "out_sum": "sum"}
        tensors = {in_kernel.get(name, name): rows for name, (rows, _) in layouts.items()}
        return [in_kernel.get(name, name) for name in names], tensors, functors

    def _makers(
        self,
        shape: tuple[int, ...],
        dtypes: dict[str, str | None],
        wants_statistics: bool,
        num_launches: int,
    ) -> dict[str, Callable[[], Array]]:
        """Of the tensors that a run makes. dtypes: of those of the input's shape."""
        options, library = self.options, self.library
        compute = compute_dtype(self.sum_dtype).name
        leading = shape[: len(shape) - len(options.extents)]
        makers = {name: allocator(library, shape, dtype) for name, dtype in dtypes.items() if dtype}
        if wants_statistics:
            makers["rstd"] = allocator(library, leading, compute)
            if options.centered:
                makers["mean"] = allocator(library, leading, compute)
        if options.quantization:
            how = options.quantization
            makers["scale_inv"] = allocator(library, *scale_memory(how, leading, self.num_cols))
            if num_launches > 1:  # what the first launch hands to the second
                amaxes = scale_shape(how.scaling, leading, self.num_cols)
                makers["amaxes"] = allocator(library, amaxes, "float32")
        return makers

    def run(self, operands: ForwardOperands) -> tuple:
        """Allocates and launches: the fields of a Forward.

        operands: like those for which it was prepared. A plain tuple is enough where a call is
        repeated (cupynorm.nn.repeated).
        """
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            inputs = self.read(operands)
            if self.copies:
                inputs = self.contiguous(inputs)
            tensors = inputs + self.make()
            if self.zeroed is not None:
                fill((tensors[self.zeroed],), 0.0)
            results = self.results(tensors + (operands[0], None))
            if self.steps:
                self.enqueue(tuple(map(library.address, tensors)))
            else:  # no rows, or rows without columns, which have no statistics
                fill(results[1:3], math.nan)
            if self.copies_sum:
                operands.out_sum[...] = results[3]
                results = (*results[:3], operands.out_sum, *results[4:])
            if self.scale_inv is not None:
                y = self._quantized(operands, results[0], tensors[self.scale_inv])
                results = (y, *results[1:])
            return results
        finally:
            if former != self.device_index:
                library.exchange_device(former)

    def _quantized(self, operands: ForwardOperands, data: Array, scale_inv: Array) -> Any:
        quantization, transposed = self.options.quantization, None
        if not self.steps:
            given = 1.0 if operands.scale is None else operands.scale
            fill((scale_inv,), given if quantization.divides else 1.0 / given)
        if quantization.transpose:
            matrix = data.reshape(self.num_rows, self.num_cols)
            dtype = quantization.dtype
            transposed = quantize(matrix, dtype, wants_data=False, transpose=True).transposed
        leading = operands.input.shape[: -len(self.options.extents)]
        scale_inv = arranged(scale_inv, quantization, leading)
        return as_quantized_tensor(
            quantization, data, scale_inv, transposed, operands.input, self.num_cols
        )


# Backward.

_READ_BACKWARD = ("dy", "x", "mean", "rstd", "weight", "dsum", "bias", "input")


def _backward_key(request: BackwardRequest) -> tuple:
    operands, options = request
    dy, x, mean, rstd, weight, dsum, bias, input, functors = operands
    layout_key = arrays.library(x).layout_key
    key = (
        layout_key(dy),
        layout_key(x),
        None if mean is None else layout_key(mean),
        layout_key(rstd),
        None if weight is None else layout_key(weight),
        None if dsum is None else layout_key(dsum),
        None if bias is None else layout_key(bias),
        options,
    )
    if functors is not None:
        key += (None if input is None else layout_key(input), key_of(functors, layout_key))
    return key


def prepare_backward(
    request: BackwardRequest,
) -> tuple[PreparedBackward | host.HostBackward, BackwardOperands]:
    """Checks everything, or finds what was checked before, as prepare_forward."""
    try:
        key = _backward_key(request)
        prepared = backwards.get(key)
    except (AttributeError, TypeError, RuntimeError):
        key = prepared = None
    operands = request.operands
    if prepared is None:
        checked = check_backward(request)
        operands = checked.operands
        _check_addresses(operands)
        if arrays.on_host(operands.x):
            warn_on_host(request.options.launch)
            prepared = host.HostBackward(checked)
        else:
            prepared = PreparedBackward(checked)
            keep(backwards, key, prepared)
    return prepared, operands


class PreparedBackward(OnGpu):
    """A backward that is planned and compiled."""

    def __init__(self, request: BackwardRequest) -> None:
        operands, options = request
        dx_dtype, dresidual_dtype = self._choose_dtypes(request)
        read, tensors, functors = self._place_inputs(request, adds=bool(dx_dtype))
        shape, extents = tuple(operands.x.shape), options.extents
        outputs = {
            "dx": (shape, dx_dtype),
            "dweight": (extents, options.dweight_dtype),
            "dbias": (extents, options.dbias_dtype),
            "dresidual": (shape, dresidual_dtype),
            "y": (shape, tensors["dy"].dtype if options.recompute else None),
        }
        for name, (own_shape, dtype) in outputs.items():
            if dtype:  # a new array is aligned
                num_dims = len(extents) if own_shape is shape else len(own_shape)
                tensors[name] = arrays.contiguous_rows(own_shape, num_dims, dtype)
        call = backward_call(
            launch.device(self.device_index),
            tensors,
            options,
            arrays.dtype_name(operands.rstd),
            functors,
        )
        self.plan = call.plan
        outputs |= {name: (shape, dtype) for name, dtype in functors.gradients().items()}
        self.overwrites_dy = options.overwrite_dy and call.can_write_over_dy
        wants_any = any(dtype for _, dtype in outputs.values())
        if call.partials_shape:
            outputs["partials"] = (call.partials_shape, call.plan.problem.compute)
        makers = {
            name: allocator(self.library, *each)
            for name, each in outputs.items()
            if each[1] and not (name == "dx" and self.overwrites_dy)
        }
        order = TensorOrder(read, makers)
        self.make = order.make
        if wants_any:
            # The gradient is written in the place of dy, which is the first that is read.
            self.compile(call, [*order.names, *["dx"] * self.overwrites_dy])
        dx = "dy" if self.overwrites_dy else "dx"
        dresidual = dx if self.dresidual_is_dx else "dresidual"
        if self.wants_only_dresidual:
            dx, dresidual = None, dx
        self.results = order.returns(dx, "dweight", "dbias", dresidual, "y")
        # Where a run has the gradients of the functors' arrays, before they are summed.
        own = operands.functors
        self.of_functors = [
            (order.place(name.replace(".", ".d", 1)), tuple(array.shape), per_row, array.dtype)
            for name, array, per_row in (own.named_arrays() if own else ())
            if name in options.functor_gradients
        ]

    def _choose_dtypes(self, request: BackwardRequest) -> tuple[str | None, str | None]:
        """The dtypes of the kernel's dx and dresidual; None for what it does not write.

        Both are one tensor where they would be the same. Where only dresidual is wanted, it is
        written as dx is.
        """
        operands, options = request
        dx, dresidual = options.dx_dtype, options.dresidual_dtype
        has_load = operands.functors is not None and bool(operands.functors.load)
        self.dresidual_is_dx = dx is not None and dx == dresidual and not has_load
        self.wants_only_dresidual = dx is None
        if self.wants_only_dresidual:
            return dresidual, None
        return dx, None if self.dresidual_is_dx else dresidual

    def _place_inputs(
        self, request: BackwardRequest, *, adds: bool
    ) -> tuple[list[str], dict[str, Rows], PlacedFunctors]:
        """As of PreparedForward. adds: whether dsum is added."""
        operands, options = request
        num_dims = len(options.extents)
        names = [name for name in _READ_BACKWARD if getattr(operands, name) is not None]
        if not adds and "dsum" in names:
            names.remove("dsum")
        layouts = layouts_of(operands, names, ("dy", "x", "dsum", "input"), num_dims)
        statistics = "mean", "rstd"  # not what decides a plan
        tensors = {name: rows for name, (rows, _) in layouts.items() if name not in statistics}
        OnGpu.__init__(self, operands.x, BackwardOperands._fields, names, layouts)
        wanted = options.functor_gradients
        functors = self.read_functors(operands.functors, operands.x, num_dims, wanted)
        if operands.functors is not None:
            names += operands.functors.names()
        return names, tensors, functors

    def run(self, operands: BackwardOperands) -> tuple:
        """Allocates and launches; returns the fields of Gradients.

        operands: like those for which it was prepared.
        """
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            inputs = self.read(operands)
            if self.copies:
                inputs = self.contiguous(inputs)
            tensors = inputs + self.make()
            results = self.results(tensors + (None, None))
            if self.steps:
                addresses = tuple(map(library.address, tensors))
                if self.overwrites_dy:
                    addresses += addresses[:1]
                self.enqueue(addresses)
            else:  # no rows or no columns: sums of nothing
                fill(results[1:3], 0.0)
            if self.of_functors:
                results += (self._summed(tensors),)
            return results
        finally:
            if former != self.device_index:
                library.exchange_device(former)

    def _summed(self, tensors: tuple) -> tuple:
        """The gradients of the functors' arrays, in their shapes and dtypes."""
        gradients = []
        for at, shape, per_row, dtype in self.of_functors:
            gradient = summed(tensors[at], shape, per_row)
            is_torch = arrays.is_torch(gradient)
            gradients.append(gradient.to(dtype) if is_torch else gradient.astype(dtype, copy=False))
        return tuple(gradients)
