"""The gradient check of a user's own functions: which operands they get, what they may return.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

import numpy as np

from .. import reference
from ..dispatch.problem import NormName
from ..dtypes import compute_dtype
from ..gpu import arrays, nvrtc
from ..norm.checks import check_eps
from ..options import check_choice, check_flags, shown
from .cases import Case, Problem, given_problem
from .check import check_dtypes, check_norms, check_seed, in_words, random_trials
from .results import CheckResult
from .traps import THREE_DIMENSIONS, Trial, trap_trials

LIBRARIES = ("numpy", "cupy", "torch")
LAYOUTS = ("contiguous", "gap", "misaligned", "broadcast", "transposed", THREE_DIMENSIONS)
_OPERANDS = {
    **dict.fromkeys(("x", "input"), "x"),
    **dict.fromkeys(("normalized_shape", "shape"), "normalized_shape"),
    **dict.fromkeys(("weight", "w", "gamma"), "weight"),
    **dict.fromkeys(("bias", "b", "beta"), "bias"),
    **dict.fromkeys(("eps", "epsilon"), "eps"),
    **dict.fromkeys(("dy", "grad_output", "dout"), "dy"),
    "mean": "mean",
    "rstd": "rstd",
}
_ORDER = {
    "function": ("x", "normalized_shape", "weight", "bias", "eps"),
    "forward": ("x", "weight", "bias", "eps"),
    "backward": ("dy", "x", "mean", "rstd", "weight", "bias", "eps"),
}
_FORWARD = {"layer_norm": ("y", "mean", "rstd"), "rms_norm": ("y", "rstd")}
_BACKWARD = ("dx", "dweight", "dbias")


def check_function(
    function: Callable | tuple[Callable | None, Callable | None],
    inputs: Sequence[Any] | None = None,
    *,
    norm: NormName | Sequence[NormName] = "layer_norm",
    eps: float = 1e-5,
    library: str | None = None,
    shapes: Iterable[tuple[int, int]] | None = None,
    dtypes: Iterable[str] = ("float32",),
    traps: bool = False,
    zero_centered_weight: bool = False,
    seed: int = 0,
) -> CheckResult:
    """Compare your own norm with float64, element by element, as cupynorm.check does the kernels.

    Examples:
        >>> cupynorm.check_function(torch.nn.functional.layer_norm, shapes=[(4, 64)]).ok
        True

    function: function(input, normalized_shape, weight, bias, eps) -> y. torch's autograd computes
        the gradients; with another library only y is checked. Or a pair, of which one may be None:
        forward(x, weight, bias, eps) -> y, or (y, mean, rstd), for RMSNorm (y, rstd);
        backward(dy, x, mean, rstd, weight) -> dx, or (dx, dweight, dbias), without mean for
        RMSNorm. mean and rstd are right ones, in float32, or float64 for float64.
    x, y, dy and dx are [num_rows, num_cols]; mean and rstd are [num_rows]. Parameters of these
    names may be left out or in another order: see cupynorm.verify.check_function.

    inputs: your own (x, weight, bias, dy), of which later ones may be None or left out. None:
        random ones, as in cupynorm.check.
    library: of the arrays that functions get: "numpy", "cupy" or "torch", on a GPU if there is one.
        None: that of inputs; else torch, and NumPy without torch or if the function is right with
        NumPy's arrays alone. NumPy and CuPy have bfloat16 with ml_dtypes.
    traps: also data and layouts on which other norms failed: cupynorm.verify.traps lists them. An
        error that your function raises there is a finding.
    norm, eps, shapes, dtypes: as in cupynorm.check. zero_centered_weight: 1 + weight multiplies.
    seed: of the random values.

    Returns a CheckResult. Raises ValueError for a result that is None, detached or of a wrong
    shape, a function that calls sys.exit, and arguments that do not go together; and what a
    function raises.
    """
    check_seed(seed)
    check_flags(traps=traps, zero_centered_weight=zero_centered_weight)
    named = {"function": function}
    if isinstance(function, (tuple, list)):
        if len(function) != 2:
            raise ValueError(f"function has {len(function)} values; expected (forward, backward)")
        named = dict(zip(("forward", "backward"), function))
    if not any(each is not None for each in named.values()):
        raise ValueError("function is None; expected a function, or a pair (forward, backward)")
    norms, eps = check_norms(norm), check_eps(eps, "float64", has_default=False)
    options = {"zero_centered_weight": zero_centered_weight, "eps": eps}
    if inputs is not None:
        if traps:
            raise ValueError("traps is given together with inputs; expected one of the two")
        if not isinstance(inputs, (tuple, list)) or not 1 <= len(inputs) <= 4:
            raise TypeError(f"inputs is {shown(inputs)}; expected a tuple (x, weight, bias, dy)")
        given = dict(zip(("input", "weight", "bias", "dy"), inputs))
        if library is None:
            module = type(given.get("input")).__module__.partition(".")[0]
            library = "cupy" if module == "cupy" else "numpy"
            library = "torch" if arrays.is_torch(given.get("input")) else library

    def run(library: str | None) -> CheckResult:
        own = Callables(**named, library=library)
        if inputs is None:
            cases = [
                Case(norm, 0, 0, dtype, **options | own.absent(norm))
                for norm, dtype in product(norms, check_dtypes(dtypes))
            ]
            trials = random_trials(cases, shapes, seed)
            for case in cases if traps else ():
                trials += own.traps(case, seed)
        else:
            for name in own.never_taken(norms):
                if given.get(name) is not None:
                    raise ValueError(
                        f"{name} is given; expected None: your function has no parameter for it"
                    )
            trials = [
                Trial(given_problem(**given, seed=seed, norm=norm, **options)) for norm in norms
            ]
        result = check_callables(trials, own, traps)
        if not traps:
            result.not_covered.append("strided, constant and extreme rows (traps=True)")
        return result

    if library is not None:
        return run(library)
    return check_either(run)


def check_either(run: Callable[[str], CheckResult]) -> CheckResult:
    """What run says of torch's tensors; of NumPy's arrays where a function is right with them."""
    library = Library().name
    if library == "numpy":
        return run(library)
    error, result = None, CheckResult()
    try:
        result = run(library)
    except Exception as raised:  # whatever a function raises for tensors
        error = raised
    if not result.ok:
        with suppress(Exception):
            other = run("numpy")
            if other.ok:
                why = "; ".join(result.diagnoses[:1])
                why = f"it raised {type(error).__name__}" if error else why
                other.not_covered.insert(0, f"torch tensors, with which it is off: {why}")
                return other
    if error:
        raise error
    return result


def check_callables(trials: Iterable[Trial], own: Callables, traps: bool = False) -> CheckResult:
    """traps: an error that a function raises in a trap is a finding."""
    result, cases = CheckResult(), []
    for trial in trials:
        cases.append(trial.problem.case)
        try:
            with without_exit(" or ".join(own.given)):
                got = own.run(trial.problem, trial.layouts)
        except Exception as error:
            if not (traps and trial.name):
                raise
            result.findings.append(trial.failed(error))
        else:
            result.findings += trial.judged(got, rounded_mean=True)
    library = Library(own.library)
    result.checked = in_words(f"{' and '.join(own.given)} on {library}", cases)
    result.not_covered += own.not_covered(library.name, {case.norm for case in cases})
    return result


# The arrays.


class Library:
    """NumPy, CuPy or torch: puts float64 values into arrays, and gets them back.

    name: of LIBRARIES, or None for torch if it is installed, else NumPy. Tensors are on a GPU if
    torch finds one. Raises ValueError for another name and for CuPy without a GPU,
    MissingLibraryError for a library that is not installed.
    """

    def __init__(self, name: str | None = None) -> None:
        without = " for torch if it is installed, else NumPy"
        check_choice("library", name, (*LIBRARIES, None), without)
        self._torch, self.name = None, name or "numpy"
        if name in (None, "torch"):
            try:
                self._torch, self.name = importlib.import_module("torch"), "torch"
            except ImportError as error:
                if name == "torch":
                    raise nvrtc.MissingLibraryError(
                        f"library is 'torch', which could not be imported ({error}): "
                        "pip install torch"
                    ) from error
        if name == "cupy":
            nvrtc.cupy()  # without CuPy, the error says what to install
            if not nvrtc.has_gpu():
                raise ValueError("library is 'cupy', but CuPy finds no GPU; use 'numpy' or 'torch'")

    def __str__(self) -> str:
        if self._torch is None:
            return {"numpy": "NumPy arrays", "cupy": "CuPy arrays"}[self.name]
        where = "a GPU" if self._torch.cuda.is_available() else "the CPU"
        return f"tensors of torch {self._torch.__version__} on {where}"

    def put(self, values: np.ndarray | None, dtype: str | None, layout: str = "contiguous") -> Any:
        """An array of this library, None for None. layout: one of LAYOUTS; gaps are NaN."""
        if values is None or dtype is None:
            return None
        if layout == "gap":
            wider = np.pad(values, ((0, 0), (0, 16)), constant_values=np.nan)
            return self._copy(wider, dtype)[:, : values.shape[1]]
        if layout == "misaligned":  # by one element
            return self._copy(np.append(np.nan, values), dtype)[1:].reshape(values.shape)
        if layout == "broadcast":  # every row is the first one
            row = self._copy(values[:1], dtype)
            return row.expand(values.shape) if self._torch else np.broadcast_to(row, values.shape)
        copy = self._copy(values.T if layout == "transposed" else values, dtype)
        copy = copy.T if layout == "transposed" else copy
        return copy[:, None] if layout == THREE_DIMENSIONS else copy

    def _copy(self, values: np.ndarray, dtype: str) -> Any:
        if self._torch is not None:
            copy = arrays.from_float64(values, dtype, self._torch.empty(0))
            return copy.to("cuda" if self._torch.cuda.is_available() else "cpu")
        copy = arrays.from_float64(values, dtype, np.empty(0))
        return nvrtc.cupy().asarray(copy) if self.name == "cupy" else copy

    def get(self, array: Any, label: str) -> np.ndarray:
        """The float64 values of a result, of any of the libraries. TypeError: it is no array."""
        array = np.asarray(array) if isinstance(array, (int, float, np.generic)) else array
        return arrays.to_float64(arrays.take(array, label))


# The functions.


def bind(function: Callable, order: Sequence[str], label: str) -> tuple[list[str], dict[str, str]]:
    """The operands of a function: those given by position, and parameter name -> operand.

    order: of the operands for parameters of unknown names. Raises ValueError if there are more.
    """
    try:
        every = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in, without a signature
        return list(order), {}
    parameters = [
        each for each in every if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in every)
    names: dict[str, str] = {}
    for each in parameters:
        operand = _OPERANDS.get(each.name)
        if operand is not None and operand not in names.values():
            names[each.name] = operand
    left = [name for name in order if name not in names.values()]
    for each in parameters:
        if each.name not in names and each.default is each.empty:
            if not left:
                raise ValueError(
                    f"{label} has a required parameter {each.name}, for which no operand is left; "
                    f"expected at most {', '.join(order)}"
                )
            names[each.name] = left.pop(0)
    positional = [
        names.pop(each.name)
        for each in parameters
        if each.name in names
        and (each.kind is each.POSITIONAL_ONLY or takes_any and each.kind is not each.KEYWORD_ONLY)
    ]
    return positional + (left if takes_any else []), names


@contextmanager
def without_exit(what: str) -> Iterator[None]:
    """Raises ValueError where a user's code, which is named, calls sys.exit."""
    try:
        yield
    except SystemExit as end:
        raise ValueError(
            f"{what} called sys.exit, so nothing is checked; expected it to return"
        ) from end


class Callables:
    """What is checked instead of the kernels: "function", "forward" and "backward", as for
    check_function. library: of their arrays. Raises ValueError for what is not callable."""

    def __init__(self, *, library: str | None = None, **functions: Callable | None) -> None:
        self.given = {label: each for label, each in functions.items() if each is not None}
        self.library = library
        for label, each in self.given.items():
            if not callable(each):
                raise ValueError(f"{label} is of type {type(each).__name__}; expected a callable")

    def _bound(self, label: str, norm: str) -> tuple[list[str], dict[str, str]]:
        order = [name for name in _ORDER[label] if name != "mean" or norm == "layer_norm"]
        with without_exit(label):
            return bind(self.given[label], order, label)

    def operands(self, norm: str) -> set[str]:
        """The operands that the functions get."""
        every = (self._bound(label, norm) for label in self.given)
        return {name for positional, names in every for name in (*positional, *names.values())}

    def absent(self, norm: str) -> dict[str, None]:
        """Which of weight and bias no function takes, as fields of a case. Backward alone may
        return dbias without a bias."""
        taken = {"bias"} if self.given.keys() == {"backward"} else set()
        return dict.fromkeys({"weight", "bias"} - self.operands(norm) - taken)

    def never_taken(self, norms: Iterable[str]) -> list[str]:
        """Which of weight and bias no function takes for any of the norms."""
        absent = [self.absent(norm) for norm in norms]
        return [
            name for name in ("weight", "bias") if absent and all(name in each for each in absent)
        ]

    def not_covered(self, library: str, norms: set[str]) -> list[str]:
        """What is not checked of functions like these."""
        left = [f"{name}: no function has a parameter for it" for name in self.never_taken(norms)]
        if "function" not in self.given:
            return left + [name for name in ("forward", "backward") if name not in self.given]
        return left + ["gradients: only torch differentiates a function"] * (library != "torch")

    def traps(self, case: Case, seed: int = 0) -> list[Trial]:
        """All traps of a case for these functions."""
        library, takes_eps = Library(self.library).name, "eps" in self.operands(case.norm)
        return trap_trials(case, library, takes_eps, "function" in self.given, seed)

    def run(self, problem: Problem, layouts: Mapping[str, str]) -> dict[str, np.ndarray]:
        """The results by name, as float64. layouts: of inputs by name, from LAYOUTS.

        Raises ValueError for a result that is not what check_function expects, and for a function
        that changes its inputs.
        """
        library, case = Library(self.library), problem.case
        operands: dict[str, Any] = {"normalized_shape": (case.num_cols,), "eps": case.eps}
        dtypes = {"x": case.x, "dy": case.dtype("y")}
        for name in ("weight", "bias", "x", "dy"):
            dtype = dtypes.get(name) or case.dtype(name)
            layout = layouts.get(name, "contiguous")
            operands[name] = library.put(getattr(problem, name), dtype, layout)

        def call(label: str) -> Any:
            positional, names = self._bound(label, case.norm)
            keywords = {name: operands[operand] for name, operand in names.items()}
            returned = self.given[label](*map(operands.get, positional), **keywords)
            for name in ("x", "dy", "weight", "bias"):
                values = getattr(problem, name)
                if operands[name] is None or values is None:
                    continue
                now = library.get(operands[name], name).reshape(values.shape)
                if not np.array_equal(now, values, equal_nan=True):
                    raise ValueError(
                        f"{label} has changed {name}; expected it to leave its inputs alone"
                    )
            return returned

        results = {}
        for label in self.given:
            if label == "backward":
                # Not forward's own: one wrong statistic would make all gradients wrong, too.
                right = getattr(reference, case.norm)(problem.x, eps=case.eps)
                for name in ("mean", "rstd"):
                    operands[name] = library.put(getattr(right, name), compute_dtype(case.x).name)
            if label != "function":
                names = _BACKWARD if label == "backward" else _FORWARD[case.norm]
                made = _split(call(label), names, label)
            elif library.name == "torch":
                made = _differentiated(lambda: call("function"), operands)
            else:
                made = {"y": call(label)}
            for name, value in made.items():
                try:
                    values = library.get(value, name)
                except TypeError as error:
                    raise ValueError(f"{label} returned no array: {error}") from error
                results[name] = _of_right_shape(values, name, problem, label)
        return results


def _split(returned: Any, names: Sequence[str], label: str) -> dict[str, Any]:
    """What a function returned, by name: one array, or a sequence."""
    expected = f"expected {names[0]}, or ({', '.join(names)})"
    if returned is None:
        raise ValueError(f"{label} returned None; {expected}")
    if hasattr(returned, "_asdict"):  # of fields with these names and others
        fields = returned._asdict()
        return {name: fields[name] for name in names if fields.get(name) is not None}
    values = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    allowed = (1, len(names)) if label == "forward" else range(1, len(names) + 1)
    if len(values) not in allowed:
        raise ValueError(f"{label} returned {len(values)} values; {expected}")
    by_name = {name: value for name, value in zip(names, values) if value is not None}
    if not by_name or (label == "forward" and values[0] is None):
        raise ValueError(f"{label} returned nothing but None, or no {names[0]}; {expected}")
    return by_name


def _differentiated(call: Callable[[], Any], operands: dict[str, Any]) -> dict[str, Any]:
    """y and, by autograd, the gradients of the operands. Changes x, weight and bias to leaves."""
    import torch

    leaves = {name: operands[name] for name in ("x", "weight", "bias")}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items() if leaf is not None}
    y, expected = call(), "expected y, a torch tensor with a graph to its inputs"
    y = y[0] if isinstance(y, (tuple, list)) and y else y
    if not isinstance(y, torch.Tensor):
        raise ValueError(f"function returned {arrays.type_in_words(y)}; {expected}")
    if not y.requires_grad:
        raise ValueError(
            "function returned a tensor that is detached from the graph (requires_grad is False); "
            f"{expected}. Without autograd, give (forward, backward) instead"
        )
    dy = operands["dy"].to(y.dtype)
    gradients = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
    for name, gradient in zip(leaves, gradients):
        if gradient is None:
            raise ValueError(
                f"function returned a y that does not depend on {name} in autograd's graph; "
                f"expected a gradient for each of {', '.join(leaves)}"
            )
    return {"y": y} | {f"d{name}": each for name, each in zip(leaves, gradients)}


def _of_right_shape(values: np.ndarray, name: str, problem: Problem, label: str) -> np.ndarray:
    """The values in the shape that results of this name have."""
    rows, cols = problem.case.num_rows, problem.case.num_cols
    expected = dict.fromkeys(("mean", "rstd"), (rows,)) | dict.fromkeys(_BACKWARD[1:], (cols,))
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
