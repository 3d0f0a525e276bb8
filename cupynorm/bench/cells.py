"""What the benchmark measures: norms of widths or of known models' shapes, and norm + linear."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from ..dispatch.problem import DIRECTIONS, NORMS, cols_of_scale
from ..dtypes import DTYPES, EIGHT_BITS, ELEMENTS

COLS = tuple(2**exponent for exponent in range(5, 19))
EPS = 1e-5
OURS, COPY, GEMM = "cupynorm", "copy", "gemm"
FORMATS, PASSES = ("bfloat16", "fp8"), ("forward", "both")
_X_BYTES = 2**29
_SHARE_OF_COPY = 0.97  # that a norm before a product is to reach

# name -> (norm, num_cols, numbers of rows)
MODELS = {
    # Eleven shapes on which eight libraries were compared: launches and caches matter here.
    "mix": [
        ("rms_norm", 4096, (16384, 2048)),
        ("rms_norm", 8192, (8192,)),
        ("rms_norm", 16384, (4096,)),
        ("rms_norm", 128, (131072, 8192)),
        ("rms_norm", 2048, (4096,)),
        ("layer_norm", 1024, (4096, 49152)),
        ("layer_norm", 4096, (16384,)),
        ("layer_norm", 8192, (4096,)),
    ],
    # Few rows, as in decoding and small batches. A launch and the latency of memory decide here.
    "few": [
        (norm, num_cols, (1, 16, 64, 256, 1024, 4096))
        for norm in NORMS
        for num_cols in (64, 128, 1024, 2880, 4096, 8192, 12288, 16384)
    ],
}
# rows x in_features x out_features: projections of language models, in training and in decoding.
LINEAR_SHAPES = (
    (8192, 4096, 12288),
    (16384, 4096, 6144),
    (4096, 8192, 10240),
    (49152, 1024, 3072),
    (32768, 2048, 6144),
    (1, 4096, 12288),
    (16, 4096, 12288),
    (64, 4096, 12288),
    (256, 4096, 12288),
)


@dataclass(frozen=True)
class Cell:
    """A norm that is timed: x [num_rows, num_cols] with weight, and bias for layer_norm.

    direction: "forward" or "backward". dtype: of x, and of the tensors below unless given.
    weight_dtype: of weight and bias. out_dtype: of y and dy. residual: forward adds a residual and
    returns the sum, backward adds the gradient of the sum. scale: of a y in 8 bits, one of
    problem.SCALINGS. amax: with a given scale, also record the largest |y|.
    """

    norm: str
    direction: str
    dtype: str
    num_rows: int
    num_cols: int
    weight_dtype: str | None = None
    out_dtype: str | None = None
    residual: bool = False
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
    def extras(self) -> set[str]:
        """Features that not every library offers."""
        names = ("residual", "out_dtype", "scale", "amax")
        return {name for name in names if getattr(self, name)}

    @property
    def num_bytes(self) -> int:
        """Bytes that any implementation must move, without weight and bias.

        Forward: x, y, residual, sum, scales. Backward: x, dy, dx, dsum.
        """
        x, y = DTYPES[self.dtype].itemsize, ELEMENTS[self.y].itemsize
        of_element = x + y + (2 if self.direction == "forward" else 1) * self.residual * x
        of_element += 0 if self.direction == "forward" else x
        group = cols_of_scale(self.scale, self.num_cols)
        of_scales = 4 * -(-self.num_cols // group) if group else 0
        return self.num_rows * (self.num_cols * of_element + of_scales)

    @property
    def kind(self) -> str:
        """All but the shape: the title of its table."""
        labelled = (("weight", self.weight_dtype), ("y", self.out_dtype), ("scale", self.scale))
        named = [f"{label} {name}" for label, name in labelled if name]
        extras = {"amax": self.amax, "residual": self.residual}
        named += [label for label, given in extras.items() if given]
        return f"{self.norm} {self.direction}, {', '.join([self.dtype, *named])}"

    @property
    def shape(self) -> str:
        return f"{self.num_rows} x {self.num_cols}"

    def __str__(self) -> str:
        return f"{self.kind.replace(', ', ' ')} {self.shape}"


@dataclass(frozen=True)
class LinearCell:
    """A LayerNorm and the linear layer after it, in bfloat16.

    format: of the product, "bfloat16" or "fp8". direction: "forward" or "both".
    """

    num_rows: int
    in_features: int
    out_features: int
    format: str = "bfloat16"
    direction: str = "forward"

    @property
    def num_bytes(self) -> int:
        """Bytes that the norm alone must move.

        Forward: x and what it writes, in bfloat16 or 8 bits. Both: also x, two gradients and dx.
        """
        of_element = (4 if self.format == "bfloat16" else 3) + 6 * (self.direction == "both")
        return self.num_rows * self.in_features * of_element

    @property
    def kind(self) -> str:
        what = "forward" if self.direction == "forward" else "forward and backward"
        return f"layer_norm + linear {what}, {self.format}"

    @property
    def shape(self) -> str:
        return f"{self.num_rows} x {self.in_features} x {self.out_features}"

    def __str__(self) -> str:
        return f"{self.kind.replace(', ', ' ')} {self.shape}"

    def least(self, copy: float, gemm: float) -> float:
        """What a norm that moves its bytes once and a product take together."""
        return gemm + copy / _SHARE_OF_COPY


def cells(
    norms: Sequence[str] = NORMS[:1],
    dtypes: Sequence[str] = ("bfloat16",),
    directions: Sequence[str] = DIRECTIONS,
    cols: Sequence[int] = COLS,
    *,
    rows: Sequence[int] = (),
    models: Sequence[str] = (),
    scales: Sequence[str | None] = (),
    **options: str | bool | None,
) -> list[Cell]:
    """Every combination, in the order in which a result shows them.

    rows: num_rows, by default as many as have 512 MiB of x. models: names of MODELS, whose norms
    and shapes are used instead. scales: of a y in 8 bits. options: other fields of a Cell.
    """
    if options.get("out_dtype") in EIGHT_BITS:
        scales = scales or ("given",)
    made = []
    for dtype, direction, scale in product(dtypes, directions, scales or (None,)):
        shapes = [shape for name in models for shape in MODELS[name]]
        if not models:
            total = _X_BYTES // DTYPES[dtype].itemsize
            shapes = [
                (norm, num_cols, rows or (max(1, total // num_cols),))
                for norm, num_cols in product(norms, cols)
            ]
        for norm, num_cols, counts in shapes:
            for num_rows in counts:
                shape = (norm, direction, dtype, num_rows, num_cols)
                made.append(Cell(*shape, scale=scale, **options))
    made.sort(key=lambda cell: NORMS.index(cell.norm))
    return list(dict.fromkeys(made))  # two models may share a shape


def linear_cells(
    shapes: Iterable[tuple[int, int, int]] = LINEAR_SHAPES,
    formats: Sequence[str] = FORMATS,
    directions: Sequence[str] = PASSES,
) -> list[LinearCell]:
    """Every combination. A decoder's few rows run forward alone."""
    return [
        LinearCell(*shape, format, direction)
        for format, direction, shape in product(formats, directions, list(shapes))
        if direction == "forward" or shape[0] > 256
    ]
