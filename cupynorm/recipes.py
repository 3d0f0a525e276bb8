"""torch: the recipes of cupynorm.fp8_autocast, which say where scales of 8-bit floats come from.

Examples:
    >>> cupynorm.recipes.BlockScaling().fp8_format.name
    'E4M3'

DelayedScaling   from the amaxes of earlier steps; this step's amax is recorded
CurrentScaling   largest / amax of the tensor itself
BlockScaling     the same for each 128 columns of a row, and for each 128 x 128 of a weight
"""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .options import shown

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0, torch.int8: 127.0}
LARGEST_FLOAT32 = torch.finfo(torch.float32).max
BLOCK_SIZE = 128
_LARGEST_MARGIN = 126


class Format(enum.Enum):
    """The 8-bit floats of forward and backward.

    Examples:
        >>> cupynorm.recipes.Format.HYBRID.value
        (torch.float8_e4m3fn, torch.float8_e5m2)

    E4M3: float8_e4m3fn in both. HYBRID: float8_e4m3fn in forward, float8_e5m2 for gradients.
    """

    HYBRID = (E4M3, E5M2)  # first: the next line hides the name
    E4M3 = (E4M3, E4M3)


def _check(
    recipe: Any, name: str, is_right: bool, expected: str, error: type[Exception] = TypeError
) -> None:
    if not is_right:
        raise error(f"{name} is {shown(getattr(recipe, name))}; expected {expected}")


def _check_format(recipe: Any) -> None:
    is_format = isinstance(recipe.fp8_format, Format)
    _check(recipe, "fp8_format", is_format, "Format.E4M3 or Format.HYBRID")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class DelayedScaling:
    """Scales from the amaxes of earlier steps, so that no tensor is read twice.

    The arguments and formulas are TransformerEngine's.

    Examples:
        >>> norm, x = cupynorm.RMSNorm(2), torch.tensor([[3.0, 4.0]], requires_grad=True)
        >>> recipe = cupynorm.recipes.DelayedScaling(amax_history_len=16)
        >>> for step in range(2):
        ...     with cupynorm.fp8_autocast(recipe=recipe):
        ...         y = norm(x, fp8_output=True)
        ...     print(round(1 / y.scale_inv.item(), 1))
        1.0
        396.0

    margin: the largest value maps to largest / 2^margin.
    fp8_format: a Format.
    amax_history_len: the number of steps whose amaxes are kept.
    amax_compute_algo: "max" of the history, the "most_recent" amax, or a callable. The callable
        takes the history [len, num_tensors], whose first row is this step's, and returns
        [num_tensors].
    scaling_factor_compute_algo: None, or a callable (amax, scale, fp8_max, recipe) -> scale of
        tensors [num_tensors].
    reduce_amax: take the largest amax of all ranks of the group where torch.distributed runs.
    fp8_dpa, fp8_mha: for attention, which this library does not have; they must be False.

    After each step scale = largest / 2^margin / amax, and at most float32's largest value.
    An amax of 0, infinity or NaN leaves the scale unchanged. A tensor whose amax of this step is 0
    was not used: neither its scale nor its history changes.

    Raises ValueError or TypeError for an invalid argument.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: (
        Callable[[Tensor, Tensor, Tensor, DelayedScaling], Tensor] | None
    ) = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        margin, length, most = self.margin, self.amax_history_len, _LARGEST_MARGIN
        of_amax, of_scale = self.amax_compute_algo, self.scaling_factor_compute_algo
        _check_format(self)
        for name in ("fp8_dpa", "fp8_mha"):
            is_off = getattr(self, name) is False
            _check(self, name, is_off, "False: there is no attention here", ValueError)
        is_finite = _is_number(margin) and -math.inf < margin < math.inf
        _check(self, "margin", is_finite, "a finite number")
        in_range = f"-{most} to {most}, as scales are of float32"
        _check(self, "margin", -most <= margin <= most, in_range, ValueError)
        is_int = isinstance(length, numbers.Integral) and not isinstance(length, bool)
        _check(self, "amax_history_len", is_int, "an int, 1 or more")
        _check(self, "amax_history_len", length >= 1, "1 or more", ValueError)
        is_algo = callable(of_amax) or str(of_amax) in ("max", "most_recent")
        _check(self, "amax_compute_algo", is_algo, "'max', 'most_recent' or a callable", ValueError)
        _check(self, "reduce_amax", isinstance(self.reduce_amax, bool), "True or False")
        is_formula = of_scale is None or callable(of_scale)
        _check(self, "scaling_factor_compute_algo", is_formula, "None or a callable")


@dataclass(frozen=True)
class CurrentScaling:
    """The scale of each tensor from its own amax.

    Examples:
        >>> norm, x = cupynorm.RMSNorm(2), torch.tensor([[3.0, 4.0]])
        >>> with cupynorm.fp8_autocast(recipe=cupynorm.recipes.CurrentScaling(power_of_two=True)):
        ...     y = norm(x, fp8_output=True)
        >>> 1 / y.scale_inv.item()
        256.0

    fp8_format: a Format.
    amax_epsilon: a smaller amax counts as this value.
    power_of_two: round scales down to powers of two.

    An amax of 0, infinity or NaN gives scale 1.
    Raises ValueError or TypeError for an invalid argument.
    """

    fp8_format: Format = Format.HYBRID
    amax_epsilon: float = 0.0
    power_of_two: bool = False

    def __post_init__(self) -> None:
        amax = self.amax_epsilon
        _check_format(self)
        _check(self, "power_of_two", isinstance(self.power_of_two, bool), "True or False")
        _check(self, "amax_epsilon", _is_number(amax), "a number that is 0 or more")
        expected = "0 or more, and no more than float32 holds"
        _check(self, "amax_epsilon", 0 <= amax <= LARGEST_FLOAT32, expected, ValueError)


@dataclass(frozen=True)
class BlockScaling:
    """A scale for each 128 elements along the summed dimension, and for each 128 x 128 of a weight.

    Examples:
        >>> norm, x = cupynorm.RMSNorm(256), torch.ones(4, 256)
        >>> with cupynorm.fp8_autocast(recipe=cupynorm.recipes.BlockScaling()):
        ...     y = norm(x, fp8_output=True)
        >>> tuple(y.scale_inv.shape)
        (4, 2)

    fp8_format: a Format.
    power_of_two: round scales down to powers of two.

    The layer multiplies the dequantised values. On a GPU it does so in bfloat16, which holds them
    exactly where scales are powers of two, else in float32. This recipe therefore gives the
    numerics of 8-bit floats, but not the speed of 8-bit products.

    Raises TypeError for an invalid argument.
    """

    fp8_format: Format = Format.E4M3
    power_of_two: bool = True

    def __post_init__(self) -> None:
        _check_format(self)
        _check(self, "power_of_two", isinstance(self.power_of_two, bool), "True or False")


RECIPES = (DelayedScaling, CurrentScaling, BlockScaling)
Recipe = DelayedScaling | CurrentScaling | BlockScaling
