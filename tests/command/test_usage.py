"""python -m cupynorm: arguments that are refused in a sentence, and how numbers are written."""

import argparse

import pytest
from command_runs import ROOT

from cupynorm import __main__ as command
from cupynorm.bench.cells import COLS, MODELS
from cupynorm.command_line import linear_shapes, number, positives


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("plan 4096 --device H9000", "expected one of A100"),
        ("plan --device H200", "plan has no number of columns; expected one, or --table"),
        ("plan many --device H200", "'many' is not a whole number"),
        (
            "plan 90000 --device H200 --strategy warp",
            "strategy 'warp' is too narrow for 90000 columns of bfloat16 on H200 (forward)",
        ),
        ("plan 64 --device H200 --sm-margin 132", "sm_margin is 132; expected 0 to 131"),
        ("plan 64 --device A100 --strategy cluster", "needs compute capability 9.0 or later"),
        ("plan 64 --device H200 --scale row", "scale is 'row'; expected one of given, tensor"),
        ("plan 64 --device H200 --amax", "amax is recorded with scale None; expected 'given'"),
        (
            "plan 64 --device H200 --out-dtype float8_e5m2 --direction both",
            "out_dtype is 'float8_e5m2' and direction 'backward'; expected 'forward'",
        ),
        ("bench --dtype float8", "'float8' is unknown"),
        ("bench --scale column", "'column' is unknown; expected some of given,tensor,row,block"),
        ("bench --cols 0", "expected 1 or more"),
        ("bench --cols 64,,", "not a whole number"),
        ("bench --direction both", "'both' is unknown; expected some of forward,backward"),
        ("bench --models gpt9", "'gpt9' is unknown"),
        ("bench --peers nobody", "peers has 'nobody'; expected some of cupynorm, torch,"),
        ("bench --host --guard", "not allowed with argument"),
        (f"bench --guard {ROOT}/README.md", "README.md is no result of the benchmark"),
        ("bench --guard none.json", "none.json: No such file or directory"),
        ("bench --json none/a.json", "none/a.json: there is no folder"),
        ("bench linear --json .", ".: this is a folder; expected a file"),
        ("bench linear --shapes 1x2", "'1x2' is no shape; expected rows x in_features x out_fea"),
        ("tune --output none/tiles.csv", "none/tiles.csv: there is no folder"),
        ("--on tpu", "invalid choice: 'tpu'"),
        ("--eps nan", "'nan' is not a finite number"),
        ("check a.npz", "unrecognized arguments: a.npz"),
        ("check --forward a:b", "--forward is no option any more; expected cupynorm.check_functi"),
        ("plna 12288", "'plna' is no command; expected one of check, plan, bench, tune"),
        ("explain 1023", "cupynorm.explain is a name of Python and no command; expected one"),
        ("--fast", "unrecognized arguments: --fast"),
    ],
)
def test_bad_usage(refused, words, sentence):
    assert sentence in refused(*words.split())


def test_names_may_be_all_and_lists_add_up():
    parse = command.parser().parse_args
    parsed = parse(["bench", "--models", "all", "--peers", "torch", "--peers", "quack,torch"])
    assert parsed.models == list(MODELS) and parsed.peers == ["torch", "quack"]
    assert parsed.cols == COLS and parsed.jobs == 1
    for words in (
        "bench --direction forward backward",
        "bench --cols 64 128",
        "bench linear --shapes 1x2x3 4x5x6",
        "bench linear --format fp8 bfloat16",
        "tune --norm rms_norm layer_norm",
    ):
        *names, option, first, second = words.split()
        once = vars(parse([*names, option, f"{first},{second}"]))
        assert once == vars(parse([*names, option, first, option, second, option, first]))


def test_numbers_and_shapes():
    assert linear_shapes("64x768x1,3x2**4x2") == [(64, 768, 1), (3, 16, 2)]
    for wrong in ("64", "1x2", "0x4x1", "axbxc"):
        with pytest.raises(argparse.ArgumentTypeError):
            linear_shapes(wrong)
    assert [number(text) for text in ("0", "28", "2**28", "2^10")] == [0, 28, 2**28, 1024]
    assert positives("64,32,2**6") == [64, 32]
