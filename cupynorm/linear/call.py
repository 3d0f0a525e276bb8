"""A call of a norm and the linear layer after it: operands, options and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..dtypes import DTYPES
from ..gpu import arrays
from ..norm import checks
from ..norm.request import Array, Launch

FUSED = (None, "plain", "kernel")


def is_fused(fused: str | None) -> bool:
    """Whether `fused` names a way that makes no normalised tensor."""
    return fused not in (None, "plain")


def has_no_normalized(name: str, fused: str) -> str:
    """The message for a call that wants the normalised tensor from a way that makes none."""
    return (
        f"{name} is given with fused={fused!r}, in which no normalised tensor exists; "
        "expected one of them"
    )


def check_fused(fused: object) -> None:
    """Raises ValueError for what is none of FUSED."""
    if fused == "fold":
        raise ValueError(
            "fused is 'fold', which was removed; expected None or 'plain', which are faster"
        )
    if fused not in FUSED:
        *others, last = map(repr, FUSED)
        raise ValueError(f"fused is {fused!r}; expected {', '.join(others)} or {last}")


# Requests.


class Operands(NamedTuple):
    """The arrays of a call.

    input, residual: [..., in_features]. norm_weight, norm_bias: [in_features].
    weights, biases: parts of one linear layer, [part, in_features] and [part], whose rows follow
        each other; biases is empty where there are none.
    """

    input: Array
    residual: Array | None
    norm_weight: Array | None
    norm_bias: Array | None
    weights: Sequence[Array]
    biases: Sequence[Array]

    @classmethod
    def split(cls, tensors: Sequence[Array | None], num_weights: int) -> Operands:
        """The operands whose all_of these tensors are."""
        weights, biases = tensors[4 : 4 + num_weights], tensors[4 + num_weights :]
        return cls(*tensors[:4], weights, biases)


def all_of(operands: Operands) -> tuple[Array | None, ...]:
    """The arrays in one tuple, in the order of the fields."""
    input, residual, norm_weight, norm_bias, weights, biases = operands
    return (input, residual, norm_weight, norm_bias, *weights, *biases)


class LinearOptions(NamedTuple):
    """What a call depends on besides its operands.

    eps: None for RMSNorm's default. fused: one of FUSED. launch: of the norm.
    dtype: of the products, of y and of the normalised tensor.
    has_norm: False for a linear layer alone. Its input counts as normalised.
    """

    centered: bool
    eps: float | None
    zero_centered_weight: bool
    return_normalized: bool
    save_normalized: bool
    fused: str | None
    launch: Launch | None
    dtype: Any = None
    has_norm: bool = True


class LinearCall(NamedTuple):
    """One call."""

    operands: Operands
    options: LinearOptions


# Checks.


def launch_of(sm_margin: int | Mapping[str, int]) -> Launch | None:
    """The norm's launch. Raises ValueError or TypeError for an invalid sm_margin."""
    launch = Launch(sm_margin=sm_margin)
    return launch if launch.sm_margin else None


def check_eps(eps: object, dtype: str, *, centered: bool) -> float:
    """eps as a float, RMSNorm's default for None. Raises TypeError unless it is a number."""
    return checks.check_eps(eps, dtype, has_default=not centered)


def check(operands: Operands, *, is_cast: bool = False) -> None:
    """Raises ValueError or TypeError for parameters that do not fit the input.

    is_cast: whether the parameters of the linear layer may have a dtype other than the input's, as
        under torch.autocast. A bias still needs the dtype of its weight.
    """
    input, _, norm_weight, norm_bias, weights, biases = operands
    shape = tuple(input.shape)
    if not shape:
        raise ValueError("input has no dimension to normalise over; expected at least one")
    checks.check_dtype(input, "input")
    for at, weight in enumerate(weights):
        _check_parameter(weight, "weight", input)
        if len(weight.shape) != 2 or weight.shape[1] != shape[-1]:
            raise ValueError(
                f"weight has shape {tuple(weight.shape)}, input {shape}; "
                f"expected (out_features, {shape[-1]})"
            )
        if not is_cast:
            _check_same_dtype(weight, "weight", input, "input")
        if biases:
            _check_parameter(biases[at], "bias", input, weight.shape[:1])
            like, name = (weight, "weight") if is_cast else (input, "input")
            _check_same_dtype(biases[at], "bias", like, name)
    for name, parameter in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if parameter is not None:
            _check_parameter(parameter, name, input, shape[-1:])
            checks.check_dtype(parameter, name)


def fits(operands: Operands) -> bool:
    """Whether the parameters fit, in a tenth of the time of check.

    Returns False to run check, which raises the detailed error or accepts them.
    """
    input, _, norm_weight, norm_bias, weights, biases = operands
    try:
        in_features, dtype, device = input.shape[-1], input.dtype, input.device
        for at, weight in enumerate(weights):
            num_rows, num_cols = weight.shape
            if num_cols != in_features or weight.dtype != dtype or weight.device != device:
                return False
            if biases:
                bias = biases[at]
                if bias.shape != (num_rows,) or bias.dtype != dtype or bias.device != device:
                    return False
        for parameter in (norm_weight, norm_bias):
            if parameter is not None:
                if parameter.shape != (in_features,) or parameter.device != device:
                    return False
                if arrays.dtype_name(parameter) not in DTYPES:
                    return False
        return arrays.dtype_name(input) in DTYPES
    except (AttributeError, IndexError, ValueError):
        return False


def _check_parameter(
    parameter: Any, name: str, input: Array, shape: Sequence[int] | None = None
) -> None:
    """Raises unless it is an array where input is, and of a shape if one is given."""
    if not hasattr(parameter, "shape"):
        kind = arrays.type_in_words(parameter)
        raise TypeError(f"{name} is {kind}; expected an array like the input")
    checks.check_same_place(parameter, input, name, "input")
    if shape is not None and tuple(parameter.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(parameter.shape)}; expected {tuple(shape)}")


def _check_same_dtype(array: Array, name: str, like: Array, like_name: str) -> None:
    dtype, expected = arrays.dtype_name(array), arrays.dtype_name(like)
    if dtype != expected:
        raise TypeError(
            f"{name} is of dtype {dtype}, {like_name} of {expected}; expected both the same"
        )
