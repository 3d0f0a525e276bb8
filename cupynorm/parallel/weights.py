"""torch: the gradients of a rank's weights and biases, which need no other rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..linear.call import Operands
from ..linear.weight_gradients import WeightGradientSink
from .products import Products


class Arrived(NamedTuple):
    """The gradient of y: rows as it came, dy as the products take it, its sums over rows."""

    rows: Tensor
    dy: Any
    dbias: Tensor | None


def weight_gradients(
    products: Products,
    operands: Operands,
    arrived: Arrived,
    normalized: Any,
    wanted: Sequence[bool],
    sink: WeightGradientSink | None,
) -> list[Tensor | None]:
    """The gradients of *weights, *biases, or what autograd gets where a sink takes them.

    normalized: the Rows of the product; None where no weight's gradient is wanted.
    """
    weights, biases = operands.weights, operands.biases
    rows, dy, dbias = arrived
    if sink is not None:
        dweights, dbiases = sink.take(products.for_sink(rows, dy, normalized), wanted)
        return [*dweights, *dbiases]
    parts: list[Tensor | None] = [None] * len(weights)
    if normalized is not None:
        dweight = products.dweight(dy, normalized, weights[0].dtype)
        sizes = [len(each) for each in weights]
        parts = [part.to(each.dtype) for part, each in zip(dweight.split(sizes), weights)]
    if dbias is None:
        return [*parts, *[None] * len(biases)]
    return [*parts, *dbias.split([len(each) for each in biases])]
