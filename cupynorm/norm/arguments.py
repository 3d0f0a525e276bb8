"""From the arrays of a call to its plan and to the argument of each kernel.

The arguments are the structs of cuda_src (forward.cuh, backward.cuh, backward_parameters.cu). Every
word of a struct has 8 bytes. A word is a constant of the plan, or the address of a tensor that
comes with each run (Address).

The same calls run on a GPU (calls.py) and on the CPU (cupynorm.check). quantized.py has those of
other kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..dispatch.devices import Device
from ..dispatch.dispatch import Plan, make_plan
from ..dispatch.functor_text import Functor, Functors, Fused, FusedPart, labels
from ..dispatch.instances import KernelLaunch
from ..dispatch.problem import Layout, Problem
from ..dtypes import DTYPES, compute_dtype
from ..gpu import arrays
from ..gpu.arrays import Rows, View
from .checks import ALL_ROWS, pattern_of
from .request import Array, BackwardOptions, ForwardOptions, Quantization, planned_with

# Layouts.

RowsByName = Mapping[str, Rows]  # by name; an absent tensor has no entry


def rows_of(array: Array, num_dims: int) -> tuple[Rows, bool]:
    """An array's rows, and whether they are those of a contiguous copy that each run makes.

    A copy is aligned wherever it will be.
    """
    view = arrays.view(array)
    rows = arrays.rows(view, num_dims)
    if rows is not None and not view.is_lazy:
        return rows, False
    return arrays.contiguous_rows(view.shape, num_dims, view.dtype), True


def parameter_of(array: Array) -> tuple[Rows, bool]:
    """A weight, bias or statistic as one row, and whether a run must copy it."""
    view = arrays.view(array)
    copied = view.is_lazy or arrays.rows(view, len(view.shape)) is None
    num_cols = arrays.product(view.shape)
    return Rows(0 if copied else view.pointer, 1, num_cols, num_cols, view.dtype), copied


Layouts = Mapping[str, tuple[Rows, bool]]  # by name what rows_of or parameter_of gives


def layouts_of(
    operands: Any, names: Sequence[str], names_of_rows: Collection[str], num_dims: int
) -> Layouts:
    """Of the arrays that are there. names_of_rows: whose last num_dims dimensions are normalised;
    other arrays are one row."""
    return {
        name: rows_of(array, num_dims) if name in names_of_rows else parameter_of(array)
        for name, array in ((name, getattr(operands, name)) for name in names)
        if array is not None
    }


def layout_of(num_cols: int, tensors: RowsByName) -> Layout:
    """What all tensors that a kernel reads or writes allow."""
    return Layout.of(num_cols, [each.layout() for each in tensors.values()])


def dtype_of(tensors: RowsByName, name: str) -> str | None:
    return tensors[name].dtype if name in tensors else None


# The places of functors' arrays.


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
        """As dispatch/problem.py takes it. pack_size: the widest pack of the kernel."""
        reaches = []
        for array in self.arrays:
            limit = Layout.of(num_cols, [array.rows.layout()]).pack_limit
            reach = "packs" if limit >= pack_size else "elements"
            if array.per_row:
                is_own = array.repeat == 1 and array.period == ALL_ROWS
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
        """Those of a role, as dispatch/problem.py takes them."""
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
    pattern = pattern_of(shape[:split], leading, strides[:split])
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


# Words.


class Address(NamedTuple):
    """A word that is the address of a tensor plus some bytes; 0 if the tensor is absent."""

    tensor: str
    offset: int = 0


Words = list  # of constants and Address


class Arguments:
    """The arguments of a call's kernels, for tensors that come in a known order.

    The words of all kernels are one tuple: the addresses of a run, the constants of the plan, and
    sums of an address and an offset. Each kernel has an itemgetter that picks its own from them,
    because this runs in every call.
    """

    def __init__(self, arguments: Sequence[Words], order: Sequence[str]) -> None:
        """order: names of the tensors of a run. Any other tensor is absent: its address is 0."""
        indices = {name: index for index, name in enumerate(order)}
        words = [word for argument in arguments for word in argument]
        addresses = [word for word in words if isinstance(word, Address)]
        sums = [word for word in addresses if word.offset and word.tensor in indices]
        self.sums = [(indices[word.tensor], word.offset) for word in sums]
        constants = [word for word in words if not isinstance(word, Address)]
        self.constants = (0, *constants)
        absent = len(order)
        constant = iter(range(absent + 1, absent + len(self.constants)))
        end = absent + len(self.constants)
        sum_ = iter(range(end, end + len(sums)))

        def place(word: object) -> int:
            if not isinstance(word, Address):
                return next(constant)
            if word.tensor not in indices:
                return absent
            return next(sum_) if word.offset else indices[word.tensor]

        self.picks = [itemgetter(*map(place, argument)) for argument in arguments]

    def words(self, addresses: tuple[int, ...]) -> tuple:
        """What each of `picks` picks from. addresses: in the order of the run."""
        words = addresses + self.constants
        if self.sums:
            words += tuple([addresses[index] + offset for index, offset in self.sums])
        return words


class Call(NamedTuple):
    """A planned call: its kernels in order, and the words of each kernel's argument."""

    launches: tuple[KernelLaunch, ...]
    arguments: tuple[Words, ...]
    plan: Plan | None = None
    partials_shape: tuple[int, ...] | None = None  # of a scratch tensor named "partials"
    can_write_over_dy: bool = False

    def over_dy(self) -> Call:
        """The same, with dx written where dy is."""
        dx, dy = Address("dx"), Address("dy")
        words = [[dy if word == dx else word for word in each] for each in self.arguments]
        return self._replace(arguments=tuple(words))

    def arguments_of(self, order: Sequence[str]) -> Arguments:
        """order: names of the tensors that a run has."""
        return Arguments(self.arguments, order)

    def fill(self, addresses: Mapping[str, int]) -> list[tuple]:
        """The words of each kernel's argument; addresses: of the tensors that are there."""
        arguments = self.arguments_of(list(addresses))
        words = arguments.words(tuple(addresses.values()))
        return [pick(words) for pick in arguments.picks]


def row_words(tensors: RowsByName, name: str, turned: bool = False) -> tuple[Address, int]:
    """Address and row stride, as struct members. turned: to go from the last row to the first."""
    if name not in tensors:
        return Address(name), 0
    rows = tensors[name]
    if not turned:
        return Address(name), rows.row_stride
    # Rows.layout has the itemsize of 8-bit dtypes too.
    last = (rows.num_rows - 1) * rows.row_stride * rows.layout().itemsize
    return Address(name, last), -rows.row_stride


@np.errstate(all="ignore")
def scale_rule_words(quantization: Quantization) -> tuple[int, int, int, int]:
    """struct ScaleRule of scales.cuh: the limits of an amax as bits, and two flags."""
    limits = abs(quantization.smallest_amax), quantization.upper_bound
    smallest, upper = np.array(limits, np.float32).view(np.uint32).tolist()
    return smallest, upper, int(quantization.power_of_two), int(quantization.divides)


def _scale_words(problem: Problem, quantization: Quantization, num_rows: int) -> Words:
    """The arrays, struct ScalePlaces and struct ScaleRule of QuantizeScales."""
    places = [problem.num_scales, 1, num_rows + -num_rows % 4, int(quantization.layout == "packed")]
    if quantization.layout == "row":
        places = [problem.num_scales, problem.num_scales, 1, 0]
    arrays = [Address("scale"), Address("scale_inv"), Address("amax")]
    return [*arrays, *places, *scale_rule_words(quantization)]


def _functor_words(
    placed: Sequence[PlacedFunctor], problem: Problem, backward: bool = False
) -> Words:
    """The struct of the functors of one role (dispatch/functor_text.py): Chain or ChainGradient."""
    words = []
    for at, each in enumerate(placed):
        if backward and at < len(placed) - 1:
            words += _functor_words([each], problem)
        for name, array in zip(each.functor.arrays, each.arrays):
            place = Address(f"{each.label}.{name}")
            words += [place, array.rows.row_stride, array.repeat, array.period]
        words += [Address(f"{each.label}.{name}") for name in each.functor.seeds]
        words += [*each.numbers, problem.num_cols]
        if backward:
            words += [Address(f"{each.label}.d{name}") for name in each.functor.arrays]
    return words


def _with_functors(problem: Problem, functors: PlacedFunctors, **sources: str | None) -> Problem:
    """sources: of load and store, the dtypes of what they are applied to, where x or dy has that of
    the arithmetic."""
    if functors is NO_FUNCTORS:
        return problem
    narrow = [name for name in sources.values() if name]
    bytes_ = [DTYPES[name].itemsize for name in narrow]
    pack_size = min([problem.widest_pack, *(16 // each for each in bytes_)])
    fused = {
        role: functors.fused(role, problem.num_cols, pack_size, sources.get(role))
        for role in functors._fields
    }
    return replace(problem, **fused)


# Forward.


def forward_problem(
    tensors: RowsByName, options: ForwardOptions, functors: PlacedFunctors = NO_FUNCTORS
) -> Problem:
    """The problem of a forward: its tensors and what is fused with the norm.

    tensors: x, y, weight, bias, residual, sum; amax where one is recorded. Without y: mean and
    rstd alone.
    """
    x = tensors["x"]
    # ResidualLoad adds a residual of x's dtype; SumLoad does everything else.
    dtypes = {tensors[name].dtype for name in ("x", "residual", "sum") if name in tensors}
    has_own_sum = len(dtypes) > 1 or (bool(functors.load) and "sum" in tensors)
    # A load keeps what it makes in the dtype of the arithmetic.
    source = x.dtype if functors.load and not has_own_sum else None
    streamed = {name: rows for name, rows in tensors.items() if name != "amax"}
    rounds = options.round_x_hat and DTYPES[x.dtype].itemsize < 4
    problem = Problem(
        "forward",
        options.centered,
        x.num_cols,
        dtype_of(tensors, "sum") or (DTYPES[source].compute if source else x.dtype),
        y=dtype_of(tensors, "y"),
        weight=dtype_of(tensors, "weight"),
        bias=dtype_of(tensors, "bias"),
        zero_centered=bool(options.zero_centered_weight),
        residual="residual" in tensors and not has_own_sum,
        input=x.dtype if has_own_sum else None,
        residual_dtype=dtype_of(tensors, "residual") if has_own_sum else None,
        round_x_hat=x.dtype if rounds else None,
        scaling=options.quantization.scaling if options.quantization else None,
        amax="amax" in tensors,
        in_columns=bool(options.quantization) and options.quantization.layout != "row",
        layout=layout_of(x.num_cols, streamed),
    )
    return _with_functors(problem, functors, load=source)


def forward_call(
    device: Device,
    tensors: RowsByName,
    options: ForwardOptions,
    kind: str,
    functors: PlacedFunctors = NO_FUNCTORS,
) -> Call:
    """kind: "forward" or "inference", whose sm_margin counts."""
    problem = forward_problem(tensors, options, functors)
    x = tensors["x"]
    plan = make_plan(problem, device, x.num_rows, **planned_with(options.launch, kind))
    # A second launch for y in 8 bits finds the same statistics again. One scale is for all rows,
    # so it begins with the last ones, which may still be in the L2 cache.
    turns = problem.scaling == "tensor" and not (problem.input or functors.load or functors.store)
    arguments = [
        _forward_words(
            tensors,
            problem,
            options,
            plan,
            again=at > 0,
            turned=turns and at > 0,
            functors=functors,
        )
        for at in range(len(plan.launches))
    ]
    return Call(plan.launches, tuple(arguments), plan)


def _forward_words(
    tensors: RowsByName,
    problem: Problem,
    options: ForwardOptions,
    plan: Plan,
    *,
    again: bool,
    turned: bool,
    functors: PlacedFunctors,
) -> Words:
    """struct Forward of forward.cuh."""
    words = [*_functor_words(functors.load, problem), *row_words(tensors, "x", turned)]
    if problem.input or problem.residual:
        words += [*row_words(tensors, "residual", turned), *row_words(tensors, "sum", turned)]
    words += [*row_words(tensors, "y", turned), Address("weight"), Address("bias")]
    if options.quantization:
        words += _scale_words(problem, options.quantization, tensors["x"].num_rows)
    words += _functor_words(functors.store, problem)
    words += [0, 0] if again else [Address("mean"), Address("rstd")]
    first = plan.launches[0]
    x = tensors["x"]
    tail = [x.num_rows, x.num_cols, float(options.eps), first.num_first, first.rows_of_first]
    return words + tail


# Backward.


def backward_problem(
    tensors: RowsByName,
    options: BackwardOptions,
    compute: str,
    functors: PlacedFunctors = NO_FUNCTORS,
) -> Problem:
    """The problem of a backward.

    tensors: dy, x, weight, dsum, dx, dweight, dbias, dresidual; y and bias where y is
    recomputed; input and bias of functors. compute: the dtype of the statistics.
    """
    x, dy = tensors["x"], tensors["dy"]
    # What comes through a functor has the dtype of the arithmetic.
    sources = {}
    if options.applies_load:
        sources["load"] = x.dtype
    if functors.store:
        sources["store"] = dy.dtype
    problem = Problem(
        "backward",
        options.centered,
        x.num_cols,
        compute if "load" in sources else x.dtype,
        weight=dtype_of(tensors, "weight"),
        zero_centered=bool(options.zero_centered_weight),
        dy=compute if "store" in sources else dy.dtype,
        dx=dtype_of(tensors, "dx"),
        dweight=dtype_of(tensors, "dweight"),
        dbias=dtype_of(tensors, "dbias"),
        dsum=dtype_of(tensors, "dsum"),
        dresidual=dtype_of(tensors, "dresidual"),
        input=dtype_of(tensors, "input"),
        recomputed=dtype_of(tensors, "y"),
        bias=dtype_of(tensors, "bias"),
        layout=layout_of(x.num_cols, tensors),
    )
    return _with_functors(problem, functors, **sources)


def backward_call(
    device: Device,
    tensors: RowsByName,
    options: BackwardOptions,
    compute: str,
    functors: PlacedFunctors = NO_FUNCTORS,
) -> Call:
    """dsum without dx has nothing to be added to and is left out of tensors by the caller."""
    problem = backward_problem(tensors, options, compute, functors)
    x, dy = tensors["x"], tensors["dy"]
    plan = make_plan(problem, device, x.num_rows, **planned_with(options.launch, "backward"))
    sources = [launch.kernel.source for launch in plan.launches]
    in_one = "backward_few.cu" in sources
    sums_up = "backward_parameters.cu" in sources
    sums_dy_itself = sums_up and not plan.num_partials
    x_words = _x_words(tensors, problem, functors.load)
    arguments = []
    if len(sources) > sums_up:
        read = [*x_words, *_dy_words(tensors, problem, functors.store, x_words)]
        words = _backward_words(tensors, problem, options, plan, read, functors.load)
        if in_one:  # struct BackwardFew
            words += [Address("dweight"), Address("dbias"), plan.launches[0].num_row_blocks]
        arguments.append(words)
    if sums_dy_itself:
        statistics = [Address("mean"), Address("rstd"), Address("dweight"), Address("dbias")]
        read = [*x_words, *_dy_words(tensors, problem, functors.store, x_words, writes=False)]
        arguments.append([*read, *statistics, x.num_rows, x.num_cols])
    elif sums_up:
        sums = [*_partial_words(problem, plan), x.num_cols, Address("dweight"), Address("dbias")]
        arguments.append([*sums, plan.num_partials, x.num_cols])
    partials_shape = None
    if plan.num_partials:
        # One partial row of sums for each block or cluster, those of dweight first.
        num_sums = sum(word != 0 for word in _partial_words(problem, plan))
        partials_shape = (num_sums, plan.num_partials, x.num_cols)
    # A row is read before it is written, except by a kernel that sums up dy itself after that.
    dx = tensors.get("dx")
    same = dx is not None and (dx.dtype, dx.row_stride) == (dy.dtype, dy.row_stride)
    can_write_over_dy = same and not (sums_dy_itself or in_one)
    return Call(plan.launches, tuple(arguments), plan, partials_shape, can_write_over_dy)


def _x_words(tensors: RowsByName, problem: Problem, load: Sequence[PlacedFunctor]) -> Words:
    """struct Load, or FunctorLoad around it. load: forward's functors."""
    words = [*row_words(tensors, "x")]
    if problem.load and problem.load.source:
        words = [*_functor_words(load, problem), *words]
    return words


def _dy_words(
    tensors: RowsByName,
    problem: Problem,
    store: Sequence[PlacedFunctor],
    x_words: Words,
    *,
    writes: bool = True,
) -> Words:
    """struct Load or DyThroughStore. store: forward's functors. writes: whether the gradients of
    their arrays are written."""
    row = [*row_words(tensors, "dy")]
    if not store:
        return row
    of_store = _functor_words(store, problem, backward=True)
    if not writes:
        names = {f"{each.label}.d{name}" for each in store for name in each.functor.arrays}
        of_store = [
            0 if isinstance(word, Address) and word.tensor in names else word for word in of_store
        ]
    through = [Address("weight"), Address("bias"), Address("mean"), Address("rstd")]
    return [*x_words, *row, *through, *of_store]


def _partial_words(problem: Problem, plan: Plan) -> list:
    """Addresses of the partial sums of dweight and dbias; 0 where not wanted."""
    size = plan.num_partials * problem.num_cols * DTYPES[problem.compute].itemsize
    words, at = [], 0
    for is_wanted in (problem.dweight, problem.dbias):
        words.append(Address("partials", at) if is_wanted else 0)
        at += size if is_wanted else 0
    return words


def _backward_words(
    tensors: RowsByName,
    problem: Problem,
    options: BackwardOptions,
    plan: Plan,
    read: Words,
    load: Sequence[PlacedFunctor],
) -> Words:
    """struct Backward of backward.cuh. read: its loads. load: forward's functors."""
    words = [*read, Address("weight")]
    if load:  # struct DxThroughLoad
        words += row_words(tensors, "input" if problem.input else "x")
        words += _functor_words(load, problem, backward=True)
    words += [*row_words(tensors, "dx"), *row_words(tensors, "dsum")]
    if problem.dresidual or load:
        words += row_words(tensors, "dresidual")
    if problem.recomputed:
        words += [*row_words(tensors, "y"), Address("weight"), Address("bias")]
    x = tensors["x"]
    partials = [0, 0]
    if plan.num_partials:
        partials = _partial_words(problem, plan)
    return [*words, Address("mean"), Address("rstd"), *partials, x.num_rows, x.num_cols]
