"""Cells of the benchmark: bytes, combinations, shapes of models, and refused arguments."""

import pytest
from cupynorm.bench.models import MODELS

from cupynorm.bench.cells import COLS, Cell, cells


def test_bytes_are_those_of_the_rows():
    def num_bytes(direction, dtype="bfloat16", **options):
        return Cell("layer_norm", direction, dtype, 4, 256, **options).num_bytes / 1024

    assert [num_bytes(name) for name in ("forward", "backward", "both")] == [4, 6, 10]
    assert num_bytes("forward", "float64") == 16
    assert num_bytes("backward", weight_dtype="float32") == 6  # weights are not counted
    assert num_bytes("forward", out_dtype="float32") == 2 + 4  # y
    assert num_bytes("backward", out_dtype="float32") == 2 + 4 + 2  # x, dy, dx
    assert num_bytes("forward", residual=True) == 8  # x, residual, sum, y
    assert num_bytes("backward", residual=True) == 8  # x, dy, dsum, dx


def test_bytes_of_8_bit_outputs():
    """x, a byte of y for each element, and the scales that belong to rows."""

    def num_bytes(scale, num_cols=256, **options):
        return Cell(
            "rms_norm",
            "forward",
            "bfloat16",
            4,
            num_cols,
            out_dtype="float8_e5m2",
            scale=scale,
            **options,
        ).num_bytes

    elements = 4 * 256
    assert num_bytes("given") == num_bytes("tensor") == 3 * elements
    assert num_bytes("given", residual=True) == 7 * elements  # x, residual, sum, y
    assert num_bytes("row") == 3 * elements + 4 * 4
    assert num_bytes("block") == 3 * elements + 4 * 2 * 4
    assert num_bytes("block", 257) == 3 * 4 * 257 + 4 * 3 * 4


def test_text_of_a_cell():
    cell = Cell(
        "rms_norm",
        "both",
        "bfloat16",
        3,
        64,
        weight_dtype="float32",
        residual=True,
        zero_centered=True,
    )
    assert cell.kind == "rms_norm both, bfloat16, weight float32, residual, 1 + weight"
    assert str(cell) == "rms_norm both bfloat16 weight float32 residual 1 + weight 3 x 64"
    assert cell.passes == ("forward", "backward") and cell.extras == ["residual", "zero_centered"]
    assert (cell.y, cell.parameters) == ("bfloat16", "float32")


def test_8_bit_outputs_by_their_scales():
    made = cells(
        ["rms_norm"],
        directions=["forward"],
        cols=[64],
        rows=[4],
        out_dtype="float8_e4m3fn",
        scales=["row", "block"],
    )
    assert [(cell.y, cell.scale) for cell in made] == [
        ("float8_e4m3fn", "row"),
        ("float8_e4m3fn", "block"),
    ]
    assert made[0].kind == "rms_norm forward, bfloat16, y float8_e4m3fn, scale row"
    assert made[0].extras == ["out_dtype", "scale"]
    (alone,) = cells(directions=["forward"], cols=[64], rows=[4], out_dtype="float8_e5m2")
    assert alone.scale == "given"
    assert {cell.scale for cell in cells(cols=[64], out_dtype="float32")} == {None}
    of_models = cells(
        directions=["forward"],
        models=["gpt3", "mixtral"],
        out_dtype="float8_e5m2",
        scales=["block"],
    )
    assert len(of_models) == 4 and {cell.scale for cell in of_models} == {"block"}


def test_every_combination_once():
    made = cells(
        ["layer_norm", "rms_norm"],
        ["bfloat16", "float32"],
        ["forward", "backward"],
        [32, 100],
        2**20,
    )
    assert len(made) == len(set(made)) == 16
    assert {(cell.num_rows, cell.num_cols) for cell in made} == {(2**15, 32), (2**20 // 100, 100)}
    sizes = [
        cell.num_rows * cell.num_cols
        for cell in cells(["rms_norm"], ["bfloat16", "float32"], ["forward"], [64])
    ]
    assert sizes == [2**28, 2**27]
    assert [cell.num_cols for cell in cells()] == list(COLS) * 2
    by_rows = cells(["rms_norm"], ["float16"], ["both"], [64, 32], 7, rows=[5, 6], residual=True)
    assert [(cell.num_rows, cell.num_cols, cell.residual) for cell in by_rows] == [
        (5, 64, True),
        (6, 64, True),
        (5, 32, True),
        (6, 32, True),
    ]


def test_models_bring_their_norm_and_shapes():
    made = cells(
        ["layer_norm"], ["bfloat16"], ["forward"], [32], models=["gpt3", "llama3-8b", "mixtral"]
    )
    assert {(cell.norm, cell.num_cols) for cell in made} == {
        ("layer_norm", 12288),
        ("rms_norm", 4096),
    }
    assert {cell.num_rows for cell in made if cell.num_cols == 4096} == {128, 4096, 8192, 16384}
    mix = cells(models=["mix"], directions=["forward"])
    assert len(mix) == 11 and Cell("rms_norm", "forward", "bfloat16", 131072, 128) in mix
    few = cells(models=["few"])
    assert {cell.residual for cell in few} == {False, True} and len(few) == 6 * 8 * 2 * 2 * 2
    assert {cell.norm for cell in few} == {"layer_norm", "rms_norm"}
    assert {cell.direction for cell in few} == {"forward", "backward"}
    assert max(cell.num_rows for cell in few) == 4096 and min(cell.num_rows for cell in few) == 1
    assert {64, 16384} <= {cell.num_cols for cell in few}
    assert all(cell.residual for cell in cells(models=["few"], residual=True))
    everything = cells(models=list(MODELS))
    assert (
        len(everything) == len(set(everything))
        and max(cell.num_rows * cell.num_cols for cell in everything) <= 2**28
    )
    assert [cell.norm for cell in everything] == sorted(
        cell.norm for cell in everything
    )  # tables of one norm follow each other


@pytest.mark.parametrize(
    "arguments,options,sentence",
    [
        ((["batch_norm"],), {}, "norm is 'batch_norm'; expected layer_norm or rms_norm"),
        ((["rms_norm"], ["int8"]), {}, "dtype is 'int8'"),
        ((["rms_norm"], ["float32"]), {"weight_dtype": "int8"}, "dtype is 'int8'"),
        ((["rms_norm"], ["float32"], ["sideways"]), {}, "direction is 'sideways'"),
        ((["rms_norm"], ["float8_e5m2"]), {}, "dtype is 'float8_e5m2'"),
        (
            (["rms_norm"],),
            {"scales": ["row"]},
            "scale is 'row' with out_dtype None; expected an out_dtype of float8_e4m3fn or",
        ),
        (
            (["rms_norm"],),
            {"scales": ["row"], "out_dtype": "float32"},
            "scale is 'row' with out_dtype float32",
        ),
        (
            (["rms_norm"],),
            {"scales": ["column"], "out_dtype": "float8_e5m2"},
            "scale is 'column'; expected given or tensor or",
        ),
        (
            (["rms_norm"],),
            {"out_dtype": "float8_e5m2"},
            "direction is forward, backward with out_dtype float8_e5m2; expected",
        ),
        (
            (["rms_norm"], ["float32"], ["forward"]),
            {"out_dtype": "int8", "scales": ["block"]},
            "out_dtype is int8; expected scale given or row, without amax",
        ),
        ((), {"models": ["gpt9"]}, "models is 'gpt9'"),
        ((["rms_norm"], []), {}, "no dtype is given"),
        ((["rms_norm"], ["float32"], ["forward"], []), {}, "cols is empty"),
        ((["rms_norm"], ["float32"], ["forward"], [0]), {}, "cols is 0"),
        ((["rms_norm"], ["float32"], ["forward"], [8]), {"rows": [4, 0]}, "rows is 4, 0"),
        (
            (["rms_norm"], ["float32"], ["forward"], [32, 64], 63),
            {},
            "elements is 63, less than one row of 64 columns",
        ),
    ],
)
def test_cells_that_cannot_be(arguments, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        cells(*arguments, **options)
