"""A user's own functions as the source of results: which operands they get, what they may return.

A function gets arrays of NumPy, CuPy or torch. Names of its parameters decide which operands:

    x, input; weight, w, gamma; bias, b, beta; eps, epsilon; normalized_shape, shape
    dy, grad_output, dout; mean; rstd                                  in backward

Required parameters of other names get the operands that remain, in this order:

    function    input, normalized_shape, weight, bias, eps
    forward     x, weight, bias, eps
    backward    dy, x, mean, rstd, weight, bias, eps

RMSNorm has no mean. A function without a parameter for weight or bias is checked without it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import reference
from ..dtypes import compute_dtype
from ..gpu.arrays import type_in_words
from ..table import printable
from .cases import Problem
from .libraries import Library

THREE_DIMENSIONS = "three dimensions"  # a layout for functions, with rows of x in two dimensions
_NAMES = {
    "x": ("input",),
    "normalized_shape": ("shape",),
    "weight": ("w", "gamma"),
    "bias": ("b", "beta"),
    "eps": ("epsilon",),
    "dy": ("grad_output", "dout"),
    "mean": (),
    "rstd": (),
}
_OPERANDS = {name: operand for operand in _NAMES for name in (operand, *_NAMES[operand])}
_ORDER = {
    "function": ("x", "normalized_shape", "weight", "bias", "eps"),
    "forward": ("x", "weight", "bias", "eps"),
    "backward": ("dy", "x", "mean", "rstd", "weight", "bias", "eps"),
}
_FORWARD = {"layer_norm": ("y", "mean", "rstd"), "rms_norm": ("y", "rstd")}
_BACKWARD = ("dx", "dweight", "dbias")


def bind(function: Callable, order: Sequence[str], label: str) -> tuple[list[str], dict[str, str]]:
    """The operands of a function: those given by position, and parameter name -> operand.

    order: of the operands for parameters of unknown names. Raises ValueError if there are more.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in, without a signature
        return list(order), {}
    left, names = list(order), {}
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    parameters = [
        each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    for each in parameters:
        operand = _OPERANDS.get(each.name)
        if operand is not None and operand not in names.values():
            names[each.name] = operand
            if operand in left:
                left.remove(operand)
    for each in parameters:
        if each.name not in names and each.default is each.empty:
            if not left:
                raise ValueError(
                    f"{label} has a required parameter {each.name}, for which no operand is left; "
                    f"expected at most {', '.join(order)}"
                )
            names[each.name] = left.pop(0)
    positional = []
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY or not (takes_any or each.kind is each.POSITIONAL_ONLY):
            continue
        if each.name not in names:
            break
        positional.append(names.pop(each.name))
    return positional + (left if takes_any else []), names


def imported(text: str, label: str) -> Callable:
    """The function MODULE:NAME. Raises ValueError where there is none. label: of the argument."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{label} is {text!r}; expected MODULE:NAME, such as my_norms:layer_norm")
    named, module_named = f"{label} {printable(text)}", printable(module)
    with without_exit(f"{named}: {module_named}"):
        try:
            value = importlib.import_module(module)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            why = str(error) if isinstance(error, ImportError) else why
            raise ValueError(f"{named}: {module_named} could not be imported: {why}") from error
        for part in name.split("."):
            if not hasattr(value, part):
                raise ValueError(f"{named}: there is no {printable(name)} in {module_named}")
            value = getattr(value, part)
    if not callable(value):
        raise ValueError(f"{named} is of type {type(value).__name__}; expected a function")
    return value


@contextmanager
def without_exit(what: str) -> Iterator[None]:
    """Raises ValueError where a user's code ends the process, as sys.exit does.

    what: the code. Errors and KeyboardInterrupt pass. BrokenPipeError does not: a command takes it
    for the end of its own output.
    """
    try:
        yield
    except BaseException as end:
        is_error = isinstance(end, (Exception, KeyboardInterrupt))
        if is_error and not isinstance(end, BrokenPipeError):
            raise
        did = "called sys.exit" if isinstance(end, SystemExit) else f"raised {type(end).__name__}"
        raise ValueError(f"{what} {did}, so nothing is checked; expected it to return") from end


class Callables:
    """What is checked instead of the kernels, and the library of its arrays.

    function: differentiated by torch's autograd; with another library only y is checked.
    forward, backward: called as they are; either may be None. library: as for Library.
    Raises ValueError for functions that do not go together or are not callable.
    """

    def __init__(
        self,
        function: Callable | None = None,
        forward: Callable | None = None,
        backward: Callable | None = None,
        library: str | None = None,
    ) -> None:
        named = {"function": function, "forward": forward, "backward": backward}
        self.given = {label: each for label, each in named.items() if each is not None}
        self.library = library
        if function is not None and len(self.given) > 1:
            raise ValueError(
                "function is given together with forward or backward; expected function alone, "
                "whose backward is autograd's, or forward, backward or both"
            )
        for label, each in self.given.items():
            if not callable(each):
                raise ValueError(f"{label} is of type {type(each).__name__}; expected a callable")

    def __bool__(self) -> bool:
        return bool(self.given)

    def _bound(self, label: str, norm: str) -> tuple[list[str], dict[str, str]]:
        order = [name for name in _ORDER[label] if name != "mean" or norm == "layer_norm"]
        with without_exit(label):
            return bind(self.given[label], order, label)

    def absent(self, norm: str) -> dict[str, None]:
        """Which of weight and bias no function takes, as fields of a case. Backward alone may
        return dbias without a bias."""
        if not self:
            return {}
        taken = {"bias"} if self.given.keys() == {"backward"} else set()
        return dict.fromkeys({"weight", "bias"} - self.operands(norm) - taken)

    def operands(self, norm: str) -> set[str]:
        """The operands that the functions get."""
        every = (self._bound(label, norm) for label in self.given)
        return {name for positional, names in every for name in (*positional, *names.values())}

    def run(
        self, problem: Problem, layouts: Mapping[str, str] | None = None
    ) -> dict[str, np.ndarray]:
        """The results by name, as float64.

        layouts: of x and dy by name, from run.LAYOUTS, or "three dimensions".

        Raises ValueError for a result that is None, detached, of a wrong shape or too long, and for
        a function that changes its inputs or calls sys.exit.
        """
        with without_exit(" or ".join(self.given)):
            return self._results(problem, layouts)

    def _results(
        self, problem: Problem, layouts: Mapping[str, str] | None
    ) -> dict[str, np.ndarray]:
        library, case = Library(self.library), problem.case
        operands: dict[str, Any] = {"normalized_shape": (case.num_cols,), "eps": case.eps}
        dtypes = {"x": case.x, "dy": case.dtype("y")}
        for name in ("weight", "bias", "x", "dy"):
            dtype = dtypes.get(name) or case.dtype(name)
            layout = (layouts or {}).get(name, "contiguous")
            is_deep = layout == THREE_DIMENSIONS
            layout = "contiguous" if is_deep else layout
            operand = library.put(getattr(problem, name), dtype, layout)
            operands[name] = operand[:, None] if is_deep else operand

        def call(label: str) -> Any:
            positional, names = self._bound(label, case.norm)
            keywords = {name: operands[operand] for name, operand in names.items()}
            returned = self.given[label](*map(operands.get, positional), **keywords)
            _check_unchanged(label, problem, operands, library)
            return returned

        results: dict[str, Any] = {}
        if "function" in self.given and library.name == "torch":
            results = _differentiated(lambda: call("function"), operands)
        elif "function" in self.given:
            results = {"y": call("function")}
        source = dict.fromkeys(results, "function")
        if "forward" in self.given:
            results |= _split(call("forward"), _FORWARD[case.norm], "forward")
            source |= dict.fromkeys(_FORWARD[case.norm], "forward")
        if "backward" in self.given:
            # Not forward's own: one wrong statistic would make all gradients wrong, too.
            operands |= _statistics(problem, library)
            results |= _split(call("backward"), _BACKWARD, "backward")
            source |= dict.fromkeys(_BACKWARD, "backward")
        checked = {}
        for name, value in results.items():
            try:
                values = library.get(value, name)
            except TypeError as error:
                raise ValueError(f"{source[name]} returned no array: {error}") from error
            checked[name] = _checked(values, name, problem, source[name])
        return checked


def _check_unchanged(
    label: str, problem: Problem, operands: dict[str, Any], library: Library
) -> None:
    """Raises ValueError if a function has written to its inputs."""
    for name in ("x", "dy", "weight", "bias"):
        values = getattr(problem, name)
        if operands[name] is None or values is None:
            continue
        now = library.get(operands[name], name).reshape(values.shape)
        if not np.array_equal(now, values, equal_nan=True):
            raise ValueError(f"{label} has changed {name}; expected it to leave its inputs alone")


def _statistics(problem: Problem, library: Library) -> dict[str, Any]:
    """mean and rstd as a right forward saves them: float64 values rounded once."""
    case = problem.case
    norm = getattr(reference, case.norm)
    result = norm(problem.x, eps=case.eps)
    dtype = compute_dtype(case.x).name
    return {name: library.put(getattr(result, name), dtype) for name in ("mean", "rstd")}


def _split(returned: Any, names: Sequence[str], label: str) -> dict[str, Any]:
    """What a function returned, by name: one array, a sequence, or fields of these names."""
    first = names[0]
    expected = f"expected {first}, or ({', '.join(names)})"
    if returned is None:
        raise ValueError(f"{label} returned None; {expected}")
    if hasattr(returned, "_asdict"):
        returned = returned._asdict()
    if isinstance(returned, dict):
        by_name = {name: returned[name] for name in names if returned.get(name) is not None}
        if not by_name:
            fields = printable(", ".join(map(str, returned)))
            raise ValueError(f"{label} returned fields {fields}; {expected}")
        return by_name
    if not isinstance(returned, (tuple, list)):
        return {first: returned}
    values = list(returned)
    if len(values) == 3 and names == _FORWARD["rms_norm"] and values[1] is None:
        del values[1]
    allowed = (1, len(names)) if label == "forward" else range(1, len(names) + 1)
    if len(values) not in allowed:
        raise ValueError(f"{label} returned {len(values)} values; {expected}")
    if values[0] is None and label == "forward":
        raise ValueError(f"{label} returned None as {first}; {expected}")
    by_name = {name: value for name, value in zip(names, values) if value is not None}
    if not by_name:
        raise ValueError(f"{label} returned nothing but None; {expected}")
    return by_name


def _differentiated(call: Callable[[], Any], operands: dict[str, Any]) -> dict[str, Any]:
    """y and, by autograd, the gradients of the operands. Changes x, weight and bias to leaves."""
    import torch

    leaves = {name: operands[name] for name in ("x", "weight", "bias")}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items() if leaf is not None}
    y = call()
    expected = "expected y, a torch tensor with a graph to its inputs"
    if isinstance(y, (tuple, list)) and y:
        y = y[0]
    if not isinstance(y, torch.Tensor):
        raise ValueError(f"function returned {type_in_words(y)}; {expected}")
    if not y.requires_grad:
        raise ValueError(
            "function returned a tensor that is detached from the graph (requires_grad is False); "
            f"{expected}. Without autograd, give forward and backward instead"
        )
    gradients = torch.autograd.grad(
        y, list(leaves.values()), operands["dy"].to(y.dtype), allow_unused=True
    )
    results = {"y": y} | {f"d{name}": each for name, each in zip(leaves, gradients)}
    for name, value in results.items():
        if value is None:
            raise ValueError(
                f"function returned a y that does not depend on {name[1:]} in autograd's graph; "
                f"expected a gradient for each of {', '.join(leaves)}"
            )
    return results


def _checked(values: np.ndarray, name: str, problem: Problem, label: str) -> np.ndarray:
    """The values in the shape that results of this name have."""
    case = problem.case
    rows, cols = case.num_rows, case.num_cols
    expected = {"mean": (rows,), "rstd": (rows,), "dweight": (cols,), "dbias": (cols,)}
    shape = expected.get(name, (rows, cols))
    if values.shape == shape:
        return values
    is_same = values.size == np.prod(shape) and values.shape[-1:] in ((1,), shape[-1:])
    if is_same and len(values.shape) > 1:
        return values.reshape(shape)
    hint = ""
    if name in ("dweight", "dbias") and values.shape == (rows,):
        hint = ": it is a sum over rows and has one value for each column"
    if values.shape == shape[::-1] and len(shape) == 2:
        hint = ": it is transposed"
    raise ValueError(
        f"{label} returned {name} of shape {values.shape} for x of shape {(rows, cols)}; "
        f"expected {shape}{hint}"
    )
