"""What prepared calls have in common: the arrays that kernels read, new arrays, and launches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from ..dtypes import compute_dtype
from ..gpu import arrays, launch
from ..gpu.arrays import Rows
from ..plan.functor_text import Functors
from .arguments import Call
from .functors import PlacedFunctors, place_all
from .request import Array


def rows_of(array: Array, num_dims: int) -> tuple[Rows, bool]:
    """An array's rows, and whether they are those of a contiguous copy that each run makes.

    A copy is aligned wherever it will be.
    """
    view = arrays.view(array)
    rows = arrays.rows(view, num_dims)
    if rows is not None and not view.is_lazy:
        return rows, False
    return arrays.contiguous_rows(view.shape, num_dims, view.dtype), True


def parameter_of(array: Array) -> tuple[Rows, bool]:
    """A weight, bias or statistic as one row, and whether a run must copy it."""
    view = arrays.view(array)
    copied = view.is_lazy or arrays.rows(view, len(view.shape)) is None
    num_cols = arrays.product(view.shape)
    return Rows(0 if copied else view.pointer, 1, num_cols, num_cols, view.dtype), copied


Layouts = Mapping[str, tuple[Rows, bool]]  # by name what rows_of or parameter_of gives


def layouts_of(
    operands: Any, names: Sequence[str], names_of_rows: Collection[str], num_dims: int
) -> Layouts:
    """Of the arrays that are there. names_of_rows: whose last num_dims dimensions are normalised;
    other arrays are one row."""
    return {
        name: rows_of(array, num_dims) if name in names_of_rows else parameter_of(array)
        for name, array in ((name, getattr(operands, name)) for name in names)
        if array is not None
    }


def allocator(library: Any, shape: tuple[int, ...], dtype: str) -> Callable[[], Any]:
    """Makes new arrays on the current device."""
    return library.allocator(shape, library.dtype(dtype))


def fill(some: Iterable[Array | None], value: float) -> None:
    """Fills those of the arrays that are there, on the current stream."""
    for array in some:
        if array is not None:
            array[...] = value


class OnGpu:
    """The arrays that a kernel reads, in order, and its launches.

    copies: whether a run copies each array; empty if it copies none.
    """

    def __init__(
        self, x: Array, fields: tuple[str, ...], names: list[str], layouts: Layouts
    ) -> None:
        """names: of the operands that are read, out of fields. layouts: of those that may need a
        copy."""
        self.device_index = arrays.view(x).device
        self.library = arrays.library(x)(self.device_index)
        indices = [fields.index(name) for name in names]
        if len(indices) > 1:
            self.read = itemgetter(*indices)
        else:
            self.read = lambda operands: (operands[indices[0]],)
        self._copied = [name in layouts and layouts[name][1] for name in names]
        self.copies: tuple[bool, ...] = ()
        self.steps: list[tuple[Any, Callable[[tuple], tuple]]] = []

    def read_functors(
        self,
        functors: Functors | None,
        x: Array,
        num_dims: int,
        wanted: tuple[str, ...] = (),
    ) -> PlacedFunctors:
        """Adds the arrays of functors to what is read."""
        placed, copied = place_all(functors, x, num_dims, wanted)
        self._copied += copied
        if functors is not None:
            read = self.read
            self.read = lambda operands: read(operands) + operands.functors.arrays()
        return placed

    def compile(self, call: Call, order: list[str]) -> None:
        """order: names of the tensors in the order in which a run has their addresses."""
        self.arguments = call.arguments_of(order)
        self.copies = tuple(self._copied) if any(self._copied) else ()
        kernels = [launch.load(each, self.device_index) for each in call.launches]
        self.steps = [*zip(kernels, self.arguments.picks)]

    def contiguous(self, tensors: tuple) -> tuple:
        return tuple(
            self.library.contiguous(array) if copied else array
            for array, copied in zip(tensors, self.copies)
        )

    def run_in_place(self, read: tuple, addresses: tuple[int, ...]) -> tuple:
        """Allocates and launches, where nothing that is read is copied: a run without its checks.

        Returns the tensors that are read, and those that are made. addresses: of the former.
        """
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            made = self.make()
            self.enqueue(addresses + tuple(map(library.address, made)))
            return read + made
        finally:
            if former != self.device_index:
                library.exchange_device(former)

    def enqueue(self, addresses: tuple[int, ...]) -> None:
        """addresses: in the order that compile was given."""
        stream = self.library.stream()
        words = self.arguments.words(addresses)
        for kernel, pick in self.steps:
            kernel.enqueue(stream, pick(words))


class TensorOrder:
    """The tensors of a run as one tuple: what is read, then what is made.

    The tuple holds no None, and what is returned is picked by one itemgetter, because this runs in
    every call.
    """

    def __init__(self, read: list[str], makers: Mapping[str, Callable[[], Any]]) -> None:
        """read: names in the order of the tuple. makers: of each new tensor. make: calls them."""
        self.names = [*read, *makers]
        news = tuple(makers.values())
        self.make: Callable[[], tuple] = lambda: tuple([new() for new in news])
        if len(news) == 1:
            (only,) = news
            self.make = lambda: (only(),)

    def returns(self, *names: str | None) -> Callable[[tuple], tuple]:
        """Picks tensors by name from (*tensors, given, None), None where there is none.

        "given" names what a run puts behind the tensors.
        """
        places = {name: at for at, name in enumerate([*self.names, "given"])}
        return itemgetter(*(places.get(name, len(places)) for name in names))

    def place(self, name: str) -> int:
        return self.names.index(name)


class PreparedMatrixCall(OnGpu):
    """A planned and compiled call that reads its operands and returns new arrays.

    Norms have more: prepared.py.
    """

    def __init__(
        self,
        operands: Any,
        layouts: Layouts,
        outputs: Mapping[str, tuple[tuple[int, ...], str | None]],
        call: Call | None,
        *,
        zeroed: bool = False,
    ) -> None:
        """operands: a NamedTuple with x; None for what is absent.

        outputs: shapes and dtypes; None for what is not wanted. zeroed: outputs are 0 before the
        launch. call: None if there is nothing to compute: outputs stay 0.
        """
        names = [name for name, array in operands._asdict().items() if array is not None]
        super().__init__(operands.x, operands._fields, names, layouts)
        makers = {name: allocator(self.library, *each) for name, each in outputs.items() if each[1]}
        if call is not None and call.partials_shape:
            compute = compute_dtype(layouts["x"][0].dtype).name
            makers["partials"] = allocator(self.library, call.partials_shape, compute)
        order = TensorOrder(names, makers)
        self.make = order.make
        self.results = order.returns(*outputs)
        self.zeroed = zeroed or call is None
        if call is not None:
            self.compile(call, order.names)

    def run(self, operands: tuple) -> Any:
        """The outputs in their order, None for one that is not wanted. One alone is no tuple."""
        library = self.library
        former = library.exchange_device(self.device_index)
        try:
            read = self.read(operands)
            if self.copies:
                read = self.contiguous(read)
            tensors = read + (made := self.make())
            if self.zeroed:
                fill(made, 0)
            if self.steps:
                self.enqueue(tuple(map(library.address, tensors)))
            return self.results(tensors + (None, None, None))
        finally:
            if former != self.device_index:
                library.exchange_device(former)
