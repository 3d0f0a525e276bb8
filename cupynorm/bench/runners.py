"""Runners: a library's call on a cell, forward, backward or both."""

from __future__ import annotations

from functools import partial
from typing import Any

from .. import functional
from ..norm.quantized import QuantizedTensor
from ..norm.request import Backward, Forward, Launch
from ..plan.problem import Tile
from ..plan.strategies import STRATEGIES
from .cells import EPS, OURS, Cell
from .peers import PEERS, call_of_ours, refuse
from .tensors import Tensors, as_torch
from .timer import Runner


def _results(cell: Cell, outputs: Any) -> dict[str, Any]:
    """The result of a forward, by name."""
    y, *added = outputs if cell.residual else (outputs,)
    if isinstance(y, QuantizedTensor):
        y = (y.data, y.scale_inv)
    parts = zip(("y", "scale_inv", "amax"), y if cell.scale else (y,))
    return dict(parts) | dict(zip(("sum",), added))


def options_of(tile: str) -> dict[str, Any]:
    """strategy and tile as options, from words: "block: pack_size 8, threads_per_row 128, ...".

    Raises ValueError for other words.
    """
    strategy, colon, words = tile.partition(":")
    if strategy not in STRATEGIES or not colon:
        known = ", ".join(STRATEGIES)
        raise ValueError(f"tile is {tile!r}; expected one of {known}, a colon, and a tile's fields")
    return {"strategy": strategy, "tile": Tile.of(words)}


def prepare(name: str, cell: Cell, tensors: Tensors) -> Runner:
    """A library, or cupynorm with a tile in words, on a cell's CuPy arrays.

    Raises ValueError for what a library does not have, and what the library raises.
    """
    if name == OURS or name not in PEERS:
        return prepare_ours(cell, tensors, **({} if name == OURS else options_of(name)))
    tensors = Tensors(*(None if array is None else as_torch(array) for array in tensors))
    return prepare_torch(name, cell, tensors)


def prepare_torch(name: str, cell: Cell, tensors: Tensors, *, record: bool = False) -> Runner:
    """A library on torch tensors, by torch's autograd.

    record: whether autograd records a forward, too. Raises as `prepare` does.
    """
    import torch

    peer = PEERS[name]
    wants_gradients = record or "backward" in cell.passes
    refuse(name, cell, wants_gradients)
    dtype = getattr(torch, peer.parameters.get(cell.norm, cell.parameters))

    def leaf(name: str) -> Any:
        tensor = getattr(tensors, name)
        if tensor is None:
            return None
        if name in ("weight", "bias"):
            return torch.nn.Parameter(tensor.detach().to(dtype), wants_gradients)
        return tensor.detach().requires_grad_(wants_gradients)

    names = ("x", "weight", "bias", "residual")
    tensors = tensors._replace(**{name: leaf(name) for name in names})
    inputs = {f"d{name}": getattr(tensors, name) for name in names}
    inputs = {name: each for name, each in inputs.items() if each is not None}
    forward = peer.make(cell, tensors)
    results = partial(_results, cell)
    if cell.direction == "forward":
        return Runner(forward, results)
    before, dy = None, tensors.dy
    if peer.overwrites_dy:
        dy = tensors.dy.clone()
        before = partial(dy.copy_, tensors.dy)
    gradients = dy if tensors.residual is None else (dy, tensors.dsum)
    values = tuple(inputs.values())

    def named(outputs: Any) -> dict[str, Any]:
        return dict(zip(inputs, outputs))

    if cell.direction == "backward":
        computed = forward()

        def backward() -> Any:
            return torch.autograd.grad(computed, values, gradients, retain_graph=True)

        return Runner(backward, named, before)

    def both() -> tuple[Any, Any]:
        outputs = forward()
        return outputs, torch.autograd.grad(outputs, values, gradients)

    return Runner(both, lambda computed: results(computed[0]) | named(computed[1]), before)


def _forward_alone(cell: Cell, tensors: Tensors, **options: Any) -> Runner:
    """Our forward without gradients: it writes y, and no statistics."""
    if not cell.scale:  # the call allocates 8-bit floats
        options["out"] = tensors.y
    call = partial(call_of_ours(cell, tensors), **options)
    if not cell.amax:
        return Runner(call, partial(_results, cell))
    # A call only ever raises amax, so it is set to 0 before each, as in each step of a training.
    amax = tensors.amax
    return Runner(
        call, lambda outputs: _results(cell, outputs) | {"amax": amax}, partial(amax.fill, 0)
    )


def prepare_ours(cell: Cell, tensors: Tensors, **chosen: Any) -> Runner:
    """cupynorm on CuPy arrays, without torch.

    chosen: strategy and tile of the direction that is timed.
    """
    options = {"launch": Launch(**chosen)} if chosen else {}
    if cell.direction == "forward":
        return _forward_alone(cell, tensors, **options)
    centered = cell.norm == "layer_norm"
    gradients = ("dx", "dweight", "dbias") if centered else ("dx", "dweight")
    run_forward = functional.layer_norm_forward if centered else functional.rms_norm_forward
    run_backward = functional.layer_norm_backward if centered else functional.rms_norm_backward
    zero_centered = {"zero_centered_weight": True} if cell.zero_centered else {}
    x, residual, weight = tensors.x, tensors.residual, tensors.weight
    forward_options = {"residual": residual, "out_dtype": cell.out_dtype, "out": tensors.y}
    backward_options = {"dsum": tensors.dsum, "gradients": gradients, **options}

    def forward() -> Forward:
        shape, parameters = weight.shape, {"weight": weight, "bias": tensors.bias}
        return run_forward(x, shape, **parameters, eps=EPS, **forward_options, **zero_centered)

    def backward(saved: Forward) -> Backward:
        statistics = (saved.mean, saved.rstd) if centered else (saved.rstd,)
        operands = (tensors.dy, saved.sum, weight.shape, *statistics, weight)
        return run_backward(*operands, **backward_options, **zero_centered)

    def results(outputs: Forward) -> dict[str, Any]:
        return {"y": outputs.y} if residual is None else {"y": outputs.y, "sum": outputs.sum}

    def named(outputs: Backward) -> dict[str, Any]:
        return {name: getattr(outputs, name) for name in gradients}

    if cell.direction == "backward":
        saved = forward()
        return Runner(lambda: backward(saved), named)

    def both() -> tuple[Forward, Backward]:
        outputs = forward()
        return outputs, backward(outputs)

    return Runner(both, lambda outputs: results(outputs[0]) | named(outputs[1]))
