"""From the tensors of a call to its plan and to the argument of each kernel.

The arguments are the structs of cuda_src (forward.cuh, backward.cuh, backward_parameters.cu). Every
word of a struct has 8 bytes. A word is a constant of the plan, or the address of a tensor that
comes with each run (Address).

The same calls run on a GPU (cupynorm.norm.prepared) and on the CPU (cupynorm.check).
quantize.py and reduce_matrix.py have those of other kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from ..dtypes import DTYPES
from ..gpu.arrays import Rows
from ..plan.devices import Device
from ..plan.dispatch import Plan, make_plan
from ..plan.instances import Launch
from ..plan.problem import Layout, Problem
from .functors import NO_FUNCTORS, PlacedFunctor, PlacedFunctors
from .launch_choice import planned_with
from .request import BackwardOptions, ForwardOptions, Quantization

RowsByName = Mapping[str, Rows]  # by name; an absent tensor has no entry


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

    launches: tuple[Launch, ...]
    arguments: tuple[Words, ...]
    plan: Plan | None = None
    partials_shape: tuple[int, ...] | None = None  # of a scratch tensor named "partials"
    can_write_over_dy: bool = False

    def arguments_of(self, order: Sequence[str]) -> Arguments:
        """order: names of the tensors that a run has."""
        return Arguments(self.arguments, order)

    def fill(self, addresses: Mapping[str, int]) -> list[tuple]:
        """The words of each kernel's argument; addresses: of the tensors that are there."""
        arguments = self.arguments_of(list(addresses))
        words = arguments.words(tuple(addresses.values()))
        return [pick(words) for pick in arguments.picks]


def layout_of(num_cols: int, tensors: RowsByName) -> Layout:
    """What all tensors that a kernel reads or writes allow."""
    return Layout.of(num_cols, [each.layout() for each in tensors.values()])


def dtype_of(tensors: RowsByName, name: str) -> str | None:
    return tensors[name].dtype if name in tensors else None


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


def scale_rule_words(quantization: Quantization) -> tuple[int, int, int, int]:
    """struct ScaleRule of scales.cuh: the limits of an amax as bits, and two flags."""
    limits = abs(quantization.smallest_amax), quantization.upper_bound
    with np.errstate(over="ignore"):  # beyond float32 there is no limit
        smallest, upper = np.array(limits, np.float32).view(np.uint32).tolist()
    return smallest, upper, int(quantization.power_of_two), int(quantization.divides)


def _scale_words(problem: Problem, quantization: Quantization, num_rows: int) -> Words:
    """The arrays, struct ScalePlaces and struct ScaleRule of QuantizeScales."""
    places = [problem.num_scales, 1, num_rows + -num_rows % 4, int(quantization.layout == "packed")]
    if quantization.layout == "row":
        places = [problem.num_scales, problem.num_scales, 1, 0]
    arrays = [Address("scale"), Address("scale_inv"), Address("amax")]
    return [*arrays, *places, *scale_rule_words(quantization)]


# Functors.


def _functor_words(
    placed: Sequence[PlacedFunctor], problem: Problem, backward: bool = False
) -> Words:
    """The struct of the functors of one role (plan/functors.py): Chain or ChainGradient."""
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
