"""python -m cupynorm: arguments that are refused in a sentence, and how numbers are written."""

import argparse

import pytest
from command_runs import ROOT
from cupynorm.bench.contestants import CONTESTANTS
from cupynorm.bench.models import MODELS

from cupynorm import __main__ as command
from cupynorm.bench import cells as bench_cells
from cupynorm.command_line import number, positives


@pytest.mark.parametrize(
    "arguments,sentence",
    [
        (("plan", "4096", "--device", "H9000"), "expected one of A100"),
        (("plan", "--device", "H200"), "plan has no number of columns; expected one, or --table"),
        (("plan", "many", "--device", "H200"), "'many' is not a whole number"),
        (("plan", "-5", "--device", "H200"), "-5"),
        (
            ("plan", "90000", "--device", "H200", "--strategy", "warp"),
            "strategy 'warp' is too narrow for 90000 columns of bfloat16 on H200 (forward); "
            "its widest row has 1280",
        ),
        (
            ("plan", "64", "--device", "H200", "--sm-margin", "132"),
            "sm_margin is 132; expected 0 to 131 of the 132 multiprocessors of H200",
        ),
        (
            ("plan", "64", "--device", "A100", "--strategy", "cluster"),
            "strategy 'cluster' needs compute capability 9.0 or later; A100 has 8.0",
        ),
        (("plan", "64", "--device", "H200", "--strategy", "fast"), "invalid choice: 'fast'"),
        (("bench", "--dtype", "float8"), "'float8' is unknown"),
        (
            ("bench", "--scale", "column"),
            "'column' is unknown; expected some of given,tensor,row,block",
        ),
        (
            ("plan", "64", "--device", "H200", "--scale", "row"),
            "scale is 'row'; expected one of given, tensor, row, block, block64, of a",
        ),
        (
            ("plan", "64", "--device", "H200", "--amax"),
            "amax is recorded with scale None; expected 'given', of a forward whose out_dtype has",
        ),
        (
            (
                "plan",
                "64",
                "--device",
                "H200",
                "--out-dtype",
                "float8_e5m2",
                "--amax",
                "--scale",
                "row",
            ),
            "amax is recorded with scale 'row'; expected 'given'",
        ),
        (
            ("plan", "64", "--device", "H200", "--out-dtype", "float8_e5m2", "--direction", "both"),
            "out_dtype is 'float8_e5m2' and direction 'backward'; expected 'forward'",
        ),
        (
            ("bench", "--amax"),
            "amax is recorded with out_dtype None and scale None; expected an out_dtype of 8 bits",
        ),
        (
            ("bench", "--amax", "--out-dtype", "float8_e5m2", "--scale", "given,row"),
            "amax is recorded with out_dtype float8_e5m2 and scale given, row; expected",
        ),
        (
            ("bench", "--scale", "row"),
            "scale is 'row' with out_dtype None; expected an out_dtype of float8_e4m3fn or",
        ),
        (
            ("bench", "--out-dtype", "float8_e5m2", "--direction", "both"),
            "direction is both with out_dtype float8_e5m2; expected forward",
        ),
        (("bench", "--cols", "0"), "expected 1 or more"),
        (("bench", "--cols", "64,,"), "not a whole number"),
        (("bench", "--elements", "2**"), "not a whole number"),
        (("bench", "--direction", "up"), "'up' is unknown; expected some of forward,backward,both"),
        (("bench", "--models", "gpt9"), "'gpt9' is unknown"),
        (
            ("bench", "--tile", "fast: pack_size 8"),
            "tile is 'fast: pack_size 8'; expected one of warp, block, cluster, uncached",
        ),
        (
            ("bench", "--direction", "both", "--tile", "warp: pack_size 8, threads_per_row 32"),
            "a tile belongs to one direction; expected cells of forward or backward",
        ),
        (
            ("bench", "--readme", "--tile", "warp: pack_size 8, threads_per_row 32"),
            "--readme and --tile are given; expected one of them",
        ),
        (("bench", "--peers", "nobody"), "'nobody' is unknown; expected some of cupynorm,torch,"),
        (("bench", "--host", "--first-call"), "not allowed with argument"),
        (
            ("bench", "--elements", "8", "--cols", "16"),
            "elements is 8, less than one row of 16 columns",
        ),
        (("bench", "--guard", str(ROOT / "README.md")), "README.md is no result of the benchmark"),
        (("bench", "--compare", "none.json", "none.json"), "none.json: No such file or directory"),
        (("tune", "--direction", "both"), "'both' is unknown; expected some of forward,backward"),
        (
            ("tune", "--cols", "16", "--elements", "8"),
            "elements is 8, less than one row of 16 columns",
        ),
        (("tune", "--output", "none/tiles.json"), "none/tiles.json: there is no folder"),
        (("tune", "--output", "."), ".: this is a folder; expected a file"),
        (("bench", "--json", "."), ".: this is a folder; expected a file"),
        (("bench", "linear", "--json", "none/linear.json"), "none/linear.json: there is no folder"),
        (("--on", "tpu"), "invalid choice: 'tpu'"),
        (("--eps", "nan"), "'nan' is not a finite number"),
        (("plna", "12288"), "'plna' is no command; expected one of check, plan, bench, tune"),
        (("explain", "1023"), "cupynorm.explain is a name of Python and no command; expected one"),
        (("--fast",), "unrecognized arguments: --fast"),
    ],
)
def test_bad_usage(refused, arguments, sentence):
    assert sentence in refused(*arguments)


def test_names_may_be_all(capsys):
    parsed = command.parser().parse_args(
        ["bench", "--models", "all", "--direction", "all", "--peers", "torch,torch"]
    )
    assert parsed.models == list(MODELS) and parsed.direction == list(bench_cells.DIRECTIONS)
    assert parsed.peers == ["torch"] and parsed.cols == bench_cells.COLS and parsed.jobs == 1


LISTS = {
    ("check", "--dtype"): ("float32", "float64"),
    ("check", "--shape"): ("61x768", "64x4096"),
    ("bench", "--direction"): ("forward", "backward"),
    ("bench", "--dtype"): ("float32", "float64"),
    ("bench", "--norm"): ("rms_norm", "layer_norm"),
    ("bench", "--cols"): ("64", "128"),
    ("bench", "--rows"): ("1", "2"),
    ("bench", "--models"): tuple(MODELS)[:2],
    ("bench", "--scale"): ("row", "tensor"),
    ("bench", "--peers"): ("torch", "cupynorm"),
    ("bench", "linear", "--shapes"): ("1x2x3", "4x5x6"),
    ("bench", "linear", "--format"): ("fp8", "bfloat16"),
    ("bench", "linear", "--pass"): ("both", "forward"),
    ("bench", "linear", "--contestants"): tuple(CONTESTANTS)[:2],
    ("tune", "--direction"): ("backward", "forward"),
    ("tune", "--dtype"): ("float32", "float64"),
    ("tune", "--norm"): ("rms_norm", "layer_norm"),
    ("tune", "--cols"): ("64", "128"),
}


@pytest.mark.parametrize("words, values", LISTS.items(), ids=" ".join)
def test_options_of_lists_add_up(words, values):
    *names, option = words
    parse = command.parser().parse_args
    once = vars(parse([*names, option, ",".join(values)]))
    twice = vars(parse([*names, option, values[0], option, values[1], option, values[0]]))
    assert once == twice


def test_every_option_of_a_list_is_known_to_add_up():
    """Each that takes commas is above."""
    found = set()

    def visit(parser, names):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, below in action.choices.items():
                    visit(below, (*names, name))
            elif action.option_strings and action.type is not None and action.nargs is None:
                for text in [",".join(values) for values in LISTS.values()]:
                    try:
                        is_list = isinstance(action.type(text), list)
                    except (argparse.ArgumentTypeError, ValueError):
                        continue
                    if is_list:
                        found.add((*names, action.option_strings[-1]))

    visit(command.parser(), ())
    assert found == set(LISTS)


def test_numbers():
    assert [number(text) for text in ("0", "28", "2**28", "2^10")] == [0, 28, 2**28, 1024]
    assert positives("64,32,2**6") == [64, 32]
