"""The functors of a call: their checks, and the layouts of their arrays.

cupynorm/plan/functors.py has the functors themselves.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import compute_dtype
from ..gpu import arrays, nvrtc
from ..gpu.arrays import Rows, View
from ..plan.functor_text import (
    BoundFunctor,
    Functor,
    Functors,
    Fused,
    FusedPart,
    check_chain,
    labels,
)
from ..plan.problem import Layout

Array = Any
_ALL_ROWS = 2**62  # a period that no row reaches
# A power of two: below any other limit CuPy may have to draw again, and syncs to find out.
SEED_LIMIT = 2**62


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
    """A functor whose arrays have a place.

    label: how its arrays and seeds are named, as "silu_gate" in "silu_gate.gate".
    gradients: the dtypes in which backward writes those of the arrays, None for what is not wanted.
    """

    functor: Functor
    numbers: tuple[float, ...]
    arrays: tuple[PlacedArray, ...]
    label: str
    gradients: tuple[str | None, ...] = ()

    def fused(self, num_cols: int, pack_size: int) -> FusedPart:
        """As plan/problem.py takes it. pack_size: the widest pack of the kernel."""
        reaches = []
        for array in self.arrays:
            limit = Layout.of(num_cols, [array.rows.layout()]).pack_limit
            reach = "packs" if limit >= pack_size else "elements"
            if array.per_row:
                is_own = array.repeat == 1 and array.period == _ALL_ROWS
                reach = "own_row" if is_own else "row"
            reaches.append(reach)
        dtypes = tuple(array.rows.dtype for array in self.arrays)
        gradients = self.gradients or (None,) * len(dtypes)
        return FusedPart(self.functor, dtypes, tuple(reaches), gradients)


class PlacedFunctors(NamedTuple):
    """The functors of each role, in the order in which they apply."""

    load: tuple[PlacedFunctor, ...] = ()
    store: tuple[PlacedFunctor, ...] = ()

    def fused(self, role: str, num_cols: int, pack_size: int, source: str | None) -> Fused | None:
        """Those of a role, as plan/problem.py takes them."""
        parts = tuple(each.fused(num_cols, pack_size) for each in getattr(self, role))
        return Fused(parts, source) if parts else None

    def gradients(self) -> dict[str, str | None]:
        """The dtype of the gradient of each array, as "silu_gate.dgate"; None if not wanted."""
        return {
            f"{each.label}.d{name}": dtype
            for each in (*self.load, *self.store)
            for name, dtype in zip(each.functor.arrays, each.gradients)
        }


NO_FUNCTORS = PlacedFunctors()


def bind_functors(
    fuse: object, return_residual: bool = False, residual: object = None
) -> Functors | None:
    """The functors of `fuse`, a sequence or one alone. One that reads nothing needs no call.

    None: there are none.
    """
    if fuse.__class__ is tuple and not fuse:
        return None
    is_one = isinstance(fuse, (Functor, BoundFunctor)) or not isinstance(fuse, (tuple, list))
    given = [fuse] if is_one else fuse
    by_role = {"load": [], "store": []}
    for each in given:
        if isinstance(each, Functor):
            each = each()
        if not isinstance(each, BoundFunctor):
            raise TypeError(
                f"fuse has {arrays.type_in_words(each)}; expected functors with their arrays, as "
                "fuse=(cupynorm.functors.silu_gate(gate),)"
            )
        by_role[each.functor.role].append(each)
    if by_role["load"] and return_residual and residual is None:
        raise ValueError(
            "return_residual was given without a residual and with a functor on x; expected a "
            "residual, because what the functor makes alone is not stored"
        )
    for parts in by_role.values():
        if len(parts) > 1:
            check_chain([each.functor for each in parts])
    return Functors(*map(tuple, by_role.values())) if given else None


def key_of(functors: Functors, layout_key: Callable[[Any], object]) -> tuple:
    """What a prepared call depends on. Numbers count as text: 0.0 equals -0.0, and NaN no NaN."""
    return tuple(
        (each.functor, str(each.numbers), tuple(map(layout_key, each.arrays + each.seeds)))
        for each in functors.parts()
    )


# Seeds.


def _seed_at(x: Array, seed: object) -> Array:
    """A seed as an array of one element where x is, without a sync. None is drawn there by x's
    library, an int is filled in."""
    if seed is not None and not isinstance(seed, int):
        return seed
    if arrays.is_torch(x):
        torch = sys.modules["torch"]
        options = {"dtype": torch.int64, "device": x.device}
        if seed is None:
            return torch.randint(0, SEED_LIMIT, (1,), **options)
        return torch.full((1,), seed, **options)
    is_numpy = isinstance(x, np.ndarray)
    library = np if is_numpy else nvrtc.cupy()
    with contextlib.nullcontext() if is_numpy else x.device:
        if seed is None:
            return library.random.randint(0, SEED_LIMIT, 1, np.int64)
        return library.full(1, seed, np.int64)


def with_seeds(functors: Functors, x: Array) -> Functors:
    """The functors with each seed as an array where x is."""
    if not any(each.seeds for each in functors.parts()):
        return functors
    given, count = functors.arrays(), len(functors.named_arrays())
    return functors.with_arrays([*given[:count], *(_seed_at(x, each) for each in given[count:])])


def check_seeds_given(functors: Functors) -> None:
    """Raises ValueError where a seed is None: an explicit backward could not repeat it."""
    for name, each in zip(functors.names(), functors.arrays()):
        if each is None:
            raise ValueError(
                f"{name} is None in an explicit forward or backward; expected an int or one "
                "element of int64, the same in both"
            )


# Checks.


def check_shape(
    array_shape: tuple[int, ...],
    shape: tuple[int, ...],
    num_dims: int,
    name: str,
    per_row: bool = False,
) -> None:
    """Raises ValueError unless kernels can read an array as one that is broadcast to this shape."""
    if per_row:
        leading = shape[: len(shape) - num_dims]
        if array_shape != leading:
            raise ValueError(
                f"{name} has shape {array_shape}; expected {leading}, one for each row"
            )
        return
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
    for each in functors.parts():
        name = each.functor.name
        if each.functor.backward is None:
            raise ValueError(
                f"fuse has {name}, which has no derivative, and a gradient was asked for; expected "
                f"cupynorm.functor({name!r}, ..., backward=...), or torch.no_grad()"
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


def place(
    array: Array, shape: tuple[int, ...], num_dims: int, per_row: bool = False
) -> tuple[PlacedArray, bool]:
    """The layout of an array, and whether it is that of a contiguous copy that each run makes.

    shape: of the input. per_row: the array's is that without the normalised dimensions.
    """
    view = arrays.view(array)
    if per_row:
        ends = (1,) * num_dims, (0,) * num_dims
        view = view._replace(shape=view.shape + ends[0], strides=view.strides + ends[1])
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
    """The functors of a call in their places, and for each of arrays() whether a run copies it.

    wanted: the names of arrays whose gradients backward writes.
    """
    if functors is None:
        return NO_FUNCTORS, []
    shape, placed, copied = tuple(x.shape), [], []
    for label, each in zip(labels(functors.parts()), functors.parts()):
        named = list(zip(each.functor.arrays, each.arrays))
        places = [
            place(array, shape, num_dims, name in each.functor.per_row) for name, array in named
        ]
        copied += [copies for _, copies in places]
        gradients = tuple(
            _gradient_dtype(array, x) if f"{label}.{name}" in wanted else None
            for name, array in named
        )
        own = tuple(array for array, _ in places)
        placed.append(PlacedFunctor(each.functor, each.numbers, own, label, gradients))
    count = len(functors.load)
    copied += [arrays.view(seed).is_lazy for each in functors.parts() for seed in each.seeds]
    return PlacedFunctors(tuple(placed[:count]), tuple(placed[count:])), copied


def _gradient_dtype(array: Array, x: Array) -> str:
    """The array's own where nothing is summed, else that of the arithmetic."""
    dtype = arrays.dtype_name(array)
    return (
        dtype if tuple(array.shape) == tuple(x.shape) else compute_dtype(arrays.dtype_name(x)).name
    )


def summed(gradient: Array, target: tuple[int, ...], per_row: bool = False) -> Array:
    """A gradient of the input's shape, summed to the shape of the array that was broadcast."""
    shape = tuple(gradient.shape)
    if shape == target:
        return gradient
    missing = (1,) * (len(shape) - len(target))
    padded = target + missing if per_row else missing + target
    axes = tuple(at for at, extent in enumerate(padded) if extent == 1 and shape[at] != 1)
    return (gradient.sum(axes) if axes else gradient).reshape(target)
