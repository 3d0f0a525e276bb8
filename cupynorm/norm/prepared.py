"""Calls that are planned and compiled once, then only allocated and launched, and their caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from ..gpu import arrays, launch
from .arguments import Call
from .request import Array

# By a key of all that a prepared call depends on: forwards and backwards (calls.py), and calls on
# matrices (quantized.py). By a smaller key, beside which the layouts of tensors are compared: calls
# on torch tensors (nn/autograd.py), and of each of aten's operators (nn/enable.py).
forwards: dict[tuple, Any] = {}
backwards: dict[tuple, Any] = {}
repeated: dict[tuple, Any] = {}
matrices: dict[tuple, Any] = {}
of_aten: dict[str, dict[tuple, tuple]] = {}
# A cache with so many is emptied: a program with new shapes in each call must not fill the memory.
_MOST = 4096


def keep(prepared: dict, key: Any, value: object) -> None:
    """key None: do not keep this one."""
    if key is not None:
        if len(prepared) >= _MOST:
            prepared.clear()
        prepared[key] = value


def forget() -> None:
    """Drops every prepared call, so that the next of each kind is planned anew."""
    for prepared in (forwards, backwards, repeated, matrices, *of_aten.values()):
        prepared.clear()


class Prepared:
    """A call that is planned and compiled: what it reads, what it makes, and its launches.

    The tensors of a run are one tuple without None: what is read, then what is made. What is
    returned is picked by one itemgetter, because this runs in every call.

    read: picks what is read from the operands. copies: whether a run copies each of these; empty if
    it copies none. steps: kernels with their arguments; empty where there is nothing to compute.
    """

    def __init__(
        self,
        x: Array,
        read: Callable[[tuple], tuple],
        copied: Mapping[str, bool],
        made: Mapping[str, tuple[tuple[int, ...], str]],
        call: Call | None,
        returns: Sequence[str | None],
        *,
        fills: Mapping[str, float] | None = None,
        finish: Callable[[tuple, dict, tuple], tuple] | None = None,
    ) -> None:
        """copied: whether each tensor that is read is copied, in the order of `read`.

        made: shapes and dtypes. returns: names out of both, None for what is absent, and "given"
        for the first operand. fills: values with which made tensors are filled before the launches.
        finish: makes of the operands, all tensors by name, and what was picked what is returned.
        call: None if there is nothing to compute.
        """
        self.device_index = arrays.view(x).device
        self.library = library = arrays.library(x)(self.device_index)
        self.read, self.finish = read, finish
        self.copies = tuple(copied.values()) if any(copied.values()) else ()
        self.names = [*copied, *made]
        self.new = {
            name: library.allocator(shape, library.dtype(dtype))
            for name, (shape, dtype) in made.items()
        }
        places = {name: at for at, name in enumerate([*self.names, "given"])}
        self.results = itemgetter(*(places.get(name, len(places)) for name in returns))
        self.fills = [(places[name], value) for name, value in (fills or {}).items()]
        self.call, self.plan, self.arguments = call, None, None
        self.steps: list[tuple[Any, Callable[[tuple], tuple]]] = []
        if call is not None:
            self.plan, self.arguments = call.plan, call.arguments_of(self.names)
            kernels = [launch.load(each, self.device_index) for each in call.launches]
            self.steps = [*zip(kernels, self.arguments.picks)]

    def run(self, operands: tuple) -> Any:
        """Allocates and launches; returns what `returns` names, one alone without a tuple.

        operands: like those for which it was prepared.
        """
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            read = self.read(operands)
            if self.copies:
                pairs = zip(read, self.copies)
                read = tuple([library.contiguous(each) if copy else each for each, copy in pairs])
            tensors = read + tuple([each() for each in self.new.values()])
            for at, value in self.fills:
                tensors[at][...] = value
            if self.steps:
                words = self.arguments.words(tuple(map(library.address, tensors)))
                stream = library.stream()
                for kernel, pick in self.steps:
                    kernel.enqueue(stream, pick(words))
            results = self.results(tensors + (operands[0], None))
            if self.finish is None:
                return results
            return self.finish(operands, dict(zip(self.names, tensors)), results)
        finally:
            if former != self.device_index:
                library.exchange_device(former)

    def is_simple(self) -> bool:
        """Whether a run only allocates and launches."""
        return bool(self.steps) and not (self.copies or self.fills or self.finish)


def reader(fields: Sequence[str], names: Sequence[str]) -> Callable[[tuple], tuple]:
    """Picks the operands of these names as a tuple. fields: the names of all operands.

    With "functors" among the names, their arrays come last.
    """
    places = [fields.index(name) for name in names if name != "functors"]
    if len(places) > 1:
        pick = itemgetter(*places)
    else:
        (only,) = places

        def pick(operands: tuple) -> tuple:
            return (operands[only],)

    if "functors" not in names:
        return pick
    own = fields.index("functors")
    return lambda operands: pick(operands) + operands[own].arrays()
