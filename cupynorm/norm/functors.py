"""The functors of a call: their checks, and the layouts of their arrays.

cupynorm/plan/functors.py has the functors themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..dtypes import compute_dtype
from ..gpu import arrays
from ..gpu.arrays import Rows, View
from ..plan.functors import ROLES, BoundFunctor, Functor, Functors, Fused
from ..plan.problem import Layout

Array = Any
_ALL_ROWS = 2**62  # a period that no row reaches


class PlacedArray(NamedTuple):
    """An array as struct RowArray of cuda_src/operands/functor.cuh reads it.

    Row `row` of the problem reads row `row / repeat % period`. per_row: one element for all
    columns.
    """

    rows: Rows
    repeat: int
    period: int
    per_row: bool


class PlacedFunctor(NamedTuple):
    """A functor whose arrays have a place. gradients: the dtypes in which backward writes those of
    the arrays, None for what is not wanted."""

    functor: Functor
    numbers: tuple[float, ...]
    arrays: tuple[PlacedArray, ...]
    gradients: tuple[str | None, ...] = ()

    def fused(self, num_cols: int, pack_size: int, source: str | None) -> Fused:
        """As plan/problem.py takes it. pack_size: the widest pack of the kernel."""
        reaches = []
        for array in self.arrays:
            limit = Layout.of(num_cols, [array.rows.layout()]).pack_limit
            reach = "packs" if limit >= pack_size else "elements"
            reaches.append("row" if array.per_row else reach)
        dtypes = tuple(array.rows.dtype for array in self.arrays)
        gradients = self.gradients or (None,) * len(dtypes)
        return Fused(self.functor, dtypes, tuple(reaches), source, gradients)


class PlacedFunctors(NamedTuple):
    load: PlacedFunctor | None = None
    store: PlacedFunctor | None = None

    def gradients(self) -> dict[str, str | None]:
        """The dtype of the gradient of each array, as "store.dgate"; None if it is not wanted."""
        return {
            f"{role}.d{name}": dtype
            for role, each in zip(self._fields, self)
            if each is not None
            for name, dtype in zip(each.functor.arrays, each.gradients)
        }


NO_FUNCTORS = PlacedFunctors()


def bind_functors(
    load: object, store: object, return_residual: bool = False, residual: object = None
) -> Functors:
    """load and store of a call as BoundFunctors. A functor that reads nothing needs no call."""
    if load is not None and return_residual and residual is None:
        raise ValueError(
            "return_residual was given with load and no residual; expected a residual, because "
            "what a load makes alone is not stored"
        )
    bound_functors = []
    for role, functor in zip(ROLES, (load, store)):
        if isinstance(functor, Functor):
            functor = functor()
        if functor is not None and not isinstance(functor, BoundFunctor):
            raise TypeError(
                f"{role} is {arrays.type_in_words(functor)}; expected a functor with its arrays, "
                "as cupynorm.functors.silu_gate(gate=gate)"
            )
        bound_functors.append(functor)
    return Functors(*bound_functors)


def key_of(functors: Functors, layout_key: Callable[[Any], object]) -> tuple:
    """What a prepared call depends on. Numbers count as text: 0.0 equals -0.0, and NaN no NaN."""
    return tuple(
        each and (each.functor, str(each.numbers), tuple(map(layout_key, each.arrays)))
        for each in functors
    )


# Checks.


def check_shape(
    array_shape: tuple[int, ...], shape: tuple[int, ...], num_dims: int, name: str
) -> None:
    """Raises ValueError unless kernels can read an array as one that is broadcast to this shape."""
    padded = (1,) * (len(shape) - len(array_shape)) + array_shape
    split = len(shape) - num_dims
    fits = len(padded) == len(shape)
    fits = fits and all(extent in (1, all_) for extent, all_ in zip(padded, shape))
    fits = fits and (padded[split:] == shape[split:] or set(padded[split:]) == {1})
    strides = (0,) * split
    if not fits or _pattern(shape[:split], padded[:split], strides) is None:
        raise ValueError(
            f"{name} has shape {array_shape}, the input {shape}; expected an array that is "
            "broadcast to it, with all or one of the normalised columns, repeated over the rows as "
            "in [batch, 1, N] or [1, seq, 1, N]"
        )


def check_differentiable(functors: Functors) -> None:
    """Raises ValueError if a functor has no derivative."""
    for role, each in zip(ROLES, functors):
        if each is not None and each.functor.backward is None:
            raise ValueError(
                f"{role} is {each.functor.name}, which has no derivative, and a gradient was asked "
                f"for; expected cupynorm.functor({each.functor.name!r}, ..., backward=...), or "
                "torch.no_grad()"
            )


# Places.


def _pattern(
    leading: tuple[int, ...], extents: tuple[int, ...], strides: tuple[int, ...] | None
) -> tuple[int, int, list[int]] | None:
    """repeat, period, and the strides of the dimensions in between, from the last one to the first.

    None: the rows of an array with these leading dimensions do not repeat in that way.
    """
    left = [each for each in zip(leading, extents, strides) if each[0] != 1]
    repeat, period, steps = 1, 1, []
    while left and left[-1][1] == 1:
        repeat *= left.pop()[0]
    while left and left[-1][1] != 1:
        extent, _, stride = left.pop()
        steps.append((extent, stride))
        period *= extent
    if any(extent != 1 for _, extent, _ in left):
        return None
    if not steps:
        repeat = 1
    return repeat, period if left else _ALL_ROWS, steps


def _place(view: View, shape: tuple[int, ...], num_dims: int) -> PlacedArray | None:
    """None: one row stride does not describe the array."""
    missing = len(shape) - len(view.shape)
    extents, strides = (1,) * missing + view.shape, (0,) * missing + view.strides
    split = len(shape) - num_dims
    num_cols = arrays.product(shape[split:])
    per_row = num_cols > 1 and set(extents[split:]) == {1}
    if not per_row:
        expected = 1
        for extent, stride in zip(reversed(extents[split:]), reversed(strides[split:])):
            if extent != 1 and stride != expected:
                return None
            expected *= extent
    # A dimension of stride 0 is broadcast too.
    leading = tuple(1 if stride == 0 else extent for extent, stride in zip(extents, strides))[
        :split
    ]
    pattern = _pattern(shape[:split], leading, strides[:split])
    if pattern is None:
        return None
    repeat, period, steps = pattern
    row_stride = steps[0][1] if steps else 0
    expected = row_stride
    for extent, stride in steps:
        if stride != expected:
            return None
        expected *= extent
    num_rows = 2 if row_stride else 1  # for Layout, which asks whether there are several
    return PlacedArray(
        Rows(view.pointer, num_rows, num_cols, row_stride, view.dtype), repeat, period, per_row
    )


def place(array: Array, shape: tuple[int, ...], num_dims: int) -> tuple[PlacedArray, bool]:
    """The layout of an array, and whether it is that of a contiguous copy that each run makes.

    shape: of the input.
    """
    view = arrays.view(array)
    placed = _place(view, shape, num_dims)
    if placed is not None and not view.is_lazy:
        return placed, False
    strides, step = [], 1
    for extent in reversed(view.shape):
        strides.insert(0, step)
        step *= extent
    return _place(view._replace(pointer=0, strides=tuple(strides)), shape, num_dims), True


def place_all(
    functors: Functors | None, x: Array, num_dims: int, wanted: tuple[str, ...] = ()
) -> tuple[PlacedFunctors, list[bool]]:
    """The functors of a call in their places, and for each array whether a run copies it.

    wanted: the names of arrays whose gradients backward writes.
    """
    if functors is None:
        return NO_FUNCTORS, []
    shape, placed_functors, copied = tuple(x.shape), [], []
    for role, each in zip(ROLES, functors):
        if each is None:
            placed_functors.append(None)
            continue
        places = [place(array, shape, num_dims) for array in each.arrays]
        copied += [copies for _, copies in places]
        gradients = tuple(
            _gradient_dtype(array, x) if f"{role}.{name}" in wanted else None
            for name, array in zip(each.functor.arrays, each.arrays)
        )
        placed = tuple(array for array, _ in places)
        placed_functors.append(PlacedFunctor(each.functor, each.numbers, placed, gradients))
    return PlacedFunctors(*placed_functors), copied


def _gradient_dtype(array: Array, x: Array) -> str:
    """The array's own where nothing is summed, else that of the arithmetic."""
    dtype = arrays.dtype_name(array)
    return (
        dtype if tuple(array.shape) == tuple(x.shape) else compute_dtype(arrays.dtype_name(x)).name
    )


def summed(gradient: Array, target: tuple[int, ...]) -> Array:
    """A gradient of the input's shape, summed to the shape of the array that was broadcast."""
    shape = tuple(gradient.shape)
    if shape == target:
        return gradient
    padded = (1,) * (len(shape) - len(target)) + target
    axes = tuple(at for at, extent in enumerate(padded) if extent == 1 and shape[at] != 1)
    return (gradient.sum(axes) if axes else gradient).reshape(target)
