"""A user's own element-wise functor: its lines of CUDA, and the struct that is compiled with a
kernel. Pure Python, no GPU needed.

The structs are templates of the compute type C and of the dtypes of the functor's arrays, so the
text depends only on the user's lines. functor.cuh says how kernels use them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from numbers import Integral, Number
from pathlib import Path
from typing import Any, NamedTuple

from ..dtypes import DTYPES
from ..options import check_int, check_real, sequence, shown

ROLES = {"load": "x", "store": "y"}  # what each applies its lines to
MOST = 8  # arrays, numbers, seeds and functors of a role: their words fit those of gpu/launch.py
_OWN_NAMES = {"C", "row", "col", "num_cols"}
_OWN_NAMES |= {"x", "y", "dx", "dy", "x_at", "y_at", "dx_at", "dy_at"}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class FunctorError(ValueError):
    """Raised where the lines of a functor do not compile; the message is the compiler's.

    Examples:
        >>> issubclass(cupynorm.FunctorError, ValueError)
        True
    """


@dataclass(frozen=True)
class Functor:
    """An element-wise function in CUDA, which layer_norm and rms_norm take in `fuse=`.

    Examples:
        >>> gate = cupynorm.functors.silu_gate
        >>> gate.name, gate.arrays
        ('silu_gate', ('gate',))

    cupynorm.functor makes one, with its arguments as the fields of the same names. Calling it with
    its arrays, numbers and seeds binds them, in this order or by name. It raises TypeError for a
    name that is missing or unknown.

    origin: what messages of the compiler call the lines. Functors with the same lines are equal
    whatever reference and torch are.
    """

    name: str
    lines: str
    arrays: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    backward: str | None = None
    origin: str = ""  # what the compiler's messages call the lines
    reference: Callable | None = field(default=None, compare=False)
    torch: Callable | None = field(default=None, compare=False)
    seeds: tuple[str, ...] = ()
    per_row: tuple[str, ...] = ()
    multiple_of: int = 1

    def __call__(self, *arguments: Any, **values: Any) -> BoundFunctor:
        """The functor with an array, a number or a seed for each of its names.

        Raises TypeError if a name is missing or unknown, or a number is none.
        """
        names = (*self.arrays, *self.numbers, *self.seeds)
        expected = ", ".join(names) or "nothing"
        if len(arguments) > len(names):
            raise TypeError(f"{self.name} got {len(arguments)} arguments; expected {expected}")
        for name, value in zip(names, arguments):
            if name in values:
                raise TypeError(f"{self.name} got {name} twice; expected {expected}")
            values[name] = value
        for name in values:
            if name not in names:
                raise TypeError(f"{self.name} got {name}; expected {expected}")
        for name in (*self.arrays, *self.numbers):
            if values.get(name) is None:
                raise TypeError(f"{self.name} was given no {name}; expected {expected}")
        for name in self.numbers:
            if values[name].__class__ is not float:  # a NaN is a number here
                values[name] = check_real(f"{name} of {self.name}", values[name], "a number")
        return BoundFunctor(
            self,
            tuple([values[name] for name in self.arrays]),
            tuple([values[name] for name in self.numbers]),
            tuple([_seed(values.get(name), name, self.name) for name in self.seeds]),
        )

    @cached_property
    def role(self) -> str:
        """ "load" if the lines are about x, "store" if they are about y; else FunctorError."""
        found = [role for role, value in ROLES.items() if _mentions(self.lines, value)]
        if len(found) != 1:
            raise FunctorError(
                f"the lines of functor {self.name} mention {'both x and y' if found else 'neither'}"
                "; expected x or x_at for what acts on the input, y or y_at for the result"
            )
        return found[0]

    @cached_property
    def reads_argument(self) -> bool:
        """Whether the backward lines read what the lines were applied to."""
        return _mentions(self.backward or "", ROLES[self.role])

    @cached_property
    def reads_others(self) -> bool:
        """Whether the lines read other columns."""
        lines = _COMMENT.sub("", f"{self.lines}\n{self.backward or ''}")
        return bool(re.search(r"\bd?[xy]_at\b", lines))


def _mentions(lines: str, value: str) -> bool:
    """Whether lines of CUDA name a value or its other columns: x or x_at, and not pair.x."""
    return bool(re.search(rf"(?<![\w.])(?<!->){value}(_at)?\b", _COMMENT.sub("", lines)))


def _seed(value: Any, name: str, functor: str) -> Any:
    """A seed as it was given; an int as a signed one of 64 bits."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        if value >= 2**64 or value < -(2**63):
            raise ValueError(f"{name} of {functor} is {value}; expected an int of 64 bits")
        value = value if isinstance(value, int) else int(value)
        return value - 2**64 if value >= 2**63 else value
    if isinstance(value, (str, Number)):  # what else is no array is refused where it is read
        raise TypeError(
            f"{name} of {functor} is {value!r}; expected an int, one element of int64, or None"
        )
    return value


class BoundFunctor(NamedTuple):
    """A functor with its arrays, numbers and seeds, in the order of its names.

    A seed is an int, an array of one int64, or None: each call draws it.
    """

    functor: Functor
    arrays: tuple[Any, ...] = ()
    numbers: tuple[float, ...] = ()
    seeds: tuple[Any, ...] = ()


Fuse = Functor | BoundFunctor | Sequence[Functor | BoundFunctor]  # what `fuse=` takes


class Functors(NamedTuple):
    """The functors of one call, in the order in which they apply."""

    load: tuple[BoundFunctor, ...] = ()
    store: tuple[BoundFunctor, ...] = ()

    def parts(self) -> tuple[BoundFunctor, ...]:
        """All of them. torch.compile cannot trace a property of a named tuple before 2.9."""
        return self.load + self.store

    def arrays(self) -> tuple[Any, ...]:
        """The arrays of all, then the seeds of all."""
        arrays = [array for each in self.parts() for array in each.arrays]
        return tuple(arrays + [seed for each in self.parts() for seed in each.seeds])

    def names(self) -> tuple[str, ...]:
        """Of arrays(), as "silu_gate.gate"."""
        return (*(name for name, _, _ in self.named_arrays()), *self.names_of_seeds())

    def names_of_seeds(self) -> list[str]:
        named = zip(labels(self.parts()), self.parts())
        return [f"{label}.{seed}" for label, each in named for seed in each.functor.seeds]

    def named_arrays(self) -> list[tuple[str, Any, bool]]:
        """The name of each array, the array, and whether it is one per row."""
        return [
            (f"{label}.{name}", array, name in each.functor.per_row)
            for label, each in zip(labels(self.parts()), self.parts())
            for name, array in zip(each.functor.arrays, each.arrays)
        ]

    def with_arrays(self, arrays: Sequence[Any]) -> Functors:
        """The same with other arrays and seeds, in the order of arrays()."""
        left = iter(arrays)  # "_replace" is traced by torch.compile since 2.9 alone
        own = [tuple([next(left) for _ in each.arrays]) for each in self.parts()]
        parts = [
            BoundFunctor(
                each.functor, arrays, each.numbers, tuple([next(left) for _ in each.seeds])
            )
            for each, arrays in zip(self.parts(), own)
        ]
        return Functors(tuple(parts[: len(self.load)]), tuple(parts[len(self.load) :]))


def labels(bound: Sequence[Any]) -> list[str]:
    """The names of the functors of a call; one that comes again has its place behind it."""
    names = [each.functor.name for each in bound]
    return [
        name if names.index(name) == at else f"{name}#{at + 1}" for at, name in enumerate(names)
    ]


def check_chain(functors: Sequence[Functor]) -> None:
    """Raises ValueError if functors of one role cannot apply one after another."""
    value = ROLES[functors[0].role]
    for each in functors[1:]:
        if each.reads_others:
            raise ValueError(
                f"functor {each.name} reads other columns and comes after {functors[0].name}; "
                f"expected it first of those that act on {value}, and no other such one"
            )
    counts = {"functors": len(functors)}
    for kind in ("arrays", "numbers", "seeds"):
        counts[kind] = sum(len(getattr(each, kind)) for each in functors)
    for kind, count in counts.items():
        if count > MOST:
            names = ", ".join(each.name for each in functors)
            raise ValueError(
                f"functors on {value} ({names}) have {count} {kind} together; "
                f"expected at most {MOST}"
            )


def functor(
    name: str,
    lines: str | Path,
    *,
    arrays: Sequence[str] = (),
    numbers: Sequence[str] = (),
    backward: str | Path | None = None,
    reference: Callable | None = None,
    torch: Callable | None = None,
    seeds: Sequence[str] = (),
    per_row: Sequence[str] = (),
    multiple_of: int = 1,
) -> Functor:
    """A few lines of CUDA that layer_norm and rms_norm fuse into their kernels.

    Examples:
        >>> scaled = cupynorm.functor("scaled", "y = y * factor;", numbers=("factor",))
        >>> x = np.array([[1.0, 3.0]])
        >>> cupynorm.layer_norm(x, 2, fuse=scaled(2.0)).round(3)
        array([[-2.,  2.]])

    Lines about y apply to each element of the result, after weight and bias and before it is
    rounded. Lines about x apply to each element of the input, before a residual is added. They
    assign y (or x), and see as local variables:

    y (or x), and each name of `arrays` and `numbers`: of the compute type C, which is float, or
        double for float64 tensors. Write C(0.5): a double literal makes a GPU compute in double.
    row, col, num_cols: long long, after flattening. Each name of `seeds`: const long long.
    y_at(col), x_at(col): the element at another column of the same row, before the lines.
    random_word(seed, row, col): unsigned, 32 random bits, as cupynorm.functors.dropout uses them.

    name: an identifier, which errors show.
    lines: the CUDA, or a pathlib.Path of a file that holds it.
    arrays, numbers: names of what the call binds: functor(gate=array, alpha=0.5). An array is
        broadcast to the input's shape. Its last dimensions are normalized_shape or all 1; over the
        rows it may repeat as in [batch, 1, N] or [1, seq, 1, N]. Any of the four dtypes.
    per_row: those of arrays that have the input's shape without normalized_shape.
    seeds: names of seeds. Each is bound to an int, an int64 array of one element on the input's
        device, or None: each call then draws one there, without a sync, and keeps it for backward.
    multiple_of: rows of another number of columns are refused. Nothing else checks the columns that
        lines read.
    backward: lines for the derivative. They get dy (or dx), the gradient of the functor's result,
        and leave in it the gradient of its argument. They may set d<name> for each array, which is
        0 otherwise, and may read y and all of the above. Lines about y may read dy_at(col). In
        lines about x each element may depend on its own column alone. The array's library adds up
        the gradient of a broadcast array, of which the kernel writes every term.
    reference: the same of float64 NumPy arrays, for tests and host arrays:
        reference(y, **arrays, numbers and seeds), with y of shape [num_rows, num_cols].
    torch: the same of torch tensors, with y of shape [..., num_cols], for torch.compile,
        torch.export, transforms and second derivatives.

    Returns a cupynorm.types.Functor. Raises ValueError for names that do not fit, TypeError for
    lines of another type, and cupynorm.FunctorError, a ValueError, for lines about both x and y, or
    neither. Lines that do not compile raise it at the call that uses them.
    """
    kinds = {"arrays": arrays, "numbers": numbers, "seeds": seeds, "per_row": per_row}
    for kind, names in kinds.items():
        if isinstance(names, str):
            raise TypeError(f"{kind} is {names!r}; expected a sequence of names, as ({names!r},)")
        kinds[kind] = sequence(kind, names)
    for kind, function in (("reference", reference), ("torch", torch)):
        if function is not None and not callable(function):
            expected = "NumPy arrays" if kind == "reference" else "torch tensors"
            raise TypeError(f"{kind} is {function!r}; expected a function of {expected}")
    check_int("multiple_of", multiple_of, 1)
    arrays, numbers, seeds, per_row = kinds.values()
    for each in (name, *arrays, *numbers, *seeds, *per_row):
        if not isinstance(each, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", each):
            raise ValueError(
                f"{shown(each)} names a functor, array or number; expected an identifier"
            )
    names = (*arrays, *numbers, *seeds, *(f"d{each}" for each in arrays))
    taken = sorted(set(names) & _OWN_NAMES)
    if taken or len(set(names)) < len(names):
        raise ValueError(
            f"functor {name} has names {', '.join(names)}; expected each once, and none of "
            f"{', '.join(sorted(_OWN_NAMES))}"
        )
    if not set(per_row) <= set(arrays):
        raise ValueError(f"functor {name} has per_row {per_row}; expected some of arrays {arrays}")
    origin = str(lines) if isinstance(lines, Path) else f"functor {name}"
    forward, gradient = (_text_of(each, name) for each in (lines, backward))
    if forward is None:
        raise TypeError(f"functor {name} has no lines; expected a str or a pathlib.Path")
    made = Functor(
        *(name, forward, arrays, numbers, gradient, origin, reference, torch, seeds, per_row),
        multiple_of,
    )
    check_chain([made])
    return made


def _text_of(lines: str | Path | None, name: str) -> str | None:
    if isinstance(lines, Path):
        try:
            return lines.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"functor {name} has lines in {lines}; expected a file of text: {error}"
            ) from error
    if lines is None or isinstance(lines, str):
        return lines
    raise TypeError(
        f"functor {name} has lines of type {type(lines).__name__}; expected a str or a pathlib.Path"
    )


# As C++.


@dataclass(frozen=True)
class FusedPart:
    """A functor in the kernels of one problem.

    dtypes, reaches: of its arrays; a reach is a value of Reach in functor.cuh.
    gradients: backward, the dtype of each array's gradient as the kernel writes it, or None.
    """

    functor: Functor
    dtypes: tuple[str, ...] = ()
    reaches: tuple[str, ...] = ()
    gradients: tuple[str | None, ...] = ()

    def struct(self, compute: str, backward: bool = False, position: int = 0) -> str:
        """The C++ name of the functor's struct. compute: a dtype."""
        arguments = [DTYPES[compute].cpp]
        for dtype, reach in zip(self.dtypes, self.reaches):
            arguments.append(f"RowArray<{DTYPES[dtype].cpp}, Reach::{reach}>")
        if backward:
            # Where a gradient is not wanted, its pointer is null; the type does not matter.
            arguments += [DTYPES[dtype or compute].cpp for dtype in self.gradients]
        return f"{struct_name(self.functor, backward, position)}<{', '.join(arguments)}>"


@dataclass(frozen=True)
class Fused:
    """The functors of one role in the kernels of one problem, in their order.

    source: the dtype of the tensor that they are applied to, where Problem has that of the
    arithmetic.
    """

    parts: tuple[FusedPart, ...]
    source: str | None = None

    def __str__(self) -> str:
        return ", ".join(each.functor.name for each in self.parts)

    @property
    def reads_argument(self) -> bool:
        """Whether backward reads what the first one was applied to."""
        return any(each.functor.reads_argument for each in self.parts)

    def struct(self, compute: str, backward: bool = False) -> str:
        """The C++ name of the struct of all of them: Chain or ChainGradient of several."""
        last = len(self.parts) - 1
        name = self.parts[last].struct(compute, backward, last)
        for at in reversed(range(last)):
            forward = self.parts[at].struct(compute, False, at)
            if backward:
                own = self.parts[at].struct(compute, True, at)
                name = f"ChainGradient<{forward}, {own}, {name}>"
            else:
                name = f"Chain<{forward}, {name}>"
        return name

    def texts(self, backward: bool) -> list[str]:
        """The struct templates that struct() names; backward, those of the functions too."""
        count = len(self.parts) - 1 if backward else len(self.parts)
        texts = [struct_text(each.functor, False, at) for at, each in enumerate(self.parts[:count])]
        if backward:
            texts += [struct_text(each.functor, True, at) for at, each in enumerate(self.parts)]
        return texts


def struct_name(functor: Functor, backward: bool, position: int = 0) -> str:
    """The name of the struct template of a functor. position: among those of its role."""
    place = f"_{position + 1}" if position else ""
    return f"{functor.name}_of_{functor.role}{'_gradient' * backward}{place}"


@cache
def struct_text(functor: Functor, backward: bool = False, position: int = 0) -> str:
    """The struct template of a functor's lines: what functor.cuh calls `apply`."""
    value, arrays, numbers = ROLES[functor.role], functor.arrays, functor.numbers
    indices = range(len(arrays))
    types = ["class C", *(f"class Array{at}" for at in indices)]
    members = [f"Array{at} array{at}" for at in indices]
    members += [f"const long long* seed{at}" for at in range(len(functor.seeds))]
    members += [f"double number{at}" for at in range(len(numbers))]
    members.append("long long all_cols")
    # What the lines take, and what they are given.
    pairs = [(f"C {value}" if backward else f"C& {value}", "values[at]")]
    pairs += [(f"C& d{value}", "gradients[at]")] * backward
    for at, name in enumerate(arrays):
        pairs.append((f"C {name}", f"read{at}[at]"))
        pairs += [(f"C& d{name}", f"made{at}[at]")] * backward
    pairs += [(f"const long long {name}", f"*seed{at}") for at, name in enumerate(functor.seeds)]
    pairs += [(f"const C {name}", f"static_cast<C>(number{at})") for at, name in enumerate(numbers)]
    pairs += [("const long long row", "row"), ("const long long col", "(col & -pack_size) | at")]
    pairs += [("const long long num_cols", "all_cols"), (f"const At& {value}_at", "other")]
    others, arguments = ["class At"], ["long long row", "long long col"]
    arguments.append("const " * backward + "C (&values)[pack_size]")
    arguments += ["C (&gradients)[pack_size]"] * backward + ["const At& other"]
    if backward:
        types += [f"class Gradient{at}" for at in indices]
        members += [f"Gradient{at}* gradient{at}" for at in indices]
        others.append("class GradientAt")
        at_other = f" d{value}_at" * (functor.role == "store")
        pairs.append((f"const GradientAt&{at_other}", "other_gradient"))
        arguments.append("const GradientAt& other_gradient")
    takes, gives = zip(*pairs)
    origin = (functor.origin or functor.name) + ", backward" * backward
    origin = origin.replace("\\", "\\\\").replace('"', '\\"')
    reads = [
        f"    C read{at}[pack_size];\n    array{at}.load(row, col, read{at});\n" for at in indices
    ]
    makes = [f"    C made{at}[pack_size] = {{}};\n" for at in indices] if backward else []
    writes = [
        f"    if (writes && gradient{at} != nullptr)\n"
        f"      store_pack<pack_size>(gradient{at} + row * all_cols + col, "
        f"repack<Gradient{at}>(made{at}));\n"
        for at in indices
    ]
    return (
        f"template <{', '.join(types)}>\n"
        f"struct {struct_name(functor, backward, position)} {{\n"
        + "".join(f"  {member};\n" for member in members)
        + f"  template <{', '.join(others)}>\n"
        f"  __device__ __forceinline__ static void lines({', '.join(takes)}) {{\n"
        f'#line 1 "{origin}"\n{functor.backward if backward else functor.lines}\n'
        '#line 1 "functor"\n  }\n'
        f"  template <int pack_size, {'bool writes = true, ' * backward}{', '.join(others)}>\n"
        f"  __device__ __forceinline__ void apply({', '.join(arguments)}) const {{\n"
        + "".join([*reads, *makes])
        + "#pragma unroll\n    for (int at = 0; at < pack_size; ++at)\n"
        + f"      lines({', '.join(gives)});\n"
        + "".join(writes if backward else [])
        + "  }\n};\n"
    )
