"""Tiles, strategies and arguments that a plan refuses, and why."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from plan_problems import problem_of

import cupynorm
from cupynorm.dispatch.devices import DEVICES
from cupynorm.dispatch.dispatch import choose
from cupynorm.dispatch.problem import Layout, Tile
from cupynorm.gpu import nvrtc
from cupynorm.plans import plan

TILES = {
    "WARP": Tile(pack_size=8, threads_per_row=32, packs_per_thread=4, rows_per_block=4),
    "BLOCK": Tile(pack_size=8, threads_per_row=128, packs_per_thread=1),
    "RING": Tile(pack_size=8, threads_per_row=128, packs_per_thread=1, stages=2),
    "UNCACHED": Tile(pack_size=8, threads_per_row=512),
    "CLUSTER": Tile(pack_size=8, threads_per_row=512, cluster_size=2),
    "CLUSTER_RING": Tile(8, threads_per_row=64, packs_per_thread=1, cluster_size=2, stages=2),
}
WARP, BLOCK, RING, UNCACHED, CLUSTER, CLUSTER_RING = TILES.values()

# A line with strategy and tile | changes of the tile | changes of the problem; then the message.
REFUSED = r"""
warp WARP | pack_size 3
  pack_size 3; expected a power of two up to 16, which num_cols 1024 and the alignment
warp WARP | pack_size 0
  pack_size 0;
warp WARP | | pack_limit 4
  pack_size 8; expected a power of two up to 4, which num_cols 1024
warp WARP | | num_cols 1023, pack_limit 1
  pack_size 8; expected a power of two up to 1, which num_cols 1023
warp WARP | rows_per_block 64
  threads_per_row 32 and rows_per_block 64; .*multiple of 32 up
warp WARP | threads_per_row 8, rows_per_block 3
  threads_per_row 8 and rows_per_block 3;
warp WARP | threads_per_row 0
  threads_per_row 0 and
warp WARP | rows_per_block -1
  threads_per_row 32 and rows_per_block -1
warp WARP | threads_per_row 64
  threads_per_row 64; expected a power of two up to 32 for strategy 'warp'
warp WARP | threads_per_row 24
  threads_per_row 24; expected a power of two
block BLOCK | rows_per_block 2
  rows_per_block 2; expected 1: without stages strategy 'block' works on one row
uncached UNCACHED | rows_per_block 2
  rows_per_block 2; expected 1: without stages strategy 'uncached'
cluster CLUSTER | cluster_size 3
  cluster_size 3; expected one of 2, 4, 8, 16, the clusters that H200 runs
cluster UNCACHED
  cluster_size 1; expected one of 2, 4
block BLOCK | cluster_size 2
  cluster_size 2; expected 1: strategy 'block' has no clusters
warp WARP | packs_per_thread 2
  holds 512 columns \(pack_size 8 x threads_per_row 32 x packs_per_thread 2\); expected 1024 or more
block BLOCK | threads_per_row 64
  holds 512 columns
warp WARP | packs_per_thread 0
  holds 0 columns
warp WARP | packs_per_thread -4
  holds -1024 columns
block BLOCK | packs_per_thread -1
  packs_per_thread -1; expected 0: here the row is not kept
cluster CLUSTER | threads_per_row 32, packs_per_thread 2 | num_cols 2048
  holds 512 columns \(.* x packs_per_thread 2\); expected 1024 or more for each block$
cluster CLUSTER | threads_per_row 64, packs_per_thread 2
  packs_per_thread 2; expected fewer: the last pack of every thread is beyond
cluster CLUSTER_RING | exact 1, stages 0 | num_cols 1008
  exact 1; expected 1 for a row that fills the 512 columns
block BLOCK | threads_per_row 32, packs_per_thread 64 | num_cols 16384
  keeps 512 elements in each thread; expected fewer than its 255 registers
warp WARP | packs_per_thread 5
  packs_per_thread 5; expected fewer: the last pack .* is beyond the 1024 columns
uncached UNCACHED | packs_per_thread 1
  packs_per_thread 1; expected 0: here the row is not kept in registers
cluster CLUSTER | packs_per_thread -1
  packs_per_thread -1; expected 0: here
warp WARP | exact 1 | num_cols 1000
  exact 1; expected 1 for a row that fills the 1024 columns
warp WARP | early 2
  early 2; expected 1 only for forward
uncached UNCACHED | early 1
  early 1; expected 1 only for forward
warp WARP | exact 2
  exact 2;
uncached UNCACHED | exact 1
  exact 1;
warp WARP | blocks_per_sm 0
  blocks_per_sm 0 and blocks of 128 threads
warp WARP | blocks_per_sm 17
  blocks_per_sm 17 and blocks of 128 threads; expected 1 to 2048 threads on
block RING | pack_size 2, packs_per_thread 4 | dtype float64
  stages 2; a ring needs float32 arithmetic
cluster CLUSTER_RING | stages 1
  stages 1, rows_per_block 1, packs_per_thread 1; expected 2 or more stages of a ring
block RING | stages 1
  stages 1, rows_per_block 1, packs_per_thread 1; expected 2 or more stages of a ring
block RING | path staged
  path 'staged'; expected one of registers, smem, ring for strategy 'block'
warp WARP | path ring
  path 'ring'; expected one of registers, bundle for strategy 'warp'
uncached UNCACHED | path smem
  path 'smem'; expected one of uncached for
block RING | path registers
  stages 2; expected 0: path 'registers' has none
block BLOCK | path ring
  path 'ring' and stages 0; .* 1 or more
block BLOCK | rows_per_block 2, stages 1 | direction backward
  stages 1, rows_per_block 2, packs_per_thread 1; .* backward 1 for one row a block
block BLOCK | stages -1
  stages -1, rows_per_block 1
cluster CLUSTER | stages 2, path smem
  stages 2, .*packs_per_thread 0; .* 1 or more packs
warp WARP | stages 2
  stages 2, .*packs_per_thread 4; .* with strategy 'block' or 'cluster'
block UNCACHED | | num_cols 131008
  needs 262400 bytes of shared memory a block, H200
block BLOCK | threads_per_row 1024, stages 16 | num_cols 8192
  needs 267856 bytes of shared memory a block, H200
"""


def fields_of(words: str) -> dict[str, int | str]:
    """ "num_cols 1000, dtype float64" as a dict."""
    pairs = (each.split() for each in words.split(",") if each.strip())
    return {name: int(value) if value.lstrip("-").isdigit() else value for name, value in pairs}


@pytest.mark.parametrize("case", re.split(r"\n(?! )", REFUSED.strip()))
def test_tiles_that_are_refused(case):
    head, message = case.split("\n  ", 1)
    named, of_tile, of_problem = (*(each.strip() for each in head.split("|")), "", "")[:3]
    strategy, name = named.split()
    changes = {"num_cols": 1024} | fields_of(of_problem)
    if "pack_limit" in changes:
        changes["layout"] = Layout(changes.pop("pack_limit"), contiguous=True)
    tile = replace(TILES[name], **fields_of(of_tile))
    with pytest.raises(ValueError, match=f"tile .*{message}"):
        choose(problem_of(**changes), DEVICES["H200"], strategy, tile)


def test_tiles_next_to_the_refused_ones_are_accepted():
    """The tiles from which refused ones are made are accepted."""
    problem = problem_of(1024)
    for strategy, tile in (
        ("warp", WARP),
        ("block", BLOCK),
        ("uncached", UNCACHED),
        ("cluster", CLUSTER),
        ("block", UNCACHED),
        ("block", RING),
        ("block", replace(RING, rows_per_block=2)),
        ("cluster", CLUSTER_RING),
    ):
        choice = choose(problem, DEVICES["H200"], strategy, tile)
        assert (choice.strategy, choice.tile, choice.reason) == (strategy, tile, "as asked for")
    assert choose(problem, DEVICES["H200"], "warp", replace(WARP, exact=1)).tile.exact == 1
    in_registers = replace(
        CLUSTER, threads_per_row=64, packs_per_thread=1, exact=1
    )  # 2 x 64 threads x 8 = 1024
    assert choose(problem, DEVICES["H200"], "cluster", in_registers).tile == in_registers
    with pytest.raises(ValueError, match=r"stages 2; .* sm_90 or later"):
        choose(problem, DEVICES["A100"], "block", RING)


def test_backward_block_refuses_rows_in_shared_memory():
    with pytest.raises(ValueError, match="holds 0 columns"):
        choose(problem_of(1024, direction="backward"), DEVICES["H200"], "block", UNCACHED)


@pytest.mark.parametrize(
    ("message", "options"),
    (
        (
            r"strategy is 'tensor_core'; expected one of warp, block, cluster, uncached, or None",
            {"strategy": "tensor_core"},
        ),
        (
            r"statistics is 'naive'; expected 'two_pass', 'welford' or None",
            {"statistics": "naive"},
        ),
        (r"tile is given without strategy", {"tile": WARP}),
        (
            r"strategy 'cluster' needs compute capability 9\.0 or later; A100 has 8\.0",
            {"device": "A100", "strategy": "cluster"},
        ),
        (
            r"'block' is too narrow for 200000 columns of float32 on H200 \(backward\); its widest",
            {"num_cols": 200000, "dtype": "float32", "strategy": "block", "direction": "backward"},
        ),
        (r"norm is 'batch_norm'; expected 'layer_norm' or 'rms_norm'", {"norm": "batch_norm"}),
        (r"direction is 'sideways'; expected 'forward' or 'backward'", {"direction": "sideways"}),
        (r"num_cols is -1; expected an int of 0 or more", {"num_cols": -1}),
        (r"num_rows is -5; expected an int of 0 or more", {"num_rows": -5}),
        (
            r"dtype is 'int8'; expected one of float16, bfloat16, float32, float64",
            {"dtype": "int8"},
        ),
        (r"dtype is 'int8'; expected one of", {"weight_dtype": "int8"}),
        (r"dtype is 'half'; expected one of", {"bias_dtype": "half"}),
        (r"dtype is 'half'; expected one of .*, float64, float8_e4m3fn", {"out_dtype": "half"}),
        (
            r"scale is 'tensor'; expected one of given, row, of a forward whose out_dtype is int8",
            {"out_dtype": "int8", "scale": "tensor"},
        ),
        (
            r"device is 'Voodoo2'; expected one of A100, .*B200.*, a Device, or None",
            {"device": "Voodoo2"},
        ),
        (r"num_cols is '768'; expected an int", {"num_cols": "768"}),
        (r"num_cols is 768\.5; expected an int", {"num_cols": 768.5}),
        (r"num_rows is True; expected an int", {"num_rows": True}),
        (r"alignment is 0; expected an int of 1 or more", {"alignment": 0}),
        (r"sm_margin is -1; expected a number of multiprocessors, 0 or more", {"sm_margin": -1}),
        (r"sm_margin is '2'; expected a number of multiprocessors", {"sm_margin": "2"}),
        (r"tile is an int; expected a cupynorm.Tile or a dict", {"tile": 8}),
    ),
    ids=lambda value: value.split(";")[0] if isinstance(value, str) else "",
)
def test_arguments_that_plan_refuses(message, options):
    with pytest.raises((ValueError, TypeError), match=message):
        plan(**({"num_cols": 768, "device": "H200"} | options))


def test_a_plan_takes_short_names():
    given = plan(768, 8, "bf16", weight_dtype="fp32", out_dtype="fp16", device="h200")
    right = plan(768, 8, "bfloat16", weight_dtype="float32", out_dtype="float16", device="H200")
    assert given == right and plan(768, dtype="fp64", device="A100").problem.x == "float64"
    explained = cupynorm.explain(64, dtype="bf16", device="a100")
    assert explained.plan == plan(64, device="A100")


def test_a_plan_without_a_gpu_and_a_device_is_for_an_h200(monkeypatch):
    monkeypatch.setattr(nvrtc, "has_gpu", lambda: False)
    for function in (plan, lambda num_cols: cupynorm.explain(num_cols).plan):
        with pytest.warns(UserWarning, match="^no GPU was found: planned for an H200; device= nam"):
            assert function(768) == plan(768, device="H200")


def test_a_plan_takes_tile_and_margin_as_layer_norm_does():
    tile = {"pack_size": 8, "threads_per_row": 32, "packs_per_thread": 4}
    by_dict = plan(1024, device="H200", strategy="warp", tile=tile)
    assert by_dict == plan(1024, device="H200", strategy="warp", tile=Tile(**tile))
    for direction in ("forward", "backward"):
        margins = {"forward": 8, "backward": 16}
        by_dict = plan(1024, device="H200", direction=direction, sm_margin=margins)
        assert by_dict == plan(
            1024, device="H200", direction=direction, sm_margin=margins[direction]
        )
