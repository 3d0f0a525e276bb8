"""What compiled code calls for a norm: a call that is prepared once for tensors of known layouts.

An operator's call goes through torch's dispatcher, and finds its prepared call by the layouts of
its tensors. Inductor knows those layouts when it generates code (direct_calls.py). Its code names
them in a text, and the text finds the prepared call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import itemgetter, or_
from typing import Any

from torch import Tensor

from ..norm.cache import keep, repeated
from ..norm.on_gpu import OnGpu
from ..norm.request import BackwardOperands, ForwardOperands
from .graph_operators import (
    BACKWARD_RESULTS,
    FORWARD_RESULTS,
    parsed_backward,
    parsed_forward,
    prepare_backward_of,
    prepare_forward_of,
    with_dx_sum,
)

_address = Tensor.data_ptr

# The place of each operand among the arguments of an operator.
_PLACES = {
    "forward": ForwardOperands(0, 1, 2, 3, dropout_seed=4),
    "backward": BackwardOperands(0, 1, 2, 3, 4, 5, dropout_seed=6, dy1=7),
}


def known_call(key: str) -> Callable[..., Any]:
    """A function that takes the arguments of one of graph_operators' and returns its results.

    key: "forward" or "backward", a space, and a text of the options and of the layouts of all
    tensors. Whoever calls it knows that the tensors have these layouts. Addresses may be any.
    """
    return repeated.get(key) or partial(_first_call, key)


def _first_call(key: str, *arguments: Any) -> Any:
    """Prepares the call. It is kept if a run only allocates and launches."""
    direction, _, _ = key.partition(" ")
    if direction == "forward":
        names, (_, _, results, pick, *_) = FORWARD_RESULTS, parsed_forward(arguments[-1])
        prepared, operands = prepare_forward_of(arguments)
    else:
        names, (_, results, pick) = BACKWARD_RESULTS, parsed_backward(arguments[-1])
        prepared, operands = prepare_backward_of(arguments)
    if isinstance(prepared, OnGpu) and prepared.steps and not prepared.copies:
        number = prepared.num_tensors
        # Picking from numbers gives places.
        found = prepared.results(range(number + 3))
        wanted = [found[names.index(name)] for name in results]
        read = prepared.read(_PLACES[direction])
        if max(wanted) < number and not _bits(arguments[at] for at in read) & 15:
            keep(repeated, key, _KnownCall(partial(_first_call, key), prepared, read, wanted))
    made = prepared.run(operands)
    if direction == "backward":
        made = with_dx_sum(made, parsed_backward(arguments[-1]).options)
    return pick(made)


def _bits(tensors: Any) -> int:
    return reduce(or_, map(_address, tensors))


class _KnownCall:
    """A prepared call whose tensors are aligned to 16 bytes.

    otherwise: what computes calls whose tensors are not. read: places of the tensors that kernels
    read, among the arguments. wanted: places of the results, among those tensors and the new ones.
    """

    __slots__ = ("_otherwise", "_pick", "_read", "_run")

    def __init__(
        self, otherwise: Callable[..., Any], prepared: OnGpu, read: tuple, wanted: list[int]
    ) -> None:
        self._otherwise, self._run = otherwise, prepared.run_in_place
        self._read, self._pick = _tuple_of(read), _tuple_of(wanted)

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        read = self._read(arguments)
        addresses = tuple(map(_address, read))
        if reduce(or_, addresses) & 15:
            return self._otherwise(*arguments)
        return self._pick(self._run(read, addresses, None))


def _tuple_of(places: Any) -> Callable[[tuple], tuple]:
    """Picks some as a tuple, also a single one."""
    if len(places) > 1:
        return itemgetter(*places)
    (place,) = places
    return lambda these: (these[place],)
