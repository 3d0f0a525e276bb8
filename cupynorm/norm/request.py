"""A call as one value: its operands and its options.

A request travels whole from the API to the launch.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

from ..plan.functor_text import Functors
from .launch_choice import Launch

Array = Any  # a CuPy array, torch tensor, NumPy array, or any object with __dlpack__


def replaced(record: Any, **changes: object) -> Any:
    """record._replace(**changes) of a named tuple. torch.compile cannot trace that before 2.9."""
    names = type(record)._fields
    values = [changes.get(name, value) for name, value in zip(names, record)]
    return type(record)(*values)


class Quantization(NamedTuple):
    """How y becomes 8 bits: cupynorm.Quantize without its arrays.

    scaling: one of cupynorm.plan.problem.SCALINGS. smallest_amax: a smaller amax counts as this.
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


def is_plain(request: ForwardRequest) -> bool:
    """Whether a forward uses no option beyond norm, residual and out."""
    operands, options = request
    return (
        not options.round_x_hat
        and not options.memory_efficient
        and options.quantization is None
        and operands.functors is None
    )
