"""A call as one value: its arrays, its options, and what it returns.

A request travels whole from the API to the launch. Launch and Quantize are checked when they are
made.
"""

from __future__ import annotations

import functools
import numbers
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from math import inf
from typing import Any, NamedTuple

from ..dispatch.functor_text import Functors
from ..dispatch.model import check_path
from ..dispatch.problem import PATHS, Tile
from ..dispatch.strategies import StatisticsName, StrategyName, check_strategy
from ..dtypes import DTYPES, EIGHT_BITS
from ..gpu import arrays
from ..options import check_choice, check_flags, check_real, is_int, shown

Array = Any  # a CuPy array, torch tensor, NumPy array, or any object with __dlpack__


def replaced(record: Any, **changes: object) -> Any:
    """record._replace(**changes) of a named tuple. torch.compile cannot trace that before 2.9."""
    names = type(record)._fields
    values = [changes.get(name, value) for name, value in zip(names, record)]
    return type(record)(*values)


# How a kernel is chosen.

_TILE_FIELDS = tuple(each.name for each in fields(Tile))


class Margins(NamedTuple):
    """sm_margin for each kind of call. inference: a forward whose gradients are not recorded."""

    forward: int = 0
    backward: int = 0
    inference: int = 0


@dataclass(frozen=True)
class Launch:
    """How a kernel is chosen and launched. None of it changes a result beyond rounding.

    Examples:
        >>> cupynorm.Launch("warp", {"pack_size": 8, "threads_per_row": 32}).tile.block_size
        32
        >>> cupynorm.Launch(sm_margin={"backward": 16}).sm_margin
        Margins(forward=0, backward=16, inference=0)

    strategy: a name of cupynorm.STRATEGIES. None: the width of a row decides. It holds for backward
        too.
    tile: a cupynorm.Tile of that strategy, or a dict of its fields. The backward of autograd
        chooses its own.
    statistics: "two_pass" or "welford". None: the strategy decides.
    sm_margin: multiprocessors to leave free for other kernels, in forward and backward. Or a dict
        with values for "forward", "backward" and "inference" (a forward whose gradients are not
        recorded); a missing value is 0.

    It does not apply to NumPy arrays and CPU tensors: a warning says so once.

    Raises TypeError or ValueError for names that do not exist, for a tile without a strategy or
    with a path that the strategy lacks, and for a margin below 0. A call raises ValueError for a
    strategy or tile that does not fit its rows.
    """

    strategy: StrategyName | None = None
    tile: Tile | Mapping[str, Any] | None = None
    statistics: StatisticsName | None = None
    sm_margin: int | Mapping[str, int] | Margins = 0

    def __post_init__(self) -> None:
        tile = tile_of(self.tile)
        check_strategy(self.strategy, self.statistics, tile)
        if tile is not None and tile.path is not None:
            # Now: tiles are compared without their path, so a prepared call does not know it.
            check_path(self.strategy, tile)
        object.__setattr__(self, "tile", tile)
        object.__setattr__(self, "sm_margin", _margins(self.sm_margin))


def checked_launch(launch: object) -> Launch | None:
    """The launch of a call. Raises TypeError for what is neither a Launch nor None."""
    if launch is None or isinstance(launch, Launch):
        return launch
    raise TypeError(f"launch is {arrays.type_in_words(launch)}; expected a cupynorm.Launch or None")


def planned_with(launch: Launch | None, kind: str) -> dict[str, Any]:
    """What plan.dispatch.make_plan takes of a launch. kind: of the call, a field of Margins."""
    if launch is None:
        return {}
    chosen = {name: getattr(launch, name) for name in ("strategy", "tile", "statistics")}
    return chosen | {"sm_margin": margin_of(launch, kind)}


def margin_of(launch: Launch | None, kind: str) -> int:
    """Multiprocessors that a call of this kind leaves free."""
    margin = 0 if launch is None else launch.sm_margin
    return getattr(margin, kind) if isinstance(margin, Margins) else margin


def of_backward(launch: Launch | None) -> Launch | None:
    """The launch of the backward that autograd runs.

    A tile belongs to one kernel; a strategy is meant for both directions.
    """
    return launch if launch is None or launch.tile is None else replace(launch, tile=None)


def warn_on_host(launch: Launch | None) -> None:
    """Warns, once in a process, that a launch was given for arrays on the CPU."""
    if launch is not None:
        _warn()


@functools.cache
def _warn() -> None:
    warnings.warn(
        "launch was given for arrays on the CPU, where no kernel runs; it does not apply",
        stacklevel=2,
    )


def tile_of(tile: object) -> Tile | None:
    """A caller's tile as a Tile. Raises TypeError or ValueError for what is none."""
    if tile is None:
        return None
    if not isinstance(tile, Tile):
        if not isinstance(tile, Mapping):
            raise TypeError(
                f"tile is {arrays.type_in_words(tile)}; "
                "expected a cupynorm.Tile or a dict of its fields"
            )
        try:
            tile = Tile(**tile)
        except TypeError as error:
            names, (first, second, *others) = ", ".join(map(str, tile)), _TILE_FIELDS
            raise ValueError(
                f"tile has fields {names}; "
                f"expected {first}, {second} and some of {', '.join(others)}"
            ) from error
    for name in _TILE_FIELDS:
        value = getattr(tile, name)
        if name == "path":
            check_choice("path of a tile", value, (*PATHS, None))
        else:
            if not is_int(value):
                raise ValueError(f"tile has {name} {shown(value)}; expected an int")
    return tile


def _margins(sm_margin: object) -> int | Margins:
    if isinstance(sm_margin, Margins):
        sm_margin = sm_margin._asdict()
    if not isinstance(sm_margin, Mapping):
        return _margin(sm_margin)
    if not set(sm_margin) <= set(Margins._fields):
        values = ", ".join(map(str, sm_margin))
        raise ValueError(f"sm_margin has {values}; expected some of {', '.join(Margins._fields)}")
    return Margins(**{kind: _margin(margin) for kind, margin in sm_margin.items()})


def _margin(value: object) -> int:
    if not is_int(value) or value < 0:
        given = shown(value)
        raise ValueError(f"sm_margin is {given}; expected a number of multiprocessors, 0 or more")
    return int(value)


# How y becomes 8 bits.


class Quantization(NamedTuple):
    """How y becomes 8 bits: cupynorm.Quantize without its arrays.

    scaling: one of dispatch.problem.SCALINGS. smallest_amax: a smaller amax counts as this.
    divides: the scale among the operands is a scale_inv.
    """

    dtype: str
    scaling: str = "given"
    power_of_two: bool = False
    transpose: bool = False
    smallest_amax: float = 0.0
    upper_bound: float = inf
    divides: bool = False
    layout: str = "row"


_COMPUTED = ("tensor", "row", "block")

_LAYOUTS = ("row", "column", "packed")


@dataclass(frozen=True, eq=False)
class Quantize:
    """An out_dtype of 8 bits: data = round(y * scale), or round(y / scale_inv), saturated.

    Examples:
        >>> how = cupynorm.Quantize("float8_e4m3fn", "row")
        >>> cupynorm.rms_norm(np.array([[3.0, 4.0]]), 2, out_dtype=how).scale_inv
        array([[0.00252538]], dtype=float32)

    dtype: "float8_e4m3fn", "float8_e5m2" or "int8", a torch or an ml_dtypes dtype. Their largest
        values are 448, 57344 and 127. int8 takes a given scale or "row", saturates to -128..127,
        and its NaN is 0.
    scale: an array of one float32 on the input's device, which the kernel reads there. None: 1. Or
        "tensor", "row" or "block" (group_size columns of a row): scales are computed from the
        largest magnitude (amax) of each part of y, as largest / amax. They are 1 where amax is 0,
        infinite or NaN. "tensor" reads the input twice; so does "block" where a block is not held
        by neighbouring lanes.
    scale_inv: instead of scale. y is multiplied by 1 / scale_inv, rounded to float32. The
        result's scale_inv has the same bits.
    group_size: 128 or 64.
    amax: with a given scale: an array of one float32, 0 (not -0) or more, on the input's device, in
        memory of its own. It becomes the maximum of itself and all |y| of the call. The scale of a
        later call can be computed from it.
    upper_bound: a positive number: a larger amax counts as this where scales are computed.
    power_of_two: round scales that are computed down to powers of two.
    layout: of scales of blocks. "row": [num_rows, num_blocks], contiguous. "column": the same with
        strides (1, num_rows rounded up to a multiple of 4), as DeepGEMM takes them on Hopper.
        "packed", with power_of_two: exponents (UE8M0), four blocks of a row in an int32, with the
        strides of "column", as DeepGEMM takes them on Blackwell.
    transpose: with one scale for all of y: also return y.transposed, [num_cols, num_rows]. On a GPU
        a second kernel transposes the data.

    A computed scale is at most the largest float32, and an amax below 2^-126 counts as 0.

    Raises TypeError or ValueError for options that do not fit together.
    """

    dtype: Any
    scale: Array | str | None = None
    _: KW_ONLY
    scale_inv: Array | None = None
    group_size: int = 128
    amax: Array | None = None
    upper_bound: float | None = None
    power_of_two: bool = False
    layout: str = "row"
    transpose: bool = False
    # dtype, the given scale or scale_inv, amax, and the rest.
    parts: tuple[str, Array | None, Array | None, Quantization] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        dtype, scale, bound = name_of_8_bits(self.dtype), self.scale, self.upper_bound
        if dtype is None:
            expected = ", ".join(EIGHT_BITS)
            raise TypeError(f"dtype is {shown(self.dtype)}; expected one of {expected}")
        named = scale if isinstance(scale, str) else None
        if named and named not in _COMPUTED:
            names = ", ".join(map(repr, _COMPUTED))
            raise ValueError(
                f"scale is {scale!r}; expected {names}, an array of one float32, or None"
            )
        for name, given in (("scale", None if named else scale), ("scale_inv", self.scale_inv)):
            if isinstance(given, (numbers.Number, str)):
                raise TypeError(
                    f"{name} is {shown(given)}; expected an array of one float32 where the input "
                    "is, so that no step waits for its value"
                )
        if type(self.group_size) is not int or self.group_size not in (64, 128):
            raise ValueError(f"group_size is {shown(self.group_size)}; expected 128 or 64")
        check_flags(power_of_two=self.power_of_two, transpose=self.transpose)
        check_choice("layout", self.layout, _LAYOUTS)
        if bound is not None and not check_real("upper_bound", bound, "a positive number") > 0:
            raise ValueError(f"upper_bound is {bound!r}; expected a positive number")
        object.__setattr__(self, "dtype", dtype)
        self._check_together(named)
        rest = Quantization(
            dtype,
            "block64" if self.group_size == 64 else named or "given",
            bool(self.power_of_two),
            bool(self.transpose),
            upper_bound=inf if bound is None else float(bound),
            divides=self.scale_inv is not None,
            layout=self.layout,
        )
        given = self.scale_inv if named or scale is None else scale
        object.__setattr__(self, "parts", (dtype, given, self.amax, rest))

    def _check_together(self, named: str | None) -> None:
        """Raises ValueError for values that exclude each other."""
        if self.scale is not None and self.scale_inv is not None:
            raise ValueError("scale and scale_inv were given; expected one of them")
        computed = " or ".join(map(repr, _COMPUTED))
        in_blocks, is_int8 = named == "block", self.dtype == "int8"
        for is_wrong, given, expected in (
            (is_int8 and named in ("tensor", "block"), "int8", "'row', or one that is given"),
            (self.amax is not None and named, "amax", "one that is given, or none"),
            (self.power_of_two and not named, "power_of_two", computed),
            (self.upper_bound is not None and not named, "upper_bound", computed),
            (self.transpose and named in ("row", "block"), "transpose", "one for all of y"),
            (self.layout != "row" and not in_blocks, f"layout {self.layout!r}", "'block'"),
            (self.group_size != 128 and not in_blocks, "group_size", "'block'"),
        ):
            if is_wrong:
                scale = repr(named) if named else "that is given, or none"
                raise ValueError(f"{given} was given with a scale {scale}; expected {expected}")
        if self.layout == "packed" and not self.power_of_two:
            raise ValueError("layout is 'packed'; expected power_of_two=True with it")


def name_of_8_bits(dtype: object) -> str | None:
    """The name of an 8-bit dtype, given by name or as torch's or ml_dtypes' dtype; else None."""
    # The first test keeps ordinary calls short, and torch.compile can follow it.
    if dtype is None or (dtype.__class__ is str and dtype in DTYPES):
        return None
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    for each in (name, getattr(dtype, "__name__", None)):
        if each in EIGHT_BITS:
            return each
    return None


def parts_of(out_dtype: Any) -> tuple[Any, Array | None, Array | None, Quantization | None]:
    """out_dtype as one that is hashable, the scale and amax of an 8-bit y, and how it is made."""
    if out_dtype is None:
        return None, None, None, None
    if out_dtype.__class__ is Quantize:
        return out_dtype.parts
    name = name_of_8_bits(out_dtype)
    if name is None:
        return out_dtype, None, None, None
    return name, None, None, Quantization(name)


# Forward and backward.


class ForwardOperands(NamedTuple):
    """The arrays of a forward; None for what is absent.

    out, out_sum: where y and the sum go. They may be the input and the residual.
    scale: the given scale or scale_inv of an 8-bit y.
    """

    input: Array
    weight: Array | None = None
    bias: Array | None = None
    residual: Array | None = None
    out: Array | None = None
    out_sum: Array | None = None
    scale: Array | None = None
    amax: Array | None = None
    functors: Functors | None = None


class ForwardOptions(NamedTuple):
    """The options of a forward, named as the keywords of cupynorm.layer_norm.

    memory_efficient: a module's: autograd keeps y and not the normalised row.
    """

    centered: bool
    extents: tuple[int, ...]
    eps: float | None
    zero_centered_weight: bool = False
    out_dtype: Any = None
    round_x_hat: bool = False
    quantization: Quantization | None = None
    launch: Launch | None = None
    memory_efficient: bool = False


class ForwardRequest(NamedTuple):
    """One forward. After the checks, arrays are CuPy's, torch's or NumPy's and dtypes are names."""

    operands: ForwardOperands
    options: ForwardOptions


def is_plain(request: ForwardRequest) -> bool:
    """Whether a forward uses no option beyond norm, residual and out."""
    operands, options = request
    return (
        options.round_x_hat is False
        and not options.memory_efficient
        and options.quantization is None
        and operands.functors is None
    )


class BackwardOperands(NamedTuple):
    """The arrays of a backward. x is what was normalised.

    bias is needed where y is recomputed.
    functors: those of forward. A store needs bias. input: what a load was applied to, where its
    backward lines read that and x is not it.
    """

    dy: Array
    x: Array
    mean: Array | None
    rstd: Array
    weight: Array | None = None
    dsum: Array | None = None
    bias: Array | None = None
    input: Array | None = None
    functors: Functors | None = None


class BackwardOptions(NamedTuple):
    """The options of a backward, named as the keywords of cupynorm.layer_norm_backward.

    recompute: also write y again, in dy's dtype.
    overwrite_dy: nobody else needs dy, so the gradient may be written in its place.
    functor_gradients: names of the functors' arrays whose gradients are wanted, as
    "silu_gate.gate". With functors, "dx" is among the gradients.
    applies_load: x is what a load was applied to, and backward applies it again.
    """

    centered: bool
    extents: tuple[int, ...]
    zero_centered_weight: bool = False
    gradients: tuple[str, ...] = ("dx", "dweight", "dbias")
    dx_dtype: Any = None
    dweight_dtype: Any = None
    dbias_dtype: Any = None
    dresidual_dtype: Any = None
    recompute: bool = False
    overwrite_dy: bool = False
    functor_gradients: tuple[str, ...] = ()
    applies_load: bool = False
    launch: Launch | None = None


class BackwardRequest(NamedTuple):
    """One backward of one output."""

    operands: BackwardOperands
    options: BackwardOptions


# Results.


class Forward(NamedTuple):
    """What layer_norm_forward and rms_norm_forward return.

    Examples:
        >>> x = np.array([[1.0, 3.0]])
        >>> result = cupynorm.layer_norm_forward(x, 2, residual=x)
        >>> result.sum, result.mean
        (array([[2., 6.]]), array([4.]))

    y: of the input's shape and dtype, or of out_dtype; a QuantizedTensor for one of 8 bits.
    mean, rstd: of the leading shape, float32, float64 for a float64 sum. mean is None for rms_norm.
    sum: what was normalised: input + residual in the residual's dtype. Without a residual the input
        itself; with functors on x, what they make, rounded to the input's dtype.
    """

    y: Array
    mean: Array | None
    rstd: Array
    sum: Array


class Backward(NamedTuple):
    """The gradients that were requested, None for the others.

    Examples:
        >>> x = np.array([[1.0, 3.0]])
        >>> saved = cupynorm.layer_norm_forward(x, 2, eps=0.0)
        >>> wanted = ("dweight", "dbias")
        >>> cupynorm.layer_norm_backward(x, x, 2, saved.mean, saved.rstd, gradients=wanted)
        Backward(dx=None, dweight=array([-1.,  3.]), dbias=array([1., 3.]))

    dx: of the shape and dtype of x. It is also the gradient of the residual.
    dweight, dbias: of normalized_shape, summed over rows, in the dtype of the weight (of x without
        one) unless dweight_dtype or dbias_dtype says otherwise.
    """

    dx: Array | None
    dweight: Array | None
    dbias: Array | None


class FusedBackward(NamedTuple):
    """The gradients of a forward with functors or mixed dtypes, None for those not requested.

    Examples:
        >>> x, residual = np.array([[3.0, 4.0]], np.float32), np.array([[0.0, 0.0]])
        >>> saved = cupynorm.rms_norm_forward(x, 2, residual=residual, eps=0.0)
        >>> dy = np.array([[1.0, 0.0]])
        >>> result = cupynorm.rms_norm_backward(dy, saved.sum, 2, saved.rstd, dx_dtype="float32")
        >>> type(result).__name__, result.dx.round(3)
        ('FusedBackward', array([[ 0.181, -0.136]], dtype=float32))

    dx: that of the input alone, of the shape of x, in dx_dtype or else the dtype of x.
    dweight, dbias: as in Backward.
    dresidual: that of the residual, of the shape of x, in dresidual_dtype or else the dtype of x.
    functors: those of the functors' arrays, in their shapes and dtypes, if "functors" was among the
        gradients: of functors on x, then of those on y.
    """

    dx: Array | None
    dweight: Array | None
    dbias: Array | None
    dresidual: Array | None
    functors: tuple[Array, ...] = ()


class Gradients(NamedTuple):
    """What one backward kernel gives. y is None unless it was recomputed.

    functors: the gradients of the functors' arrays that are wanted, in their order.
    """

    dx: Array | None
    dweight: Array | None
    dbias: Array | None
    dresidual: Array | None = None
    y: Array | None = None
    functors: tuple[Array, ...] = ()


GRADIENTS = FusedBackward._fields
