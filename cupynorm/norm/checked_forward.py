"""What a checked forward remembers, on a GPU and on the host: for autograd."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from ..gpu import arrays
from .launch_choice import of_backward
from .request import Array, BackwardOptions, ForwardRequest, is_plain
from .results import Forward


def dtype_or_none(array: Array | None) -> str | None:
    """The dtype of an array by name; None of no array."""
    return None if array is None else arrays.dtype_name(array)


# The operands of a forward that have gradients.
DIFFERENTIABLE = ("input", "weight", "bias", "residual")


class CheckedForward:
    """A forward that is checked, and what its gradients depend on besides arrays.

    backward: the options of its backward, which selects its own gradients. backwards: backwards
    that autograd prepared. sum_dtype: of what is normalised.
    """

    def __init__(self, request: ForwardRequest, stores_sum: bool) -> None:
        """stores_sum: also what functors on x make alone is a sum, which is stored."""
        operands, options = request
        self.options = options
        self.dtype = arrays.dtype_name(operands.input)
        load = () if operands.functors is None else operands.functors.load
        self.makes_sum = operands.residual is not None or bool(stores_sum and load)
        self.sum_dtype = dtype_or_none(operands.residual) or self.dtype
        self.is_plain = self.sum_dtype == self.dtype and is_plain(request)
        self.backward = BackwardOptions(
            options.centered,
            options.extents,
            bool(options.zero_centered_weight),
            dx_dtype=None if self.is_plain else self.dtype,
            dbias_dtype=dtype_or_none(operands.bias),
            dresidual_dtype=None if self.is_plain else dtype_or_none(operands.residual),
            applies_load=bool(load) and not self.makes_sum,
            launch=of_backward(options.launch),
        )
        self.backwards: dict[tuple, object] = {}
        # What autograd records.
        self.differentiable = tuple(
            name for name in DIFFERENTIABLE if getattr(operands, name) is not None
        )
        places = [operands._fields.index(name) for name in self.differentiable]
        self.read_differentiable = (
            itemgetter(*places) if len(places) > 1 else lambda operands: (operands[0],)
        )
        # From gradients in the order of DIFFERENTIABLE, and None.
        places = [DIFFERENTIABLE.index(name) for name in self.differentiable]
        self.pick_gradients = itemgetter(-1, *places)
        # From a Forward, what autograd returns: y, or a tuple where there is more.
        outputs = ["y", *["sum"] * self.makes_sum]
        self.pick_outputs = itemgetter(*map(Forward._fields.index, outputs))

    def split_outputs(self, outputs: Any) -> tuple:
        """(y, sum) of what pick_outputs picked, or of the gradients of that."""
        if self.makes_sum:
            return outputs
        return (outputs[0] if outputs.__class__ is tuple else outputs), None
