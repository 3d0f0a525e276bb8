"""A call that is checked and planned: the kernels to launch, and the words of their arguments in the order of the structs
in cuda_src (forward.cuh, backward.cuh, backward_parameters.cu). Every word has 8 bytes.

The same calls run on a GPU (cupynorm.norm) and on the CPU (cupynorm.gradient_check): a Machine says where.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, Protocol

from .arrays import Rows
from .devices import Device
from .dispatch import Launch, Plan, make_plan, pack_limit, quantize_launch, survey_launch
from .dtypes import DTYPES
from .problem import Problem, Tile

Parameter = tuple[int, str]  # address and dtype of a contiguous weight, bias, dweight or dbias


class Margins(NamedTuple):
    """sm_margin where each kind of call has its own; inference is a forward that nothing is to differentiate."""

    forward: int = 0
    backward: int = 0
    inference: int = 0


class Options(NamedTuple):
    """How, not what: none of these changes the result beyond rounding."""

    strategy: str | None = None
    tile: Tile | None = None
    statistics: str | None = None
    sm_margin: int | Margins = 0

    def of(self, kind: str) -> Options:
        """These with the one margin of a kind of call, a field of Margins: what a plan takes."""
        margin = self.sm_margin
        return self._replace(sm_margin=getattr(margin, kind)) if isinstance(margin, Margins) else self


DEFAULTS = Options()


class Quantization(NamedTuple):
    """How y becomes 8-bit floats. scaling: one of problem.SCALINGS; scale, amax: arrays of one float32, or None."""

    dtype: str
    scaling: str = "given"
    scale: Any = None
    amax: Any = None
    power_of_two: bool = False
    transpose: bool = False
    smallest_amax: float = 0.0  # a smaller one counts as that


class FusedOptions(NamedTuple):
    """What a call fuses with the norm: keywords of cupynorm.layer_norm, checked as far as they need no other argument."""

    residual_dtype: str | None = None
    row_scale: Any = None
    dropout_p: float = 0.0
    dropout_seed: Any = None
    weight1: Any = None
    bias1: Any = None
    round_x_hat: bool = False
    memory_efficient: bool = False
    quantization: Quantization | None = None

    @property
    def has_second(self) -> bool:
        """Whether there is a second output, y1."""
        return self.weight1 is not None or self.bias1 is not None

    @property
    def is_scaled(self) -> bool:
        """Whether anything multiplies the input."""
        return self.row_scale is not None or self.dropout_p > 0


NOTHING_FUSED = FusedOptions()


class Dropout(NamedTuple):
    """p: the probability that an element is dropped. seed_at: the address of an int64 seed, or 0: `seed` is it."""

    p: float = 0.0
    seed_at: int = 0
    seed: int = 0

    @property
    def words(self) -> tuple[int, int, int, float]:
        """The end of struct Factor of dropout.cuh."""
        return self.seed_at, self.seed, round(self.p * 2**32), 1 / (1 - self.p) if self.p < 1 else 0.0


NO_DROPOUT = Dropout()


class OfY(NamedTuple):
    """What a backward that has kept y in x's place needs of forward: its weight and bias, and the dtype of the arithmetic."""

    weight: Parameter | None
    bias: Parameter | None
    compute: str


class Recomputed(NamedTuple):
    """y, which a backward writes again from x, and forward's bias."""

    y: Rows
    bias: Parameter | None


class Machine(Protocol):
    """Where kernels run."""

    device: Device

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
        """A new array and its address."""

    def launch(self, launch: Launch, words: tuple) -> None:
        """Runs one kernel on its argument."""


def _layouts(rows: tuple[Rows | None, ...], parameters: tuple[Parameter | None, ...]) -> list[tuple[int, int, int]]:
    """For dispatch.pack_limit."""
    return [each.layout() for each in rows if each] + [
        (address, 0, DTYPES[dtype].itemsize) for address, dtype in filter(None, parameters)
    ]


def _is_pitched(*rows: Rows | None) -> bool:
    """For Problem.pitched."""
    return any(each.num_rows > 1 and each.row_stride != each.num_cols for each in rows if each)


class ForwardCall:
    """A planned forward of given shapes, dtypes, strides and alignment; addresses come with each run.
    y None: mean and rstd alone."""

    def __init__(
        self, device: Device, centered: bool, x: Rows, y: Rows | None, weight: Parameter | None, bias: Parameter | None,
        eps: float, zero_centered: bool, residual: Rows | None, sum: Rows | None, options: Options, *,
        row_scale: Parameter | None = None, drops: bool = False, y1: Rows | None = None, weight1: Parameter | None = None,
        bias1: Parameter | None = None, round_x_hat: bool = False, quantization: Quantization | None = None,
    ) -> None:  # fmt: skip
        # Where x, the residual and their sum are of one dtype and nothing multiplies x, the sum is ResidualLoad's.
        dtypes = {each.dtype for each in (x, residual, sum) if each}
        self.has_own_sum = len(dtypes) > 1 or row_scale is not None or drops
        own_sum = {}
        if self.has_own_sum:
            own_sum = {"input": x.dtype, "residual_dtype": residual.dtype if residual else None, "dropout": drops}
            own_sum |= {"row_scale": row_scale[1] if row_scale else None}
        problem = Problem(
            "forward", centered, x.num_cols, sum.dtype if sum else x.dtype, y=y.dtype if y else None,
            weight=weight[1] if weight else None, bias=bias[1] if bias else None, zero_centered=bool(zero_centered),
            residual=residual is not None and not self.has_own_sum,
            pack_limit=pack_limit(x.num_cols, _layouts((x, y, residual, sum, y1), (weight, bias, weight1, bias1))),
            pitched=_is_pitched(x, y, residual, sum, y1),
            y1=y1.dtype if y1 else None, weight1=weight1[1] if weight1 else None, bias1=bias1[1] if bias1 else None,
            round_x_hat=x.dtype if round_x_hat and DTYPES[x.dtype].itemsize < 4 else None,
            scaling=quantization.scaling if quantization else None,
            amax=quantization is not None and quantization.amax is not None, **own_sum,
        )  # fmt: skip
        self.plan: Plan = make_plan(problem, device, x.num_rows, **options._asdict())
        self.x_stride, self.y_stride, self.itemsize = x.row_stride, y.row_stride if y else 0, DTYPES[x.dtype].itemsize
        self.residual_stride = residual.row_stride if residual else None
        self.sum_stride = sum.row_stride if sum else 0
        self.y1_stride = y1.row_stride if y1 else None
        self.rule = () if quantization is None else (
            problem.num_scales, *rule_words((quantization.smallest_amax, quantization.power_of_two))
        )  # fmt: skip
        self.num_rows, launches = x.num_rows, self.plan.launches
        shares = (launches[0].num_first, launches[0].rows_of_first) if launches else (0, 0)
        self.tail = (x.num_rows, x.num_cols, float(eps), *shares)

    def words(self, x: int, y: int, weight: int, bias: int, mean: int, rstd: int, residual: int = 0, sum: int = 0) -> tuple:
        """struct Forward of forward.cuh; an address is 0 for what is absent or not wanted."""
        if self.residual_stride is None:
            return (x, self.x_stride, y, self.y_stride, weight, bias, mean, rstd, *self.tail)
        return (
            x, self.x_stride, residual, self.residual_stride, sum, self.sum_stride, y, self.y_stride, weight, bias, mean, rstd,
            *self.tail,
        )  # fmt: skip


class FusedForwardCall(ForwardCall):
    """A forward with fused options: the words of what a plain one lacks come in their places."""

    def words(
        self, x: int, y: int, weight: int, bias: int, mean: int, rstd: int, residual: int, sum: int, row_scale: int,
        dropout: Dropout, y1: int, weight1: int, bias1: int, scale: int = 0, scale_inv: int = 0, amax: int = 0,
    ) -> list[tuple]:  # fmt: skip
        """For each launch: struct Forward of forward.cuh."""

        def of_launch(turned: bool, mean: int, rstd: int) -> tuple:
            def rows(address: int, stride: int, itemsize: int) -> tuple[int, int]:
                return (address + (self.num_rows - 1) * stride * itemsize, -stride) if turned and address else (address, stride)

            load = rows(x, self.x_stride, self.itemsize)
            if self.has_own_sum or self.residual_stride is not None:
                load += rows(residual, self.residual_stride or 0, self.itemsize) + rows(sum, self.sum_stride, self.itemsize)
            if self.has_own_sum:
                load += (row_scale, *dropout.words)
            store = (*rows(y, self.y_stride, 1), weight, bias)
            if self.y1_stride is not None:
                store += (y1, self.y1_stride, weight1, bias1)
            if self.rule:
                store += (scale, scale_inv, amax, *self.rule)
            return (*load, *store, mean, rstd, *self.tail)

        words = [of_launch(False, mean, rstd) for _ in self.plan.launches[:1]]
        # A second launch, for y in 8 bits, finds the same statistics again. One scale is for all rows, so it may begin with the
        # last ones, which may still be in the L2 cache.
        turned = self.plan.problem.scaling == "tensor" and not self.has_own_sum
        return words + [of_launch(turned, 0, 0) for _ in self.plan.launches[1:]]


def rule_words(rule: tuple[float, bool]) -> tuple[int, int]:
    """struct ScaleRule of fp8.cuh. rule: the smallest amax, and whether scales are powers of two."""
    smallest_amax, power_of_two = rule
    return struct.unpack("I", struct.pack("f", abs(smallest_amax)))[0], int(power_of_two)


class QuantizeCall:
    """A planned quantisation of a matrix, or of a norm's y of one. y: its 8-bit dtype, x's own where it is only transposed.

    of_norm: None, or (centered, weight, bias, zero_centered). sums: None, or the dtype of sums of x over rows.
    rule: None where the scale is given, else what `rule_words` takes: then amax is known, and the scale is of it.
    """

    def __init__(
        self, x: Rows, y: str, of_norm: tuple | None, sums: str | None = None, rule: tuple[float, bool] | None = None
    ) -> None:  # fmt: skip
        centered, weight, bias, zero_centered = of_norm or (None, None, None, False)
        layouts = [x.layout()] + [(address, 0, DTYPES[dtype].itemsize) for address, dtype in filter(None, (weight, bias))]
        self.launches = quantize_launch(
            x.num_rows, x.num_cols, x.dtype, y, pack_limit(x.num_cols, layouts), centered=centered, weight=weight and weight[1],
            bias=bias and bias[1], zero_centered=zero_centered, sums=sums, scaling="tensor" if rule else "given",
        )  # fmt: skip
        self.is_scaled, self.is_norm = x.dtype != y, of_norm is not None
        self.x_stride, self.num_rows, self.num_cols = x.row_stride, x.num_rows, x.num_cols
        self.rule = rule_words(rule or (0.0, False))
        # One partial row of sums for each 128 rows.
        self.partials_shape = (-(-x.num_rows // 128), x.num_cols) if sums else None

    def words(
        self, x: int, data: int, transposed: int, scale: int = 0, scale_inv: int = 0, amax: int = 0, weight: int = 0,
        bias: int = 0, mean: int = 0, rstd: int = 0, partials: int = 0, sums: int = 0,
    ) -> list[tuple]:  # fmt: skip
        """For each launch: struct Quantize of quantize.cu, struct Parameters of backward_parameters.cu."""
        source = (x, self.x_stride)
        source += (scale, scale_inv, amax, *self.rule) if self.is_scaled else ()
        source += (weight, bias, mean, rstd) if self.is_norm else ()
        words = [(*source, data, self.num_cols, transposed, self.num_rows, self.num_cols, partials)]
        if self.partials_shape:
            words.append((0, partials, self.num_cols, 0, sums, *self.partials_shape))
        return words


class SurveyCall:
    """A planned survey of a matrix: of its largest magnitude, or of its sums over rows, in the dtype `sums`."""

    def __init__(self, device: Device, x: Rows, sums: str | None) -> None:
        self.launches, num_slabs, self.rows_of_slab = survey_launch(
            device, x.num_rows, x.num_cols, x.dtype, pack_limit(x.num_cols, [x.layout()]), sums
        )
        self.x_stride, self.num_rows, self.num_cols = x.row_stride, x.num_rows, x.num_cols
        self.partials_shape = (num_slabs, x.num_cols) if sums else None

    def words(self, x: int, partials: int = 0, sums: int = 0, amax: int = 0) -> list[tuple]:
        """For each launch: struct Survey of survey.cu, struct Parameters of backward_parameters.cu."""
        words = [(x, self.x_stride, self.num_rows, self.num_cols, self.rows_of_slab, partials, amax)]
        if self.partials_shape:
            words.append((0, partials, self.num_cols, 0, sums, *self.partials_shape))
        return words


class BackwardCall:
    """A planned backward of given shapes, dtypes, strides and alignment; addresses come with each run."""

    def __init__(
        self, device: Device, centered: bool, x: Rows, dy: Rows, weight: Parameter | None, zero_centered: bool,
        dx: Rows | None, dweight: Parameter | None, dbias: Parameter | None, dsum: Rows | None, options: Options, *,
        dresidual: Rows | None = None, row_scale: Parameter | None = None, drops: bool = False, of_y: OfY | None = None,
        recomputed: Recomputed | None = None,
    ) -> None:  # fmt: skip
        dsum = dsum if dx else None
        y_weight, y_bias, held = of_y or (None, None, x.dtype)
        y, bias = recomputed or (None, None)
        problem = Problem(
            "backward", centered, x.num_cols, held, weight=weight[1] if weight else None, zero_centered=bool(zero_centered),
            dy=dy.dtype, dx=dx.dtype if dx else None, dweight=dweight[1] if dweight else None,
            dbias=dbias[1] if dbias else None, dsum=dsum.dtype if dsum else None,
            pack_limit=pack_limit(
                x.num_cols, _layouts((x, dy, dx, dsum, dresidual, y), (weight, dweight, dbias, y_weight, y_bias, bias))
            ),
            pitched=_is_pitched(x, dy, dx, dsum, dresidual, y),
            y=x.dtype if of_y else None, y_weight=y_weight[1] if y_weight else None, y_bias=y_bias[1] if y_bias else None,
            dresidual=dresidual.dtype if dresidual else None, row_scale=row_scale[1] if row_scale else None, dropout=drops,
            recomputed=y.dtype if y else None, bias=bias[1] if bias else None,
        )  # fmt: skip
        self.plan: Plan = make_plan(problem, device, x.num_rows, **options._asdict())
        self.x_stride, self.dy_stride = x.row_stride, dy.row_stride
        self.dx_stride = dx.row_stride if dx else 0
        self.dsum_stride = dsum.row_stride if dsum else 0
        self.dresidual_stride = dresidual.row_stride if dresidual else 0
        self.y_stride = y.row_stride if y else None
        self.smallest = DTYPES[x.dtype].half_ulp if of_y else None
        self.splits = bool(dresidual or row_scale or drops)
        self.num_rows, self.num_cols, self.num_partials = x.num_rows, x.num_cols, self.plan.num_partials
        # One partial row of sums for each block or cluster, of dweight first.
        self.partials_shape = (
            (bool(dweight) + bool(dbias), self.plan.num_partials, x.num_cols) if self.plan.num_partials else None
        )
        self.dbias_offset = self.plan.num_partials * x.num_cols * DTYPES[problem.compute].itemsize if dweight else 0
        self.has_dweight, self.has_dbias, self.has_dsum = bool(dweight), bool(dbias), bool(dsum)
        sources = [launch.kernel.source for launch in self.plan.launches]
        self.sums_up = "backward_parameters.cu" in sources
        self.goes_by_rows = len(sources) > self.sums_up
        # A row is read before it is written, but by what sums up dy itself, after that.
        self.can_write_over_dy = (
            dx is not None and (dx.dtype, dx.row_stride) == (dy.dtype, dy.row_stride)
            and not (self.sums_up and self.partials_shape is None)
        )  # fmt: skip

    def words(
        self, x: int, dy: int, weight: int, dx: int, mean: int, rstd: int, dweight: int, dbias: int, dsum: int, partials: int
    ) -> list[tuple]:  # fmt: skip
        """For each launch of the plan: struct Backward of backward.cuh, struct Parameters of backward_parameters.cu."""
        dweight_partials = partials if self.has_dweight else 0
        dbias_partials = partials + self.dbias_offset if self.has_dbias else 0
        words = []
        if self.goes_by_rows:
            # dx, ..: struct Store without parameters, or struct AddStore
            words.append((
                x, self.x_stride, dy, self.dy_stride, weight, dx, self.dx_stride, dsum if self.has_dsum else 0,
                self.dsum_stride, mean, rstd, dweight_partials, dbias_partials, self.num_rows, self.num_cols,
            ))  # fmt: skip
        if self.sums_up and self.partials_shape is None:
            words.append((x, self.x_stride, dy, self.dy_stride, mean, rstd, dweight, dbias, self.num_rows, self.num_cols))
        elif self.sums_up:
            words.append((dweight_partials, dbias_partials, self.num_cols, dweight, dbias, self.num_partials, self.num_cols))
        return words


class FusedBackwardCall(BackwardCall):
    """A backward with fused options: the words of what a plain one lacks come in their places."""

    def words(
        self, x: int, dy: int, weight: int, dx: int, mean: int, rstd: int, dweight: int, dbias: int, dsum: int, partials: int,
        dresidual: int, row_scale: int, dropout: Dropout, y_weight: int, y_bias: int, y: int, bias: int,
    ) -> list[tuple]:  # fmt: skip
        words = super().words(x, dy, weight, dx, mean, rstd, dweight, dbias, dsum, partials)
        if self.goes_by_rows:
            store, rest = words[0][:9], words[0][9:]
            if self.splits:
                store += (dresidual, self.dresidual_stride, row_scale, *dropout.words)
            if self.y_stride is not None:
                store += (y, self.y_stride, weight, bias)
            words[0] = (*store, *rest)
        if self.smallest is not None:
            # struct LoadXHat where struct Load would be
            reads_rows = [self.goes_by_rows] * self.goes_by_rows + [self.partials_shape is None] * self.sums_up
            for at, reads in enumerate(reads_rows):
                if reads:
                    words[at] = (*words[at][:2], y_weight, y_bias, self.smallest, *words[at][2:])
        return words


def run_forward(
    machine: Machine, centered: bool, x: Rows, y: Rows | None, weight: Parameter | None, bias: Parameter | None, mean: int,
    rstd: int, eps: float, zero_centered: bool = False, residual: Rows | None = None, sum: Rows | None = None,
    options: Options = DEFAULTS, *, row_scale: Parameter | None = None, dropout: Dropout = NO_DROPOUT, y1: Rows | None = None,
    weight1: Parameter | None = None, bias1: Parameter | None = None, round_x_hat: bool = False,
    quantization: Quantization | None = None, of_scales: tuple[int, int, int] = (0, 0, 0),
) -> Plan:  # fmt: skip
    """Plans and launches a forward on arrays that are checked and allocated; mean and rstd are addresses, 0 if not wanted.

    of_scales: the addresses of scale, scale_inv and amax.
    """
    call = FusedForwardCall(
        machine.device, centered, x, y, weight, bias, eps, zero_centered, residual, sum, options, row_scale=row_scale,
        drops=dropout.p > 0, y1=y1, weight1=weight1, bias1=bias1, round_x_hat=round_x_hat, quantization=quantization,
    )  # fmt: skip
    words = call.words(
        x.pointer, y.pointer if y else 0, weight[0] if weight else 0, bias[0] if bias else 0, mean, rstd,
        residual.pointer if residual else 0, sum.pointer if sum else 0, row_scale[0] if row_scale else 0, dropout,
        y1.pointer if y1 else 0, weight1[0] if weight1 else 0, bias1[0] if bias1 else 0, *of_scales,
    )  # fmt: skip
    for launch, launch_words in zip(call.plan.launches, words):
        machine.launch(launch, launch_words)
    return call.plan


def run_backward(
    machine: Machine, centered: bool, x: Rows, dy: Rows, mean: int, rstd: int, weight: Parameter | None, zero_centered: bool,
    dx: Rows | None, dweight: Parameter | None, dbias: Parameter | None, dsum: Rows | None = None, options: Options = DEFAULTS,
    *, dresidual: Rows | None = None, row_scale: Parameter | None = None, dropout: Dropout = NO_DROPOUT,
    of_y: OfY | None = None, recomputed: Recomputed | None = None,
) -> Plan:  # fmt: skip
    """Plans and launches a backward on arrays that are checked and allocated; None for a gradient that is not wanted."""
    call = FusedBackwardCall(
        machine.device, centered, x, dy, weight, zero_centered, dx, dweight, dbias, dsum, options, dresidual=dresidual,
        row_scale=row_scale, drops=dropout.p > 0, of_y=of_y, recomputed=recomputed,
    )  # fmt: skip
    y, bias = recomputed or (None, None)
    partials, address = machine.empty(call.partials_shape, call.plan.problem.compute) if call.partials_shape else (None, 0)
    words = call.words(
        x.pointer, dy.pointer, weight[0] if weight else 0, dx.pointer if dx else 0, mean, rstd, dweight[0] if dweight else 0,
        dbias[0] if dbias else 0, dsum.pointer if dsum else 0, address, dresidual.pointer if dresidual else 0,
        row_scale[0] if row_scale else 0, dropout,
        *(parameter[0] if parameter else 0 for parameter in (of_y or (None, None))[:2]),
            y.pointer if y else 0, bias[0] if bias else 0,
    )  # fmt: skip
    for launch, launch_words in zip(call.plan.launches, words):
        machine.launch(launch, launch_words)
    return call.plan
