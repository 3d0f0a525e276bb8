"""What the benchmark measures: cells, made of widths and rows or of the shapes of known models. No GPU needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .dtypes import DTYPES, ELEMENTS, FLOAT8S
from .gradient_check import NORMS
from .problem import SCALINGS, Problem

COLS = tuple(2**exponent for exponent in range(5, 19))
DIRECTIONS = ("forward", "backward", "both")
EXTRAS = ("residual", "zero_centered", "out_dtype", "scale", "amax")  # what a cell may ask for and not every library offers
EPS = 1e-5
OURS, COPY = "cupynorm", "copy"
_X_BYTES = 2**29


@dataclass(frozen=True)
class Cell:
    """One problem that is timed: x as [num_rows, num_cols], with weight, and bias for layer_norm.

    direction: "forward", "backward", or "both", one after the other in one unit. dtype: of x and of all that is not named.
    weight_dtype: of weight and bias. out_dtype: of y and dy. residual: forward adds one and also returns the sum, backward
    adds the sum's gradient. zero_centered: multiply by 1 + weight. scale: of a y in 8-bit floats, one of problem.SCALINGS:
    one that is given, or those that the call finds. amax: with a given one, also record the largest |y|.
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
        """Those of EXTRAS that are asked for."""
        return [name for name in EXTRAS if getattr(self, name)]

    @property
    def num_bytes(self) -> int:
        """Bytes that any implementation must move: x, y (residual, sum, scales); x, dy, dx (dsum). No parameters."""
        x, y = DTYPES[self.dtype].itemsize, ELEMENTS[self.y].itemsize
        of = {"forward": x + y + self.residual * 2 * x, "backward": 2 * x + y + self.residual * x}
        scales = Problem("forward", True, self.num_cols, self.dtype, scaling=self.scale).scale_bytes
        return self.num_rows * (self.num_cols * sum(of[name] for name in self.passes) + scales)

    @property
    def details(self) -> str:
        """dtypes and extras, in words."""
        labelled = (("weight", self.weight_dtype), ("y", self.out_dtype), ("scale", self.scale))
        named = [f"{label} {name}" for label, name in labelled if name]
        extras = (("amax", self.amax), ("residual", self.residual), ("1 + weight", self.zero_centered))
        named += [label for label, asked in extras if asked]
        return ", ".join([self.dtype, *named])

    @property
    def kind(self) -> str:
        """All but the shape: the title of its table."""
        return f"{self.norm} {self.direction}, {self.details}"

    def __str__(self) -> str:
        return f"{self.kind.replace(', ', ' ')} {self.num_rows} x {self.num_cols}"


class Shape(NamedTuple):
    """A norm of a model: its width, and how many rows it is given at once."""

    norm: str
    num_cols: int
    num_rows: tuple[int, ...]


_TOKENS = (128, 4096, 16384)  # 128 sequences that are each one token further; a short and a long batch in training
MODELS = {
    # Brown and others 2020, table 2.1: d_model of GPT-3 175B.
    "gpt3": (Shape("layer_norm", 12288, _TOKENS),),
    # Llama team 2024, "The Llama 3 herd of models", table 3: model dimension.
    "llama3-8b": (Shape("rms_norm", 4096, _TOKENS),),
    "llama3-70b": (Shape("rms_norm", 8192, _TOKENS),),
    "llama3-405b": (Shape("rms_norm", 16384, _TOKENS),),
    # Jiang and others 2024, "Mixtral of experts", table 1: dim of 8x7B.
    "mixtral": (Shape("rms_norm", 4096, (8192,)),),
    # Qwen3-32B, its config.json: hidden_size 5120; q and k are normalised by head, 64 + 8 heads of head_dim 128.
    "qwen3": (Shape("rms_norm", 5120, _TOKENS), Shape("rms_norm", 128, (128 * 72, 4096 * 72))),
    # DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 4.2: hidden dimension; query and key-value compression.
    "deepseek-v3": (
        Shape("rms_norm", 7168, _TOKENS),
        Shape("rms_norm", 1536, (4096,)),
        Shape("rms_norm", 512, (4096,)),
    ),
    # Dosovitskiy and others 2021, table 1: hidden size of ViT-L and ViT-H; 256 images of 196 patches and a class token.
    "vit": (Shape("layer_norm", 1024, (256 * 197,)), Shape("layer_norm", 1280, (256 * 197,))),
    # Devlin and others 2019, section 3: H of BERT-base and BERT-large; 32 sequences of 512 tokens.
    "bert": (Shape("layer_norm", 768, (32 * 512,)), Shape("layer_norm", 1024, (32 * 512,))),
    # Eleven shapes on which eight libraries were measured against each other: small enough that launches and caches matter.
    "mix": (
        Shape("rms_norm", 4096, (16384, 2048)),
        Shape("rms_norm", 8192, (8192,)),
        Shape("rms_norm", 16384, (4096,)),
        Shape("rms_norm", 128, (131072, 8192)),
        Shape("rms_norm", 2048, (4096,)),
        Shape("layer_norm", 1024, (4096, 49152)),
        Shape("layer_norm", 4096, (16384,)),
        Shape("layer_norm", 8192, (4096,)),
    ),
}


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
    """All cells, in the order in which they are shown: every combination, or with models their shapes in place of norms, cols
    and rows.

    elements: of x; num_rows = elements // num_cols, by default of 512 MiB of x.
    rows: num_rows themselves, in place of elements. scales: where an out_dtype of 8 bits has them from; by default each is
    "given". options: weight_dtype, out_dtype, residual, zero_centered, amax of a Cell.
    Raises ValueError for what is not known or is no shape.
    """
    out_dtype = options.get("out_dtype")
    is_quantized = out_dtype in FLOAT8S
    of_dtype = [name for name in (options.get("weight_dtype"), None if is_quantized else out_dtype) if name]
    for label, names, known in (
        ("norm", norms, NORMS),
        ("dtype", [*dtypes, *of_dtype], tuple(DTYPES)),
        ("direction", directions, DIRECTIONS),
        ("scale", scales, SCALINGS),
        ("models", models, tuple(MODELS)),
    ):
        for name in names:
            if name not in known:
                raise ValueError(f"{label} is {name!r}; expected {' or '.join(known)}")
    for label, names in (("norm", norms), ("dtype", dtypes), ("direction", directions)):
        if not names:
            raise ValueError(f"no {label} is given; expected one or more")
    for label, extents in (("cols", cols), ("rows", rows)):
        if any(extent < 1 for extent in extents) or (label == "cols" and not extents):
            raise ValueError(f"{label} is {', '.join(map(str, extents)) or 'empty'}; expected extents of 1 or more")

    if scales and not is_quantized:
        raise ValueError(f"scale is {scales[0]!r} with out_dtype {out_dtype}; expected an out_dtype of {' or '.join(FLOAT8S)}")
    if options.get("amax") and (not is_quantized or set(scales) - {"given"}):
        raise ValueError(
            f"amax is recorded with out_dtype {out_dtype} and scale {', '.join(scales) or None}; expected an out_dtype of 8 "
            "bits and scale given"
        )
    if is_quantized and tuple(directions) != DIRECTIONS[:1]:
        raise ValueError(
            f"direction is {', '.join(directions)} with out_dtype {out_dtype}; expected forward: no gradient has 8 bits"
        )

    def shapes(dtype: str) -> list[tuple[str, int, int]]:
        if models:
            known = [shape for name in models for shape in MODELS[name]]
            return [(shape.norm, num_rows, shape.num_cols) for shape in known for num_rows in shape.num_rows]
        total = elements or _X_BYTES // DTYPES[dtype].itemsize
        if not rows and total < max(cols):
            raise ValueError(f"elements is {total}, less than one row of {max(cols)} columns; expected at least that many")
        return [(norm, num_rows, num_cols) for norm in norms for num_cols in cols for num_rows in rows or (total // num_cols,)]

    made = [
        Cell(norm, direction, dtype, num_rows, num_cols, scale=scale, **options)
        for dtype in dtypes
        for direction in directions
        for scale in scales or ("given" if is_quantized else None,)
        for norm, num_rows, num_cols in shapes(dtype)
    ]
    return list(dict.fromkeys(sorted(made, key=lambda cell: NORMS.index(cell.norm))))  # two models may share a shape
