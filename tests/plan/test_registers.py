"""tile_model.py: registers of a thread, and the warps and blocks that fit."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tile_problems import A100, H200, QUANTIZED, RTX_4090, RTX_5090, backward, forward

from cupynorm.dtypes import DTYPES
from cupynorm.plan import model
from cupynorm.plan.model import blocks_that_fit, registers_of_thread, warps_that_fit
from cupynorm.plan.problem import SCALINGS, Tile


def register_rows() -> list[dict[str, str]]:
    with (Path(model.__file__).parent / "registers.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("registers", "warps"),
    [(8, 256), (32, 64), (33, 48), (40, 48), (56, 36), (64, 32), (128, 16), (168, 12), (255, 8)],
)
def test_warps_that_fit(registers, warps):
    """A quarter of 65536 registers holds whole warps of 32 threads; registers come in eights."""
    assert warps_that_fit(H200, registers) == warps
    assert warps_that_fit(replace(H200, registers_per_sm=32768), registers) in (
        warps // 2,
        warps // 2 - 2,
    )


def test_no_warp_has_more_than_256_registers():
    assert warps_that_fit(H200, 256) == 8
    assert warps_that_fit(H200, 257) == 0
    assert warps_that_fit(replace(H200, registers_per_sm=1), 32) == 0


def test_warps_that_fit_fall_as_registers_grow():
    counts = [warps_that_fit(H200, registers) for registers in range(1, 300)]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == 15


@pytest.mark.parametrize("device", [H200, A100, RTX_4090], ids=lambda device: device.name)
def test_blocks_that_fit(device):
    """16 elements of a plain forward are 16 registers beside 40: 36 warps, 9 blocks of 4 warps."""
    tile = Tile(8, 128, 2, path="registers")
    assert registers_of_thread(forward(2040), device, tile) == 56
    assert blocks_that_fit(forward(2040), device, tile) == 9
    # No more than 32 blocks, although 40 would have registers.
    assert registers_of_thread(forward(248), device, Tile(8, 32, 1, path="registers")) == 48
    assert blocks_that_fit(forward(248), device, Tile(8, 32, 1, path="registers")) == 32


def test_threads_bound_the_blocks_of_a_multiprocessor():
    """Rows of 2 packs on a lane, which fill their tile, take 40 registers: 48 warps."""
    tile = Tile(8, 4, 2, rows_per_block=64, exact=1, path="registers")
    problem = forward(64)
    assert registers_of_thread(problem, H200, tile) == 40
    assert blocks_that_fit(problem, H200, tile) == 48 * 32 // 256
    assert blocks_that_fit(problem, replace(H200, threads_per_sm=1024), tile) == 4


PATHS = {
    "forward": (forward, Tile(8, 128, 1, path="registers")),
    "forward of float32": (
        lambda num_cols: forward(num_cols, "float32"),
        Tile(4, 128, 1, path="registers"),
    ),
    "forward of single elements": (forward, Tile(1, 128, 1, path="registers")),
    "forward to 8 bits": (
        lambda num_cols: forward(num_cols, **QUANTIZED),
        Tile(8, 128, 1, path="registers"),
    ),
    "backward": (backward, Tile(4, 128, 1, path="registers")),
    "ring": (forward, Tile(8, 128, 1, stages=2, path="ring")),
    "backward ring": (backward, Tile(4, 128, 1, stages=2, path="ring")),
    "bundle": (forward, Tile(1, 32, 1, 4, stages=2, bundle=4, path="bundle")),
    "backward bundle": (backward, Tile(1, 32, 1, 4, stages=2, bundle=4, path="bundle")),
}


@pytest.mark.parametrize("device", [H200, A100, RTX_5090], ids=lambda device: device.name)
@pytest.mark.parametrize("path", PATHS)
def test_more_packs_need_more_registers_and_leave_fewer_blocks(path, device):
    problem_of, tile = PATHS[path]
    needed, blocks = [], []
    for packs in range(2, 26, 2):
        longer = replace(tile, packs_per_thread=packs)
        problem = problem_of(longer.cols - tile.pack_size // 2)
        needed.append(registers_of_thread(problem, device, longer))
        blocks.append(blocks_that_fit(problem, device, longer))
    assert all(isinstance(registers, int) for registers in needed)
    assert needed == sorted(needed) and needed[-1] > needed[0]
    assert blocks == sorted(blocks, reverse=True)
    # A register holds at most two elements.
    assert needed[-1] >= 24 * tile.pack_size / 2


def test_registers_of_options():
    """Each option adds to a plain forward of 16 elements, which takes 56; sm_90."""
    tile = Tile(8, 128, 2, path="registers")

    def more(**changes: object) -> int:
        return registers_of_thread(forward(2040, **changes), H200, tile) - 56

    assert more() == 0
    assert more(weight="float32") == 8
    assert more(residual=True) == 8
    assert more(input="bfloat16") == 16
    # A second word for each element of float64, and a quarter of each besides.
    assert more(x="float64") == 2 * 16 * 1.25 - 16


def test_every_line_of_registers_has_words_of_a_kernel():
    """A line whose words no problem, tile and device have together would never count."""
    fused = {"residual", "dsum", "input", "dresidual", "recomputed"}
    fused |= {"load", "store"}
    of_tile = {"single", "small", "exact", "lanes", "one lane", "over 24", "over 32", "over 40"}
    others = {"wide", "weight64", "sm_80", "sm_100", "sm_120"}
    known = {*DTYPES, *SCALINGS, *fused, *of_tile, *others}
    for row in register_rows():
        direction, _, path = row["kind"].partition(" ")
        assert direction in ("forward", "backward"), row
        assert path in ("", "ring", "bundle", "to 8 bits"), row
        words = re.findall(r"over \d+|one lane|\S+", row["words"])
        assert words == sorted(words) and 1 <= len(words) <= 3 and set(words) <= known, row


def test_rows_to_8_bits_with_nothing_else_fused_have_registers_of_their_own():
    """16 elements in packs of 16 bytes: 47.5 + 1.26 for each; with a residual 40 + 8 + 16 + 16."""
    tile, plain = Tile(8, 128, 2, path="registers"), forward(2040, **QUANTIZED)
    assert registers_of_thread(plain, H200, tile) == int(47.5 + 16 * 1.26)
    assert registers_of_thread(replace(plain, residual=True), H200, tile) == 40 + 16 + 8 + 16 + 4
    exact = replace(tile, exact=1)
    assert registers_of_thread(replace(plain, num_cols=2048), H200, exact) == int(31.5 + 16 * 1.26)
