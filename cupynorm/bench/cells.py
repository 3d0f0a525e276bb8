"""What the benchmark measures: cells, of widths and rows or of the shapes of known models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ..check.cases import NORMS
from ..dtypes import DTYPES, EIGHT_BITS, ELEMENTS
from ..plan.problem import SCALINGS, Layout, Problem
from .models import MODELS

COLS = tuple(2**exponent for exponent in range(5, 19))
DIRECTIONS = ("forward", "backward", "both")
# Features that not every library offers.
EXTRAS = ("residual", "zero_centered", "out_dtype", "scale", "amax")
EPS = 1e-5
OURS, COPY = "cupynorm", "copy"
_X_BYTES = 2**29


@dataclass(frozen=True)
class Cell:
    """One problem that is timed: x as [num_rows, num_cols], with weight, and bias for layer_norm.

    direction: "forward", "backward", or "both" timed together. dtype: of x, and of the tensors
    below unless given. weight_dtype: of weight and bias. out_dtype: of y and dy.
    residual: forward adds a residual and returns the sum, backward adds the gradient of the sum.
    zero_centered: multiply by 1 + weight. scale: of a y in 8 bits, one of problem.SCALINGS.
    amax: with a given scale, also record the largest |y|.
    """

    norm: str
    direction: str
    dtype: str
    num_rows: int
    num_cols: int
    weight_dtype: str | None = None
    out_dtype: str | None = None
    residual: bool = False
    zero_centered: bool = False
    scale: str | None = None
    amax: bool = False

    @property
    def y(self) -> str:
        """dtype of y and dy."""
        return self.out_dtype or self.dtype

    @property
    def parameters(self) -> str:
        """dtype of weight and bias."""
        return self.weight_dtype or self.dtype

    @property
    def passes(self) -> tuple[str, ...]:
        """The directions that run."""
        return DIRECTIONS[:2] if self.direction == "both" else (self.direction,)

    @property
    def extras(self) -> list[str]:
        """Those of EXTRAS that the cell has."""
        return [name for name in EXTRAS if getattr(self, name)]

    @property
    def num_bytes(self) -> int:
        """Bytes that any implementation must move, without weight and bias.

        Forward: x, y, residual, sum, scales. Backward: x, dy, dx, dsum.
        """
        x, y = DTYPES[self.dtype].itemsize, ELEMENTS[self.y].itemsize
        of = {"forward": x + y + self.residual * 2 * x, "backward": 2 * x + y + self.residual * x}
        layout = Layout.of_new_arrays(self.num_cols)
        problem = Problem("forward", True, self.num_cols, self.dtype, layout, scaling=self.scale)
        scales = problem.scale_bytes
        return self.num_rows * (self.num_cols * sum(of[name] for name in self.passes) + scales)

    @property
    def details(self) -> str:
        """dtypes and extras, in words."""
        labelled = (("weight", self.weight_dtype), ("y", self.out_dtype), ("scale", self.scale))
        named = [f"{label} {name}" for label, name in labelled if name]
        extras = {"amax": self.amax, "residual": self.residual, "1 + weight": self.zero_centered}
        return ", ".join([self.dtype, *named, *(label for label in extras if extras[label])])

    @property
    def kind(self) -> str:
        """All but the shape: the title of its table."""
        return f"{self.norm} {self.direction}, {self.details}"

    def __str__(self) -> str:
        return f"{self.kind.replace(', ', ' ')} {self.num_rows} x {self.num_cols}"


def cells(
    norms: Sequence[str] = NORMS[:1],
    dtypes: Sequence[str] = ("bfloat16",),
    directions: Sequence[str] = DIRECTIONS[:2],
    cols: Sequence[int] = COLS,
    elements: int | None = None,
    *,
    rows: Sequence[int] = (),
    models: Sequence[str] = (),
    scales: Sequence[str] = (),
    **options: str | bool | None,
) -> list[Cell]:
    """Every combination, in the order in which a result shows them.

    elements: of x; num_rows = elements // num_cols, by default of 512 MiB of x.
    rows: num_rows, instead of elements. models: names of MODELS, whose norms and shapes are used
    instead of norms, cols and rows. scales: of a y in 8 bits, by default "given".
    options: weight_dtype, out_dtype, residual, zero_centered, amax of a Cell.
    Raises ValueError for unknown names, for extents below 1 and for options that exclude each
    other.
    """
    out_dtype, residual = options.get("out_dtype"), bool(options.pop("residual", False))
    is_quantized = out_dtype in EIGHT_BITS
    more_dtypes = (options.get("weight_dtype"), None if is_quantized else out_dtype)
    for label, names, known in (
        ("norm", norms, NORMS),
        ("dtype", [*dtypes, *filter(None, more_dtypes)], tuple(DTYPES)),
        ("direction", directions, DIRECTIONS),
        ("scale", scales, SCALINGS),
        ("models", models, tuple(MODELS)),
    ):
        for name in names:
            if name not in known:
                raise ValueError(f"{label} is {name!r}; expected {' or '.join(known)}")
        if not names and label in ("norm", "dtype", "direction"):
            raise ValueError(f"no {label} is given; expected one or more")
    for label, extents in (("cols", cols), ("rows", rows)):
        if any(extent < 1 for extent in extents) or (label == "cols" and not extents):
            extents_text = ", ".join(map(str, extents)) or "empty"
            raise ValueError(f"{label} is {extents_text}; expected extents of 1 or more")
    _check_quantization(out_dtype, directions, scales, bool(options.get("amax")))

    def shapes(dtype: str) -> Iterator[tuple[str, int, int, bool]]:
        """norm, num_rows, num_cols, and whether a residual is added."""
        if models:
            for shape in (shape for name in models for shape in MODELS[name]):
                for num_rows in shape.num_rows:
                    yield shape.norm, num_rows, shape.num_cols, residual or shape.residual
            return
        total = elements or _X_BYTES // DTYPES[dtype].itemsize
        if not rows and total < max(cols):
            raise ValueError(
                f"elements is {total}, less than one row of {max(cols)} columns; "
                "expected at least that many"
            )
        for norm, num_cols in product(norms, cols):
            for num_rows in rows or (total // num_cols,):
                yield norm, num_rows, num_cols, residual

    scales = scales or ("given" if is_quantized else None,)
    all_cells = [
        Cell(norm, direction, dtype, num_rows, num_cols, residual=added, scale=scale, **options)
        for dtype, direction, scale in product(dtypes, directions, scales)
        for norm, num_rows, num_cols, added in shapes(dtype)
    ]
    all_cells.sort(key=lambda cell: NORMS.index(cell.norm))
    return list(dict.fromkeys(all_cells))  # two models may share a shape


def _check_quantization(
    out_dtype: str | None, directions: Sequence[str], scales: Sequence[str], amax: bool
) -> None:
    """Raises ValueError for scales or amax that do not belong to out_dtype or the directions."""
    is_quantized = out_dtype in EIGHT_BITS
    if out_dtype == "int8" and (amax or set(scales) - {"given", "row"}):
        raise ValueError("out_dtype is int8; expected scale given or row, without amax")
    if scales and not is_quantized:
        raise ValueError(
            f"scale is {scales[0]!r} with out_dtype {out_dtype}; "
            f"expected an out_dtype of {' or '.join(EIGHT_BITS)}"
        )
    if amax and (not is_quantized or set(scales) - {"given"}):
        raise ValueError(
            f"amax is recorded with out_dtype {out_dtype} and scale {', '.join(scales) or None}; "
            "expected an out_dtype of 8 bits and scale given"
        )
    if is_quantized and tuple(directions) != DIRECTIONS[:1]:
        raise ValueError(
            f"direction is {', '.join(directions)} with out_dtype {out_dtype}; "
            "expected forward, because no gradient has 8 bits"
        )
