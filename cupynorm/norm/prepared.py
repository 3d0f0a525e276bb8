"""Prepared calls: what is checked, planned and compiled once, and then only allocated and launched.

Two calls whose arrays have the same dtypes, shapes, strides and alignment, and whose options are
equal, share one prepared call. It is found by one dictionary lookup.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from ..dtypes import compute_dtype
from ..gpu import arrays, launch, nvrtc
from ..gpu.arrays import Rows
from ..plan.dispatch import choose
from ..plan.problem import Layout, Problem
from . import host
from .arguments import backward_call, forward_call
from .checks import (
    check_backward,
    check_forward,
    check_out,
    check_overlap,
    share_an_address,
)
from .kept import backwards, forwards, keep
from .on_gpu import OnGpu, allocator, fill, parameter_of, rows_of
from .quantize import quantize
from .quantized_tensor import result, scale_shape
from .request import (
    Array,
    BackwardOperands,
    BackwardRequest,
    ForwardOperands,
    ForwardRequest,
)

# What a forward is for: y; y and statistics; both, where gradients are recorded; statistics alone.
FOR_Y, FOR_STATISTICS, FOR_GRADIENTS = "y", "statistics", "gradients"
FOR_STATISTICS_ALONE = "statistics alone"


def draw_seed(x: Array) -> Array:
    """An int64 array of one element where x is, drawn by x's library there without a sync."""
    # A power of two: below any other limit CuPy may have to draw again, and syncs to find out.
    limit = 2**62
    if arrays.is_torch(x):
        torch = sys.modules["torch"]
        return torch.randint(0, limit, (1,), dtype=torch.int64, device=x.device)
    if isinstance(x, np.ndarray):
        return np.random.randint(0, limit, 1, np.int64)
    return nvrtc.cupy().random.randint(0, limit, 1, np.int64)


# Forward.

_READ_FORWARD = ("weight", "bias", "row_scale", "weight1", "bias1")  # besides rows


def _forward_key(request: ForwardRequest, purpose: str) -> tuple:
    """Everything that a prepared forward depends on.

    An eps of True equals 1.0 and is refused, so its class counts. Other equal values mean the same.
    """
    operands, options = request
    input, weight, bias, residual, out, row_scale, seed, weight1, bias1, scale, amax = operands
    layout_key = arrays.library(input).layout_key
    key = (
        layout_key(input),
        None if weight is None else layout_key(weight),
        None if bias is None else layout_key(bias),
        None if residual is None else layout_key(residual),
        None if out is None else layout_key(out),
        options,
        options.eps.__class__,
        purpose,
    )
    if row_scale is not None:
        key += (layout_key(row_scale), getattr(row_scale, "requires_grad", False))
    if seed is not None or weight1 is not None or bias1 is not None:
        key += (seed.__class__ is int or layout_key(seed), layout_key(weight1), layout_key(bias1))
    if options.quantization is not None:
        constants = (
            (layout_key(each), getattr(each, "requires_grad", False)) for each in (scale, amax)
        )
        key += (*constants, share_an_address(scale, amax))
    return key


def prepare_forward(
    request: ForwardRequest, purpose: str = FOR_STATISTICS
) -> tuple[PreparedForward | host.HostForward, ForwardOperands]:
    """Checks everything, or finds what was checked before: an object whose `run` takes the operands
    that are returned beside it. Nothing is allocated or launched."""
    try:
        key = _forward_key(request, purpose)
        prepared = forwards.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Arrays of several libraries, none at all, or sparse ones: the checks say so.
        key = prepared = None
    operands = request.operands
    if prepared is None:
        checked = check_forward(request)
        operands = checked.operands
        arrays.check_addresses(
            **{name: array for name, array in operands._asdict().items() if array is not None}
        )
        check_out(checked)
        if purpose is FOR_GRADIENTS:
            if operands.out is not None:
                raise ValueError(
                    "out was given for tensors that require gradients; "
                    "expected out=None, or torch.no_grad()"
                )
            _check_backward_strategy(checked)
        if arrays.on_host(operands.input):
            prepared = host.HostForward(checked, draw_seed)
        else:
            prepared = PreparedForward(checked, purpose)
            keep(forwards, key, prepared)
    if operands.out is not None:
        check_overlap(operands)
    return prepared, operands


def _check_backward_strategy(request: ForwardRequest) -> None:
    """Raises ValueError now if a strategy forced on a differentiable forward does not fit its
    backward."""
    operands, options = request
    x = operands.input
    if options.launch.strategy is None or arrays.on_host(x):
        return
    num_cols = arrays.product(options.extents)

    def dtype_of(array: Array | None) -> str | None:
        return None if array is None else arrays.dtype_name(array)

    y_dtype = options.residual_dtype if options.quantization else options.out_dtype
    problem = Problem(
        "backward",
        options.centered,
        num_cols,
        options.residual_dtype,
        dy=y_dtype,
        dx=dtype_of(x),
        weight=dtype_of(operands.weight),
        dweight=dtype_of(operands.weight),
        dbias=dtype_of(operands.bias),
        layout=Layout.of(num_cols, ()),
        row_scale=dtype_of(operands.row_scale),
        dropout=options.dropout_p > 0,
    )
    choose(problem, launch.device(arrays.view(x).device), options.launch.strategy)


class PreparedForward(host.CheckedForward, OnGpu):
    """A forward that is planned and compiled."""

    def __init__(self, request: ForwardRequest, purpose: str) -> None:
        operands, options = request
        host.CheckedForward.__init__(self, request)
        x = operands.input
        names = ["input", *(name for name in _READ_FORWARD if getattr(operands, name) is not None)]
        if operands.residual is not None:
            names.append("residual")
        tensors, copied = {}, []
        for name in names:
            is_rows = name in ("input", "residual")
            rows, copies = (
                rows_of(getattr(operands, name), len(options.extents))
                if is_rows
                else parameter_of(getattr(operands, name))
            )
            tensors["x" if name == "input" else name] = rows
            copied.append(copies)
        self.draws_seed = options.dropout_p > 0 and operands.dropout_seed is None
        of_one = ["dropout_seed"] * (options.dropout_p > 0 and not _is_int(operands.dropout_seed))
        of_one += [name for name in ("scale", "amax") if getattr(operands, name) is not None]
        OnGpu.__init__(self, x, names + of_one, ForwardOperands._fields)
        if any(copied):
            self.copies = (*copied, *(False for _ in of_one))
        shape, y_dtype, sum_dtype = tuple(x.shape), options.out_dtype, options.residual_dtype
        num_dims = len(options.extents)

        def new_rows(dtype: str) -> Rows:
            return arrays.contiguous_rows(shape, num_dims, dtype)

        self.writes_y = purpose is not FOR_STATISTICS_ALONE
        if self.writes_y:
            out = operands.out
            tensors["y"] = new_rows(y_dtype) if out is None else rows_of(out, num_dims)[0]
        if self.makes_sum:
            tensors["sum"] = new_rows(sum_dtype)
        if self.has_second:
            tensors["y1"] = new_rows(y_dtype)
        if operands.amax is not None:
            tensors["amax"] = parameter_of(operands.amax)[0]
        wants_statistics = purpose is not FOR_Y
        call = forward_call(
            launch.device(self.device_index),
            tensors,
            options,
            "forward" if wants_statistics else "inference",
        )
        self.plan = call.plan
        self.num_rows, self.num_cols = tensors["x"].num_rows, tensors["x"].num_cols
        self.makes_more = self.makes_sum or self.has_second or options.quantization is not None
        order = ["x" if name == "input" else name for name in names] + of_one
        order += ["y", "mean", "rstd"]
        if self.makes_more:
            order += ["sum", "y1", "scale_inv"]
            order += ["amax"] * (len(call.launches) > 1)
        self.compile(call, order)
        self._make_allocators(shape, wants_statistics)

    def _make_allocators(self, shape: tuple[int, ...], wants_statistics: bool) -> None:
        options, library = self.options, self.library
        compute = compute_dtype(options.residual_dtype).name
        leading = shape[: len(shape) - len(options.extents)]
        y_dtype, sum_dtype = options.out_dtype, options.residual_dtype
        has_mean = options.centered and wants_statistics
        self.new_y = allocator(library, shape, y_dtype if self.writes_y else None)
        self.new_mean = allocator(library, leading, compute if has_mean else None)
        self.new_rstd = allocator(library, leading, compute if wants_statistics else None)
        self.new_sum = allocator(library, shape, sum_dtype if self.makes_sum else None)
        self.new_y1 = allocator(library, shape, y_dtype if self.has_second else None)
        self.new_scale_inv = self.new_amax = lambda: None
        if options.quantization:
            scaling = options.quantization.scaling
            scales = scale_shape(scaling, leading, self.num_cols)
            self.new_scale_inv = allocator(
                library, scales, "uint8" if scaling == "mx" else "float32"
            )
            if len(self.steps) > 1:  # what the first launch hands to the second
                self.new_amax = allocator(library, scales, "float32")

    def run(self, operands: ForwardOperands) -> tuple:
        """Allocates and launches: the fields of a FusedForward. operands: as those it was prepared
        for."""
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            if self.draws_seed:
                operands = operands._replace(dropout_seed=draw_seed(operands.input))
            given = self.read(operands)
            if self.copies:
                given = self.contiguous(given)
            x, out, seed = operands.input, operands.out, operands.dropout_seed
            y = self.new_y() if out is None else out
            mean, rstd = self.new_mean(), self.new_rstd()
            tensors = (*given, y, mean, rstd)
            added, y1, scale_inv = x, None, None
            if self.makes_more:
                added, y1, scale_inv = self.new_sum(), self.new_y1(), self.new_scale_inv()
                tensors += (added, y1, scale_inv)
                added = x if added is None else added
                if (amax := self.new_amax()) is not None:
                    fill((amax,), 0.0)
                    tensors += (amax,)
            if self.steps:
                self.enqueue(tensors, seed)
            else:  # no rows, or rows without columns, which have no statistics
                fill((mean, rstd), math.nan)
                scale = operands.scale
                fill((scale_inv,), 1.0 if scale is None else 1.0 / scale)
            if scale_inv is not None:
                y = self._quantized(x, y, scale_inv)
            return y, mean, rstd, added, y1, seed
        finally:
            if former != self.device_index:
                library.exchange_device(former)

    def _quantized(self, x: Array, data: Array, scale_inv: Array) -> Any:
        quantization, transposed = self.options.quantization, None
        if quantization.transpose:
            matrix = data.reshape(self.num_rows, self.num_cols)
            dtype = quantization.dtype
            transposed = quantize(matrix, dtype, wants_data=False, transpose=True).transposed
        return result(quantization, data, scale_inv, transposed, x, self.num_cols)


def _is_int(seed: object) -> bool:
    return isinstance(seed, int)


# Backward.

_READ_BACKWARD = ("weight", "dsum", "bias", "row_scale", "y_weight", "y_bias")


def _backward_key(request: BackwardRequest) -> tuple:
    operands, options = request
    dy, x, mean, rstd, weight, dsum, bias, row_scale, seed, y_weight, y_bias = operands
    layout_key = arrays.library(x).layout_key
    key = (
        layout_key(dy),
        layout_key(x),
        None if mean is None else layout_key(mean),
        layout_key(rstd),
        None if weight is None else layout_key(weight),
        None if dsum is None else layout_key(dsum),
        None if bias is None else layout_key(bias),
        None if row_scale is None else layout_key(row_scale),
        options,
    )
    if seed is not None or y_weight is not None or y_bias is not None:
        key += (seed.__class__ is int or layout_key(seed), layout_key(y_weight), layout_key(y_bias))
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
        there = {name: array for name, array in operands._asdict().items() if array is not None}
        names = {"y_weight": "weight", "y_bias": "bias"}
        for name, array in there.items():
            arrays.check_addresses(**{names.get(name, name): array})
        if arrays.on_host(operands.x):
            prepared = host.HostBackward(checked)
        else:
            prepared = PreparedBackward(checked)
            keep(backwards, key, prepared)
    return prepared, operands


class PreparedBackward(OnGpu):
    """A backward that is planned and compiled."""

    def __init__(self, request: BackwardRequest) -> None:
        operands, options = request
        x = operands.x
        num_dims, extents = len(options.extents), options.extents
        # dx and dresidual are one tensor where they would be the same. Where only dresidual is
        # wanted, it is written as dx is and not scaled.
        dx, dresidual = options.dx_dtype, options.dresidual_dtype
        is_scaled = dx is not None and (operands.row_scale is not None or options.dropout_p > 0)
        self.is_both = None not in (dx, dresidual) and not is_scaled and dx == dresidual
        self.is_residual = dx is None
        first, second = (
            (dresidual, None) if dx is None else (dx, None if self.is_both else dresidual)
        )
        absent = set() if is_scaled else {"row_scale", "dropout_seed"}
        absent |= set() if first else {"dsum"}
        names = ["dy", "x", *(["mean"] if operands.mean is not None else []), "rstd"]
        names += [
            name
            for name in _READ_BACKWARD
            if getattr(operands, name) is not None and name not in absent
        ]
        tensors, copied = {}, []
        for name in names:
            array = getattr(operands, name)
            is_rows = name in ("dy", "x", "dsum")
            rows, copies = rows_of(array, num_dims) if is_rows else parameter_of(array)
            copied.append(copies)
            if name not in ("mean", "rstd"):
                tensors[name] = rows
        drops = is_scaled and options.dropout_p > 0
        of_one = ["dropout_seed"] * (drops and not _is_int(operands.dropout_seed))
        OnGpu.__init__(self, x, names + of_one, BackwardOperands._fields)
        if any(copied):
            self.copies = (*copied, *(False for _ in of_one))
        shape = tuple(x.shape)
        y_dtype = tensors["dy"].dtype if options.recompute else None
        for name, dtype in (("dx", first), ("dresidual", second), ("y", y_dtype)):
            if dtype:
                tensors[name] = arrays.contiguous_rows(shape, num_dims, dtype)
        for name, dtype in (("dweight", options.dweight_dtype), ("dbias", options.dbias_dtype)):
            if dtype:  # a fresh array is aligned
                num_cols = arrays.product(extents)
                tensors[name] = Rows(0, 1, num_cols, num_cols, dtype)
        if not drops:
            options = options._replace(dropout_p=0.0)
        call = backward_call(
            launch.device(self.device_index), tensors, options, arrays.dtype_name(operands.rstd)
        )
        self.plan = call.plan
        self.makes_more = second is not None or y_dtype is not None
        order = [*names, *of_one, "dx", "dweight", "dbias", "partials"]
        order += ["dresidual", "y"] * self.makes_more
        made = (first, options.dweight_dtype, options.dbias_dtype, second, y_dtype)
        if any(made):
            self.compile(call, order)
        library = self.library
        new = [
            allocator(library, *each) for each in zip((shape, extents, extents, shape, shape), made)
        ]
        self.new_dx, self.new_dweight, self.new_dbias, self.new_dresidual, self.new_y = new
        compute = call.plan.problem.compute
        partials = compute if call.partials_shape else None
        self.new_partials = allocator(library, call.partials_shape, partials)
        self.overwrites_dy = options.overwrite_dy and call.can_write_over_dy

    def run(self, operands: BackwardOperands) -> tuple:
        """Allocates and launches; returns the fields of Gradients.

        operands: like those for which it was prepared.
        """
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            given = self.read(operands)
            if self.copies:
                given = self.contiguous(given)
            # dy is the first that is read.
            dx = given[0] if self.overwrites_dy else self.new_dx()
            dweight, dbias = self.new_dweight(), self.new_dbias()
            dresidual = y = None
            if self.steps:
                tensors = (*given, dx, dweight, dbias, self.new_partials())
                if self.makes_more:
                    dresidual, y = self.new_dresidual(), self.new_y()
                    tensors += (dresidual, y)
                self.enqueue(tensors, operands.dropout_seed)
            else:  # no rows or no columns: sums of nothing
                dresidual, y = self.new_dresidual(), self.new_y()
                fill((dweight, dbias), 0.0)
            if self.is_residual:
                return None, dweight, dbias, dx, y
            return dx, dweight, dbias, dx if self.is_both else dresidual, y
        finally:
            if former != self.device_index:
                library.exchange_device(former)
