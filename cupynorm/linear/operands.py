"""torch: a call of a norm and the linear layer after it: its operands, options and checks.

Tensors as matrices: flattened to rows, summed over rows, and joined from parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu import arrays
from ..nn import quantization
from ..nn.modes import SUPPORTED, name_of, outside_autocast
from ..norm import checks, quantized
from ..norm.request import Array, Launch
from ..options import check_choice

FUSED = (None, "plain", "kernel")


def is_fused(fused: str | None) -> bool:
    """Whether `fused` names a way that makes no normalised tensor."""
    return fused not in (None, "plain")


def check_fused(fused: object, **wants_normalized: bool) -> None:
    """Raises ValueError for what is none of FUSED.

    wants_normalized: an option by name, and whether it asks for the normalised tensor.
    """
    if isinstance(fused, str) and fused == "fold":
        raise ValueError(
            "fused is 'fold', which was removed; expected None or 'plain', which are faster"
        )
    check_choice("fused", fused, FUSED)
    for name, is_given in wants_normalized.items():
        if is_given and is_fused(fused):
            raise ValueError(
                f"{name} is given with fused={fused!r}, in which no normalised tensor exists; "
                "expected one of them"
            )


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
        """The operands whose all() these tensors are."""
        weights, biases = tensors[4 : 4 + num_weights], tensors[4 + num_weights :]
        return cls(*tensors[:4], weights, biases)

    def all(self) -> tuple[Array | None, ...]:
        """The arrays in one tuple, in the order of the fields."""
        return (*self[:4], *self.weights, *self.biases)


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


def launch_of(sm_margin: int | Mapping[str, int]) -> Launch | None:
    """The norm's launch. Raises ValueError or TypeError for an invalid sm_margin."""
    launch = Launch(sm_margin=sm_margin)
    return launch if launch.sm_margin else None


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
        cols, dtype, device = input.shape[-1:], input.dtype, input.device
        for each in (*weights, *biases):
            if each.dtype != dtype or each.device != device:
                return False
        for parameter in (norm_weight, norm_bias):
            if parameter is not None:
                is_there = parameter.shape == cols and parameter.device == device
                if not is_there or parameter.dtype not in SUPPORTED:
                    return False
        shapes = [each.shape for each in weights]
        are_matrices = all([len(shape) == 2 and shape[1:] == cols for shape in shapes])
        of_biases = [each.shape for each in biases]
        is_right = not biases or of_biases == [shape[:1] for shape in shapes]
        return are_matrices and is_right and dtype in SUPPORTED
    except (AttributeError, IndexError, TypeError, ValueError):
        return False


def _check_parameter(
    parameter: Any, name: str, input: Array, shape: Sequence[int] | None = None
) -> None:
    """Raises unless it is an array where input is, and of a shape if one is given."""
    if not hasattr(parameter, "__dlpack__") or isinstance(parameter, type):
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


# Matrices.


def as_rows(tensor: Tensor) -> Tensor:
    """A tensor [..., num_cols] as [num_rows, num_cols], even where one of them is 0."""
    # torch.Size.numel would make a number of a symbol, so that each num_rows is compiled anew.
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, dtype and device that has one element in memory."""
    return tensor.new_empty(1).expand(tensor.shape)


def as_result(tensor: Tensor | None) -> Tensor | None:
    """A tensor in the same memory that is no view to autograd.

    A result of an autograd.Function that is a view cannot be written to in place.
    """
    return tensor.data if tensor is not None and tensor._is_view() else tensor


def sum_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums over rows of a matrix, [num_cols], rounded once.

    On a GPU a kernel makes them with little scratch memory.
    """
    if rows.is_meta or arrays.on_host(rows) or rows.stride(-1) != 1:
        return quantization.sum_rows(rows, dtype)
    return quantized.sum_rows(rows, name_of(dtype))


def concatenate(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Parts concatenated along rows, in dtype, differentiable; None of no parts.

    They are cast first: torch.autocast has no cat of the 16-bit dtype that it does not use.
    """
    parts = [part.to(dtype) for part in parts]
    if len(parts) > 1:
        return torch.cat(parts)
    return parts[0] if parts else None


def join(parts: Sequence[Tensor]) -> Tensor | None:
    """Parts concatenated along rows, detached; None of no parts.

    Parts that follow each other in one storage are not copied.
    """
    if len(parts) < 2:
        return parts[0].detach() if parts else None
    first, at = parts[0], parts[0].data_ptr()
    storage, dtype = first.untyped_storage().data_ptr(), first.dtype
    is_neg, num_rows = first.is_neg(), 0
    for part in parts:
        follows = part.data_ptr() == at and part.untyped_storage().data_ptr() == storage
        is_like = part.dtype == dtype and part.is_neg() == is_neg
        if not follows or not is_like or not part.is_contiguous():
            with outside_autocast(first):
                return torch.cat([part.detach() for part in parts])
        at += part.numel() * dtype.itemsize
        num_rows += part.shape[0]
    return first.detach().as_strided((num_rows, *first.shape[1:]), first.stride())


def split_like(joined: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """A tensor cut along rows into the sizes of parts, each in its part's dtype."""
    cut = joined.split([len(part) for part in parts])
    return [each.to(part.dtype) for each, part in zip(cut, parts)]
