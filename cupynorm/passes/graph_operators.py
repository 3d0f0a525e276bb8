"""The operators of compiled graphs: as those of cupynorm.nn, with a cheaper call.

    cupynorm::norm_forward_in_graph  -> those of y, mean, rstd, sum, y1 that the graph reads
    cupynorm::norm_backward_in_graph -> those of dx, dweight, dbias, dresidual, dx_sum that the
                                        graph reads

Compiled code calls an operator in every step. One with a derivative and fourteen arguments takes
21 us of the CPU for its call alone; one of tensors and a str, without a derivative, takes 3 us. A
graph that is compiled has its backward already, so its operators need no derivative.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nn.operators import forward_without_memory
from ..norm.prepared import FOR_STATISTICS, FOR_Y, prepare_backward, prepare_forward
from ..norm.request import (
    BackwardOperands,
    BackwardOptions,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    Options,
)
from ..plan.functors import Functor, bind_all, from_text
from ..plan.problem import Tile

FORWARD_RESULTS = ("y", "mean", "rstd", "sum", "y1")
BACKWARD_RESULTS = ("dx", "dweight", "dbias", "dresidual", "y", "dx_sum")

_library = torch.library.Library("cupynorm", "FRAGMENT")
for _schema in (
    "norm_forward_in_graph(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, "
    "Tensor? dropout_seed, Tensor[] arrays, str options) -> Tensor[]",
    "norm_backward_in_graph(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, "
    "Tensor? dsum, Tensor? dropout_seed, Tensor? dy1, str options) -> Tensor[]",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

FORWARD = torch.ops.cupynorm.norm_forward_in_graph.default
BACKWARD = torch.ops.cupynorm.norm_backward_in_graph.default


def text_of(results: tuple[str, ...], options: dict[str, Any]) -> str:
    """The options of an operator: those that are given, and the names of its results."""
    kept = {name: each for name, each in options.items() if each or name == "eps"}
    if "numbers" in kept:
        kept["numbers"] = [*map(str, kept["numbers"])]  # inf is no literal
    # Not JSON: inductor's C++ puts a text between double quotes as it is.
    return repr({"results": results} | kept)


class ParsedForward(NamedTuple):
    """functors: the load and the store, each may be None; None without both."""

    options: ForwardOptions
    purpose: str
    results: tuple[str, ...]
    pick: Callable[[tuple[Tensor, ...]], list[Tensor]]
    functors: tuple[Functor | None, Functor | None] | None
    numbers: tuple[float, ...]


class ParsedBackward(NamedTuple):
    options: BackwardOptions
    results: tuple[str, ...]
    pick: Callable[[tuple[Tensor, ...]], list[Tensor]]


def _picker(results: tuple[str, ...], names: tuple[str, ...]) -> Callable[[tuple], list]:
    places = [names.index(each) for each in results]
    if len(places) == 1:
        (place,) = places
        return lambda made: [made[place]]
    pick = operator.itemgetter(*places)
    return lambda made: list(pick(made))


def _options_of(kind: Any, words: dict[str, Any], **own: Any) -> Any:
    """ForwardOptions or BackwardOptions of what an operator's text says."""
    fields = {name: words[name] for name in kind._fields if name in words}
    tile = words.get("tile")
    launch = Options(
        words.get("strategy"),
        None if tile is None else Tile.from_ints(tile),
        words.get("statistics"),
        words.get("sm_margin", 0),
    )
    extents = tuple(words["normalized_shape"])
    return kind(**{"centered": False} | fields | own, extents=extents, launch=launch)


@cache
def parsed_forward(text: str) -> ParsedForward:
    words = ast.literal_eval(text)
    results, load, store = tuple(words["results"]), words.get("load"), words.get("store")
    return ParsedForward(
        _options_of(ForwardOptions, words),
        FOR_STATISTICS if {"mean", "rstd"} & set(results) else FOR_Y,
        results,
        _picker(results, FORWARD_RESULTS),
        from_text(load, store) if load or store else None,
        tuple(map(float, words.get("numbers", ()))),
    )


@cache
def parsed_backward(text: str) -> ParsedBackward:
    words = ast.literal_eval(text)
    results = tuple(words["results"])
    gradients = tuple(each for each in results if each != "dx_sum")
    options = _options_of(BackwardOptions, words, gradients=gradients)
    return ParsedBackward(options, results, _picker(results, BACKWARD_RESULTS))


def request_of(arguments: tuple) -> ForwardRequest:
    """arguments: of norm_forward_in_graph."""
    *rows, seed, arrays, text = arguments
    parsed = parsed_forward(text)
    operands = ForwardOperands(*rows, None, None, seed)
    if parsed.functors is not None:
        operands = operands._replace(functors=bind_all(parsed.functors, arrays, parsed.numbers))
    return ForwardRequest(operands, parsed.options)


def prepare_forward_of(arguments: tuple) -> tuple[Any, ForwardOperands]:
    """A prepared call and its operands."""
    return prepare_forward(request_of(arguments), parsed_forward(arguments[-1]).purpose)


def prepare_backward_of(arguments: tuple) -> tuple[Any, BackwardOperands]:
    """As prepare_forward_of, of norm_backward_in_graph."""
    *rows, seed, dy1, text = arguments
    operands = BackwardOperands(*rows, None, None, seed, dy1=dy1)
    return prepare_backward(BackwardRequest(operands, parsed_backward(text).options))


def _forward(*arguments):
    prepared, operands = prepare_forward_of(arguments)
    return parsed_forward(arguments[-1]).pick(prepared.run(operands))


def _backward(*arguments):
    prepared, operands = prepare_backward_of(arguments)
    options, _, pick = parsed_backward(arguments[-1])
    return pick(with_dx_sum(prepared.run(operands), options))


def with_dx_sum(made: tuple, options: BackwardOptions) -> tuple:
    """The results of a backward, with the sum of dx over rows where its kernel has not given it."""
    dtype = options.dx_sum_dtype
    if dtype is None or torch.is_tensor(made[-1]):
        return made
    rows = made[0].reshape(-1, *options.extents)
    total = rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32))
    return (*made[:5], total.to(_dtype(dtype, rows.dtype)))


def _forward_without_memory(*arguments):
    return parsed_forward(arguments[-1]).pick(forward_without_memory(request_of(arguments)))


def _backward_without_memory(*arguments):
    _, x, _, _, weight, *_, text = arguments
    options, results, _ = parsed_backward(text)
    own = x.dtype if weight is None else weight.dtype
    made = {
        "dx": (x.shape, _dtype(options.dx_dtype, x.dtype)),
        "dweight": (options.extents, own),
        "dbias": (options.extents, _dtype(options.dbias_dtype, own)),
        "dresidual": (x.shape, _dtype(options.dresidual_dtype, x.dtype)),
        "dx_sum": (options.extents, _dtype(options.dx_sum_dtype, x.dtype)),
    }
    return [x.new_empty(made[name][0], dtype=made[name][1]) for name in results]


def _dtype(name: str | None, default: torch.dtype) -> torch.dtype:
    return default if name is None else getattr(torch, name)


for _name, _implementation, _fake in (
    ("norm_forward_in_graph", _forward, _forward_without_memory),
    ("norm_backward_in_graph", _backward, _backward_without_memory),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _device)
    torch.library.register_fake(f"cupynorm::{_name}", _fake, lib=_library)
