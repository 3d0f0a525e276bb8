"""A user's own element-wise functor: its lines of CUDA, and the struct that is compiled with a
kernel. Pure Python, no GPU needed.

The structs are templates of the compute type C and of the dtypes of the functor's arrays, so the
text depends only on the user's lines. cuda_src/operands/functor.cuh says how kernels use them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..dtypes import DTYPES

ROLES = {"load": "x", "store": "y"}  # what each applies its lines to
MOST_ARRAYS, MOST_NUMBERS = 8, 8  # all words of a kernel's argument fit the buffer of gpu/launch.py
_OWN_NAMES = {"C", "row", "col", "num_cols"}
_OWN_NAMES |= {"x", "y", "dx", "dy", "x_at", "y_at", "dx_at", "dy_at"}


class FunctorError(ValueError):
    """Raised where the lines of a functor do not compile; the message is the compiler's.

    Examples:
        >>> issubclass(cupynorm.FunctorError, ValueError)
        True
    """


@dataclass(frozen=True)
class Functor:
    """An element-wise function in CUDA, which layer_norm and rms_norm take as load or store.

    Examples:
        >>> gate = cupynorm.functors.silu_gate
        >>> gate.name, gate.arrays
        ('silu_gate', ('gate',))

    cupynorm.functor makes one, with its arguments as the fields of the same names. Calling it with
    its arrays and numbers by name binds them, and raises TypeError for a name that is missing or
    unknown.

    lines, backward: the CUDA of the function and of its gradient; backward is None without one.
    origin: what messages of the compiler call the lines.
    reference: the same function in NumPy, or None. Functors with the same lines are equal whatever
        their references.
    """

    name: str
    lines: str
    arrays: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    backward: str | None = None
    origin: str = ""  # what the compiler's messages call the lines
    reference: Callable | None = field(default=None, compare=False)

    def __call__(self, **values: Any) -> BoundFunctor:
        """The functor with an array or a number for each of its names.

        Raises TypeError if a name is missing or unknown, or a number is none.
        """
        names = (*self.arrays, *self.numbers)
        for name in names:
            if name not in values or values[name] is None:
                raise TypeError(f"{self.name} needs {name}; expected {', '.join(names)}")
        for name in values:
            if name not in names:
                expected = ", ".join(names) or "nothing"
                raise TypeError(f"{self.name} got {name}; expected {expected}")
        for name in self.numbers:
            if isinstance(values[name], bool) or not isinstance(values[name], (int, float)):
                raise TypeError(f"{name} of {self.name} is {values[name]!r}; expected a number")
        return BoundFunctor(
            self,
            tuple([values[name] for name in self.arrays]),
            tuple([float(values[name]) for name in self.numbers]),
        )


class BoundFunctor(NamedTuple):
    """A functor with its arrays and numbers, in the order of its names."""

    functor: Functor
    arrays: tuple[Any, ...] = ()
    numbers: tuple[float, ...] = ()


class Functors(NamedTuple):
    """The functors of one call."""

    load: BoundFunctor | None = None
    store: BoundFunctor | None = None

    def arrays(self) -> tuple[Any, ...]:
        """All arrays: the load's, then the store's."""
        load = () if self.load is None else self.load.arrays
        return load if self.store is None else (*load, *self.store.arrays)

    def names(self) -> tuple[str, ...]:
        """Of the arrays, as "store.gate"."""
        return tuple(
            f"{role}.{name}"
            for role, bound in zip(ROLES, self)
            if bound is not None
            for name in bound.functor.arrays
        )

    def with_arrays(self, arrays: Sequence[Any]) -> Functors:
        """The same with other arrays, in the order of arrays()."""
        load, store, count = self.load, self.store, len(self.load.arrays) if self.load else 0
        return Functors(
            load and load._replace(arrays=tuple(arrays[:count])),
            store and store._replace(arrays=tuple(arrays[count:])),
        )


def functor(
    name: str,
    lines: str | Path,
    *,
    arrays: Sequence[str] = (),
    numbers: Sequence[str] = (),
    backward: str | Path | None = None,
    reference: Callable | None = None,
) -> Functor:
    """A few lines of CUDA that layer_norm and rms_norm fuse into their kernels.

    Examples:
        >>> scaled = cupynorm.functor("scaled", "y = y * factor;", numbers=("factor",))
        >>> x = np.array([[1.0, 3.0]])
        >>> cupynorm.layer_norm(x, 2, store=scaled(factor=2.0)).round(3)
        array([[-2.,  2.]])

    `store=` applies the lines to each element y, after weight and bias and before y is rounded.
    `load=` applies them to each element x before anything else. The lines assign y (or x). They
    see, as local variables:

    y (or x): the element, in the compute type C: float, or double for float64 tensors.
    each name of `arrays`, of type C: the array's element at the same row and column.
    each name of `numbers`, of type C.
    row, col, num_cols: long long; the row and column after flattening, and the row's length.
    y_at(col), x_at(col): the element at another column of the same row, before the lines.

    Write C(0.5) rather than 0.5: a double literal makes a GPU compute in double. exp, log, tanh,
    erf, sqrt and other functions of CUDA's mathematics are overloaded for C.

    name: an identifier, which errors show.
    lines: the CUDA, or a pathlib.Path of a file that holds it.
    arrays, numbers: names of what the call binds: functor(gate=array, alpha=0.5). An array is
        broadcast to the input's shape. Its last dimensions are normalized_shape or all 1; over the
        rows it may repeat as in [batch, 1, N] or [1, seq, 1, N]. Any of the four dtypes.
    backward: lines for the derivative. They get dy (or dx), the gradient of the functor's result,
        and leave in it the gradient of its argument. They may set d<name> for each array, which is
        0 otherwise, and may read y and all of the above. With `store`, dy_at(col) is the gradient
        of the result at another column. With `load`, each element may depend on its own column
        alone. The gradient of a broadcast array is the sum over its repeats: the kernel writes
        every term in the compute dtype, and the array's library adds them.
    reference: a Python function of float64 NumPy arrays that computes the same, for tests:
        reference(y, **arrays and numbers), with y of shape [num_rows, num_cols].

    Returns a cupynorm.Functor. Raises ValueError for names that do not fit, TypeError for lines of
    another type. Lines that do not compile raise cupynorm.FunctorError, a ValueError, at the call
    that uses them.
    """
    for field_name, names in (("arrays", arrays), ("numbers", numbers)):
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise TypeError(
                f"{field_name} is {names!r}; expected a sequence of names, as ({names!r},)"
            )
    if reference is not None and not callable(reference):
        raise TypeError(f"reference is {reference!r}; expected a function of NumPy arrays")
    arrays, numbers = tuple(arrays), tuple(numbers)
    for each in (name, *arrays, *numbers):
        if not isinstance(each, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", each):
            raise ValueError(f"{each!r} names a functor, array or number; expected an identifier")
    names = (*arrays, *numbers, *(f"d{each}" for each in arrays))
    taken = sorted(set(names) & _OWN_NAMES)
    if taken or len(set(names)) < len(names):
        raise ValueError(
            f"functor {name} has names {', '.join(names)}; expected each once, and none of "
            f"{', '.join(sorted(_OWN_NAMES))}"
        )
    if len(arrays) > MOST_ARRAYS or len(numbers) > MOST_NUMBERS:
        raise ValueError(
            f"functor {name} has {len(arrays)} arrays and {len(numbers)} numbers; "
            f"expected at most {MOST_ARRAYS} and {MOST_NUMBERS}"
        )
    origin = str(lines) if isinstance(lines, Path) else f"functor {name}"
    forward, gradient = (_text_of(each, name) for each in (lines, backward))
    if forward is None:
        raise TypeError(f"functor {name} has no lines; expected a str or a pathlib.Path")
    return Functor(name, forward, arrays, numbers, gradient, origin, reference)


def _text_of(lines: str | Path | None, name: str) -> str | None:
    if isinstance(lines, Path):
        return lines.read_text(encoding="utf-8")
    if lines is None or isinstance(lines, str):
        return lines
    raise TypeError(
        f"functor {name} has lines of type {type(lines).__name__}; expected a str or a pathlib.Path"
    )


# As C++.


@dataclass(frozen=True)
class Fused:
    """A functor in the kernels of one problem.

    dtypes, reaches: of its arrays; a reach is a value of Reach in cuda_src/operands/functor.cuh.
    source: the dtype of the tensor that it is applied to, where Problem has that of the arithmetic.
    gradients: backward, the dtype of each array's gradient as the kernel writes it, or None.
    """

    functor: Functor
    dtypes: tuple[str, ...] = ()
    reaches: tuple[str, ...] = ()
    source: str | None = None
    gradients: tuple[str | None, ...] = ()

    def __str__(self) -> str:
        return self.functor.name

    def struct(self, role: str, compute: str, backward: bool = False) -> str:
        """The C++ name of the functor's struct. compute: a dtype."""
        arguments = [DTYPES[compute].cpp]
        for dtype, reach in zip(self.dtypes, self.reaches):
            arguments.append(f"RowArray<{DTYPES[dtype].cpp}, Reach::{reach}>")
        if backward:
            # Where a gradient is not wanted, its pointer is null; the type does not matter.
            arguments += [DTYPES[dtype or compute].cpp for dtype in self.gradients]
        return f"{struct_name(self.functor, role, backward)}<{', '.join(arguments)}>"


def struct_name(functor: Functor, role: str, backward: bool) -> str:
    """The name of the struct template of a functor."""
    return f"{functor.name}_of_{role}{'_gradient' * backward}"


@cache
def struct_text(functor: Functor, role: str, backward: bool = False) -> str:
    """The struct template of a functor's lines: what functor.cuh calls `apply`."""
    value, arrays, numbers = ROLES[role], functor.arrays, functor.numbers
    indices = range(len(arrays))
    types = ["class C", *(f"class Array{at}" for at in indices)]
    members = [f"Array{at} array{at}" for at in indices]
    members += [f"double number{at}" for at in range(len(numbers))]
    members.append("long long all_cols")
    others = ["class At"]
    takes = [f"C {value}" if backward else f"C& {value}"]
    gives = ["values[at]"]
    if backward:
        types += [f"class Gradient{at}" for at in indices]
        members += [f"Gradient{at}* gradient{at}" for at in indices]
        others.append("class GradientAt")
        takes.append(f"C& d{value}")
        gives.append("gradients[at]")
    for at, name in enumerate(arrays):
        takes.append(f"C {name}")
        gives.append(f"read{at}[at]")
        if backward:
            takes.append(f"C& d{name}")
            gives.append(f"made{at}[at]")
    for at, name in enumerate(numbers):
        takes.append(f"const C {name}")
        gives.append(f"static_cast<C>(number{at})")
    takes += ["const long long row", "const long long col", "const long long num_cols"]
    gives += ["row", "(col & -pack_size) | at", "all_cols"]
    takes.append(f"const At& {value}_at")
    gives.append("other")
    arguments = ["long long row", "long long col", "C (&values)[pack_size]"]
    if backward:
        has_other = role == "store"
        takes.append("const GradientAt&" + f" d{value}_at" * has_other)
        gives.append("other_gradient")
        arguments[-1] = "const C (&values)[pack_size]"
        arguments.append("C (&gradients)[pack_size]")
    arguments.append("const At& other")
    arguments += ["const GradientAt& other_gradient"] * backward
    origin = (functor.origin or functor.name) + ", backward" * backward
    origin = origin.replace("\\", "\\\\").replace('"', '\\"')
    reads = [
        f"    C read{at}[pack_size];\n    array{at}.load(row, col, read{at});\n" for at in indices
    ]
    makes = [f"    C made{at}[pack_size] = {{}};\n" for at in indices] if backward else []
    writes = [
        f"    if (gradient{at} != nullptr)\n"
        f"      store_pack<pack_size>(gradient{at} + row * all_cols + col, "
        f"repack<Gradient{at}>(made{at}));\n"
        for at in indices
    ]
    return (
        f"template <{', '.join(types)}>\n"
        f"struct {struct_name(functor, role, backward)} {{\n"
        + "".join(f"  {member};\n" for member in members)
        + f"  template <{', '.join(others)}>\n"
        f"  __device__ __forceinline__ static void lines({', '.join(takes)}) {{\n"
        f'#line 1 "{origin}"\n{functor.backward if backward else functor.lines}\n'
        '#line 1 "functor"\n  }\n'
        f"  template <int pack_size, {', '.join(others)}>\n"
        f"  __device__ __forceinline__ void apply({', '.join(arguments)}) const {{\n"
        + "".join([*reads, *makes])
        + "#pragma unroll\n    for (int at = 0; at < pack_size; ++at)\n"
        + f"      lines({', '.join(gives)});\n"
        + "".join(writes if backward else [])
        + "  }\n};\n"
    )
