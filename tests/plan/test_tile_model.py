"""tile_model.py: shared memory as in the structs of cuda_src, registers, what a tile can do.

Nothing here needs a GPU. The sizes of the structs come from the C++ compiler.
"""

from __future__ import annotations

import csv
import re
import shutil
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from cupynorm.dtypes import DTYPES
from cupynorm.gpu import on_cpu
from cupynorm.gpu.nvrtc import cuda_src
from cupynorm.plan import tile_model
from cupynorm.plan.devices import DEVICES
from cupynorm.plan.dispatch import choose
from cupynorm.plan.problem import SCALINGS, Layout, Problem, Tile
from cupynorm.plan.tile_model import (
    RESERVED_BYTES,
    blocks_that_fit,
    can_bundle,
    can_ring,
    fits_smem,
    reduce_bytes,
    registers_of_thread,
    scales_at_once,
    shaped,
    smem_bytes_of,
    streamed,
    warps_that_fit,
)


def register_rows() -> list[dict[str, str]]:
    with (Path(tile_model.__file__).parent / "registers.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


H200, A100, RTX_4090, RTX_5090 = (
    DEVICES[name] for name in ("H200", "A100", "RTX 4090", "RTX 5090")
)


def forward(num_cols: int = 1024, x: str = "bfloat16", **changes: object) -> Problem:
    named = {"y": x, "weight": x, "bias": x, "layout": Layout.of_new_arrays(num_cols), **changes}
    return Problem("forward", **{"centered": True, "num_cols": num_cols, "x": x} | named)


def backward(num_cols: int = 1024, x: str = "bfloat16", **changes: object) -> Problem:
    named = dict.fromkeys(("weight", "dy", "dx", "dweight", "dbias"), x)
    named |= {"layout": Layout.of_new_arrays(num_cols), **changes}
    return Problem("backward", **{"centered": True, "num_cols": num_cols, "x": x} | named)


# Shared memory against the structs.


@dataclass(frozen=True)
class Layouts:
    """One problem, its tile, and a C++ expression for the bytes that the kernel's structs take."""

    problem: Problem
    tile: Tile
    strategy: str
    cpp: str


def cpp_of(name: str) -> str:
    return DTYPES[name].cpp


def round_up(expression: str) -> str:
    return f"(({expression}) + 15) / 16 * 16"


def ring_forward(tile: Tile, **changes: object) -> Layouts:
    """ForwardRing, Broadcast and Exchange in the order of forward_ring.cuh."""
    problem = forward((tile.cols - tile.pack_size) * tile.cluster_size, **changes)
    held = ", ".join([cpp_of(problem.x)] * (1 + problem.residual))
    values = 3 if problem.centered else 2
    total = round_up(f"WarpRing<{tile.cpp}, {held}>::smem_bytes")
    total += f" + Broadcast<{tile.cpp}>::smem_bytes + Exchange<{tile.cpp}, {values}>::smem_bytes"
    if problem.scaling == "row":
        total += f" + Exchange<{tile.cpp}, 1>::smem_bytes"
    return Layouts(problem, tile, "cluster" if tile.cluster_size > 1 else "block", round_up(total))


def ring_backward(tile: Tile, **changes: object) -> Layouts:
    """BackwardRing, Exchange and RingParameters in the order of backward_ring.cuh."""
    problem = backward((tile.cols - tile.pack_size) * tile.cluster_size, **changes)
    held = ", ".join(cpp_of(name) for name in (problem.x, problem.dy, problem.dsum) if name)
    total = f"WarpRing<{tile.cpp}, {held}>::smem_bytes + Exchange<{tile.cpp}>::smem_bytes"
    total = round_up(total)
    for name in (problem.weight, problem.bias if problem.recomputed else None):
        if name:
            parameters = f"RingParameters<Scale<{cpp_of(name)}, false>, {tile.cpp}, true>"
            total += f" + {parameters}::smem_bytes"
    return Layouts(problem, tile, "cluster" if tile.cluster_size > 1 else "block", total)


def bundles(problem: Problem, tile: Tile) -> Layouts:
    """Slots and barriers of Bundles. Backward overwrites them with the sums of all warps."""
    if problem.forward:
        streams = [(problem.x, problem.num_cols)] * (1 + problem.residual)
    else:
        tensors = [name for name in (problem.x, problem.dy, problem.dsum) if name]
        streams = [(name, problem.num_cols) for name in tensors] + [("float32", 1)] * 2
    slot = " + ".join(
        f"BundleStream<{tile.cpp}, {cpp_of(name)}>{{nullptr, {num_cols}}}.slot_bytes()"
        for name, num_cols in streams
    )
    num_warps = tile.block_size // 32
    total = f"{num_warps} * {tile.stages} * ({slot} + int(sizeof(unsigned long long)))"
    if not problem.forward and num_warps > 1:
        total = f"max({total}, 2 * {num_warps} * {problem.num_cols} * int(sizeof(float)))"
    return Layouts(problem, tile, "warp", total)


def reduction(tile: Tile, compute: str) -> str:
    if tile.cluster_size > 1:
        return f"ClusterReduce<{tile.threads_per_row}, {tile.cluster_size}, {compute}>::smem_bytes"
    return f"BlockReduce<{tile.threads_per_row}, {compute}>::smem_bytes"


def staged(problem: Problem, tile: Tile) -> Layouts:
    """The barrier takes 8 bytes; the total stays a multiple of 16."""
    row = f"StagedRow<LoadOf<{cpp_of(problem.x)}>, {tile.cpp}>::slot_bytes"
    barrier = "sizeof(unsigned long long)"
    return Layouts(
        problem, tile, "block", round_up(f"{reduction(tile, 'float')} + {row} + {barrier}")
    )


def in_smem(problem: Problem, tile: Tile) -> Layouts:
    """One row of forward; backward, slices of x and dy and of each sum of a gradient."""
    compute = DTYPES[problem.compute].cpp
    held = [cpp_of(problem.x)]
    if not problem.forward:
        held += [cpp_of(problem.dy)]
        held += [compute] * sum(bool(name) for name in (problem.dweight, problem.dbias))
    if tile.cluster_size > 1:
        shares = f"{tile.cluster_size}, {8 * tile.pack_size}"
        cols = f"largest_share<{shares}>({problem.num_cols})"
    else:
        cols = str(problem.num_cols)
    rows = [round_up(f"{cols} * int(sizeof({name}))") for name in held]
    strategy = "cluster" if tile.cluster_size > 1 else "block"
    return Layouts(problem, tile, strategy, " + ".join([reduction(tile, compute), *rows]))


def in_registers(problem: Problem, tile: Tile) -> Layouts:
    strategy = "cluster" if tile.cluster_size > 1 else "block"
    return Layouts(problem, tile, strategy, reduction(tile, DTYPES[problem.compute].cpp))


RING = Tile(8, 96, 2, stages=3, path="ring")
LONG_RING = Tile(8, 64, 3, stages=2, path="ring")
ROWS_RING = Tile(8, 32, 3, rows_per_block=3, stages=3, path="ring")
CLUSTER_RING = Tile(8, 64, 3, cluster_size=16, stages=4, path="ring")
LONE_RING = Tile(1, 64, 24, stages=2, path="ring")
PAIRS_RING = Tile(2, 64, 12, cluster_size=4, stages=3, path="ring")
LANES = Tile(1, 8, 16, 8, stages=2, bundle=12, path="bundle")
LONE_LANE = Tile(1, 1, 33, 64, stages=2, bundle=32, path="bundle")
WHOLE_WARP = Tile(1, 32, 16, 2, stages=3, bundle=3, path="bundle")
STAGED = Tile(8, 128, 7, stages=1, path="staged")
SMEM = Tile(8, 512, path="smem")
CLUSTER_SMEM = Tile(1, 512, cluster_size=4, path="smem")
REGISTERS = Tile(8, 96, 2, path="registers")
CLUSTER_REGISTERS = Tile(8, 96, 2, cluster_size=8, path="registers")
QUANTIZED = {"y": "float8_e4m3fn", "scaling": "row"}
STREAM = {"input": "bfloat16", "residual_dtype": "float32"}

LAYOUTS = {
    "ring": ring_forward(RING),
    "ring of rms_norm": ring_forward(RING, centered=False),
    "ring of several rows": ring_forward(ROWS_RING),
    "ring of a cluster": ring_forward(CLUSTER_RING),
    "ring of single elements": ring_forward(LONE_RING),
    "ring of pairs": ring_forward(PAIRS_RING),
    "ring with a residual": ring_forward(LONG_RING, residual=True),
    "ring to 8 bits": ring_forward(CLUSTER_RING, **QUANTIZED),
    "ring to 8 bits, a given scale": ring_forward(RING, y="float8_e4m3fn", scaling="given"),
    "backward ring": ring_backward(RING),
    "backward ring with weights in shared memory": ring_backward(LONG_RING),
    "backward ring, wide weights": ring_backward(LONG_RING, weight="float32"),
    "backward ring without a weight": ring_backward(LONG_RING, weight=None),
    "backward ring of several rows": ring_backward(ROWS_RING),
    "backward ring of a cluster": ring_backward(CLUSTER_RING),
    "backward ring of single elements": ring_backward(LONE_RING),
    "backward ring of pairs": ring_backward(PAIRS_RING, x="float16"),
    "backward ring with dsum": ring_backward(LONG_RING, dsum="bfloat16"),
    "backward ring that writes y again": ring_backward(
        LONG_RING, recomputed="bfloat16", bias="float32"
    ),
    "backward ring of float32": ring_backward(replace(RING, pack_size=4), x="float32"),
    "bundles of 8 lanes": bundles(forward(127), LANES),
    "bundles of a lane a row": bundles(forward(33), LONE_LANE),
    "bundles of a whole warp": bundles(forward(511), WHOLE_WARP),
    "bundles with a residual": bundles(forward(127, residual=True), LANES),
    "backward bundles": bundles(backward(127), LANES),
    "backward bundles with dsum": bundles(backward(127, dsum="bfloat16"), LANES),
    "backward bundles of a lane a row": bundles(backward(33, "float32"), LONE_LANE),
    "backward bundles of few rows": bundles(
        backward(511), replace(WHOLE_WARP, bundle=1, stages=1, rows_per_block=8)
    ),
    "staged": staged(forward(7160), STAGED),
    "staged, float32": staged(forward(3580, "float32"), replace(STAGED, pack_size=4)),
    "row in shared memory": in_smem(forward(33336), SMEM),
    "row of float64 in shared memory": in_smem(
        forward(8006, "float64"), replace(SMEM, pack_size=2)
    ),
    "slices in shared memory": in_smem(forward(70001), CLUSTER_SMEM),
    "backward slices in shared memory": in_smem(backward(30001), CLUSTER_SMEM),
    "backward slices without dbias": in_smem(backward(30001, dbias=None), CLUSTER_SMEM),
    "backward slices of float64": in_smem(backward(5001, "float64"), CLUSTER_SMEM),
    "row in registers": in_registers(forward(1536), REGISTERS),
    "row of float64 in registers": in_registers(backward(1536, "float64"), REGISTERS),
    "row in the registers of a cluster": in_registers(backward(12288), CLUSTER_REGISTERS),
}

SIZES = """
#include "backward.cuh"
#include "broadcast.cuh"
#include "bundle.cuh"
#include "cluster_reduce.cuh"
#include "exchange.cuh"
#include "forward.cuh"
#include "ring.cuh"
#include "ring_parameters.cuh"
#include "staged_row.cuh"

template <class T>
struct LoadOf {
  using Held = T;
};
struct Sizes {
  long long* sizes;
};
template <int count>
__global__ void write_sizes(const Sizes to) {
  const long long sizes[count] = {SIZES};
  for (int at = threadIdx.x; at < count; at += blockDim.x) to.sizes[at] = sizes[at];
}
"""


@pytest.fixture(scope="module")
def bytes_of_structs(tmp_path_factory) -> dict[str, int]:
    """The sizes of all LAYOUTS, found by one kernel that is compiled and run on the CPU."""
    folder = tmp_path_factory.mktemp("sizes") / "cuda_src"
    shutil.copytree(cuda_src(), folder)
    expressions = ",\n".join(layout.cpp for layout in LAYOUTS.values())
    expressions = expressions.replace("Tile{", "::Tile{")
    (folder / "sizes.cu").write_text(SIZES.replace("{SIZES}", "{" + expressions + "}"))
    found = np.full(len(LAYOUTS), -1, np.int64)
    kernel = on_cpu.kernel("sizes.cu", f"write_sizes<{len(LAYOUTS)}>", folder=folder)
    kernel.launch(1, 32, struct.pack("q", found.ctypes.data))
    return dict(zip(LAYOUTS, found.tolist()))


@pytest.mark.parametrize("name", LAYOUTS)
def test_shared_memory_of_the_structs(name, bytes_of_structs):
    layout = LAYOUTS[name]
    found = smem_bytes_of(layout.problem, layout.tile, layout.strategy)
    assert found == bytes_of_structs[name] > 0


def test_shared_memory_by_hand():
    """Each formula once in numbers, so that a mistake in both the structs and the model shows."""
    # Two buffers of three sums for each of 4 warps, 4 or 8 bytes each.
    assert reduce_bytes(forward(), 128) == 2 * 3 * 4 * 4
    assert reduce_bytes(forward(x="float64"), 128) == 2 * 3 * 4 * 8
    # A cluster of 2 adds two buffers of three sums for each block: 48 bytes.
    assert reduce_bytes(forward(), 128, 2) == 2 * 3 * 4 * 4 + 2 * 3 * 2 * 4
    # One warp: 24 bytes, rounded to 32.
    assert reduce_bytes(forward(), 32) == 32
    # A ring of 3 rows of 1536 columns in 3 warps: rows and 3 barriers a row; 2 broadcasts of 24
    # bytes; 4 buffers of 3 floats for each warp and a barrier. 9512 is rounded up.
    assert 3 * (1536 * 2 + 3 * 8) + 2 * 24 + 4 * (3 * 3 * 4 + 8) == 9512
    assert smem_bytes_of(forward(1528), RING, "block") == 9520
    # forward_warp needs none; backward keeps 2 sums for each column in each of 4 warps.
    tile = Tile(8, 32, 4, rows_per_block=4, path="registers")
    assert smem_bytes_of(forward(1024), tile, "warp") == 0
    assert smem_bytes_of(backward(1024), tile, "warp") == 2 * 4 * 1024 * 4
    assert smem_bytes_of(backward(1024), replace(tile, rows_per_block=1), "warp") == 0
    # backward_parameters: 2 sums for each column of a pack of 8, 4 packs, in each of 16 warps.
    parameters = Tile(8, 4, rows_per_block=128)
    assert smem_bytes_of(backward(1024), parameters, "parameters") == 2 * 8 * 4 * 16 * 4


def test_shared_memory_that_fits():
    """One KiB of every block is the driver's; the limit of a block does not include it."""
    device = replace(H200, smem_per_block=100_000, smem_per_sm=202_048)
    assert RESERVED_BYTES == 1024
    assert fits_smem(device, 100_000, 2)
    assert not fits_smem(device, 100_001, 1)
    assert not fits_smem(replace(device, smem_per_sm=202_047), 100_000, 2)
    assert fits_smem(device, 0, 197) and not fits_smem(device, 0, 198)


# Registers.


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
    assert warps_that_fit(replace(H200, registers_per_sm=0), 32) == 0


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
    assert more(row_scale="float32") == 8
    assert more(input="bfloat16") == 16
    assert more(dropout=True) == 24
    # A second pair of parameters: 32, and three quarters of each element.
    assert more(y1="bfloat16") == 32 + 12
    # A second word for each element of float64, and a quarter of each besides.
    assert more(x="float64") == 2 * 16 * 1.25 - 16


@pytest.mark.parametrize("row", register_rows(), ids=lambda row: f"{row['kind']}: {row['words']}")
def test_every_line_of_registers_has_words_of_a_kernel(row):
    """A line whose words no problem, tile and device have together would never count."""
    kinds = ("ring", "bundle", "to 8 bits")
    direction, _, path = row["kind"].partition(" ")
    assert direction in ("forward", "backward") and path in ("", *kinds)
    words = re.findall(r"over \d+|one lane|\S+", row["words"])
    assert words == sorted(words) and 1 <= len(words) <= 3
    fused = {"residual", "dsum", "input", "row_scale", "dropout", "dresidual", "y1", "recomputed"}
    fused |= {"load", "store"}
    of_tile = {"single", "small", "exact", "lanes", "one lane", "over 24", "over 32", "over 40"}
    known = {*DTYPES, *SCALINGS, *fused, *of_tile, "wide", "by_y", "sm_80", "sm_100", "sm_120"}
    assert set(words) <= known


def test_rows_to_8_bits_with_nothing_else_fused_have_registers_of_their_own():
    """16 elements in packs of 16 bytes: 47.5 + 1.26 for each; with a residual 40 + 8 + 16 + 16."""
    tile, plain = Tile(8, 128, 2, path="registers"), forward(2040, **QUANTIZED)
    assert registers_of_thread(plain, H200, tile) == int(47.5 + 16 * 1.26)
    assert registers_of_thread(replace(plain, residual=True), H200, tile) == 40 + 16 + 8 + 16 + 4
    exact = replace(tile, exact=1)
    assert registers_of_thread(replace(plain, num_cols=2048), H200, exact) == int(31.5 + 16 * 1.26)


# What a kernel can do.


def test_streamed_itemsizes():
    assert streamed(forward()) == [2]
    assert streamed(forward(x="float32", residual=True)) == [4, 4]
    assert streamed(backward()) == [2, 2]
    assert streamed(backward(x="float32", dy="bfloat16", dsum="float32")) == [4, 2, 4]


def test_problems_that_can_use_a_ring():
    for problem in (
        forward(),
        forward(x="float32", residual=True),
        forward(weight="float64"),
        forward(**QUANTIZED),
        forward(y1="bfloat16", weight1="bfloat16"),
        backward(),
        backward(dsum="bfloat16"),
        backward(recomputed="bfloat16", bias="bfloat16"),
    ):
        assert can_ring(problem, H200), problem
        assert not can_ring(problem, A100) and not can_ring(problem, RTX_4090)
        assert can_ring(problem, RTX_5090)


@pytest.mark.parametrize(
    "problem",
    [
        forward(x="float64"),
        forward(**STREAM),
        forward(dropout=True),
        forward(row_scale="float32"),
        backward(dropout=True),
        backward(row_scale="float32"),
        backward(x="float32", y="bfloat16"),
    ],
    ids=["float64", "input", "dropout", "row_scale", "dropout of dx", "row_scale of dx", "by y"],
)
def test_problems_that_cannot_use_a_ring(problem):
    assert not can_ring(problem, H200)


def test_problems_that_can_use_bundles():
    for problem in (
        forward(127),
        forward(127, "float32"),
        forward(127, residual=True),
        forward(127, weight="float64", bias=None),
        forward(127, round_x_hat="bfloat16"),
        backward(127),
        backward(127, dsum="bfloat16"),
    ):
        assert can_bundle(problem, H200), problem
        assert not can_bundle(problem, A100)


@pytest.mark.parametrize(
    "problem",
    [
        forward(127, "float64"),
        forward(127, y="float32"),
        forward(127, y=None),
        forward(127, **QUANTIZED),
        forward(127, y1="bfloat16"),
        forward(127, dropout=True),
        forward(127, row_scale="float32"),
        forward(127, **STREAM),
        forward(127, layout=Layout(1, contiguous=False)),
        backward(127, dy="float32"),
        backward(127, dx=None),
        backward(127, dsum="float32"),
        backward(127, dresidual="bfloat16"),
        backward(127, recomputed="bfloat16"),
        backward(127, "float32", y="float32"),
    ],
    ids=(
        "float64,wide y,no y,8 bits,second output,dropout,row_scale,input,gaps,"
        "wide dy,no dx,wide dsum,dresidual,recomputed,by y"
    ).split(","),
)
def test_problems_that_cannot_use_bundles(problem):
    assert not can_bundle(problem, H200)


def quantized(scaling: str | None, num_cols: int = 4096, **changes: object) -> Problem:
    return forward(num_cols, y="float8_e4m3fn", scaling=scaling, **changes)


def test_scales_that_belong_to_no_block_of_columns():
    """A scale of the whole tensor takes two launches; a given scale or one of a row takes one."""
    for tile, strategy in (
        (Tile(8, 128, 4, path="registers"), "block"),
        (Tile(8, 512, path="smem"), "block"),
        (Tile(8, 512, path="uncached"), "uncached"),
        (RING, "block"),
    ):
        assert scales_at_once(quantized("given"), tile, strategy)
        assert scales_at_once(quantized("row"), tile, strategy)
        assert scales_at_once(forward(), tile, strategy)
        assert not scales_at_once(quantized("tensor"), tile, strategy)


@pytest.mark.parametrize(
    ("tile", "strategy", "block", "mx"),
    [
        # Lanes of a warp find the amax: 8 x 128 columns are a multiple of 128 and of 32.
        (Tile(8, 128, 4), "block", True, True),
        # 8 x 4 = 32 columns at a time: one scale of 32 columns, a quarter of a block of 128.
        (Tile(8, 4, 4), "warp", True, True),
        # 8 x 2 = 16 columns at a time divide both.
        (Tile(8, 2, 4), "warp", True, True),
        # 24 lanes of 4: 96 columns are a multiple of 32 only.
        (Tile(4, 24, 4), "warp", False, True),
        # 32 lanes of one element: 32 columns at a time, a quarter of a block of 128.
        (Tile(1, 32, 4), "warp", True, True),
        # 64 threads of one element: a block of 128 columns belongs to lanes of two warps.
        (Tile(1, 64, 4), "block", False, True),
        # 64 threads of two: the same, although 128 columns are all that they hold at a time.
        (Tile(2, 64, 4), "block", False, True),
        # Rows that are in no register.
        (Tile(8, 128, path="smem"), "block", False, False),
        (Tile(8, 128, path="uncached"), "uncached", False, False),
        # 80 elements of y, unpacked, are 320 bytes; 88 are more than a thread keeps.
        (Tile(8, 128, 10), "block", True, True),
        (Tile(8, 128, 11), "block", False, False),
        # A cluster only if its slices are whole.
        (Tile(8, 128, 4, cluster_size=2), "cluster", False, False),
        (Tile(8, 128, 4, cluster_size=2, exact=1), "cluster", True, True),
        # A slice of 64 columns is half of a block of 128.
        (Tile(2, 32, 1, cluster_size=2, exact=1), "cluster", False, True),
        # One of 320 columns ends in the middle of a block of 128.
        (Tile(2, 32, 5, cluster_size=2, exact=1), "cluster", False, True),
    ],
    ids=str,
)
def test_scales_of_blocks_in_one_launch(tile, strategy, block, mx):
    assert scales_at_once(quantized("block"), tile, strategy) == block
    assert scales_at_once(quantized("mx"), tile, strategy) == mx


def splits_a_block(tile: Tile, block: int) -> bool:
    """Whether a slice of the row, or what the lanes of one warp hold, ends inside a block."""
    at_a_time, of_warp = tile.pack_size * tile.threads_per_row, tile.pack_size * 32
    if tile.cluster_size > 1 and not (tile.exact == 1 and tile.cols % block == 0):
        return True
    if tile.path == "ring":
        return tile.exact != 1 or of_warp % block != 0
    by_warps = at_a_time % block == 0 and of_warp >= block
    return not by_warps and not (block % at_a_time == 0 and tile.threads_per_row <= 32)


# What else is fused with 8-bit rows; options of which a row of a data file is chosen come first.
FUSED_WITH_SCALES = (
    {"x": "bfloat16", "weight": "bfloat16"},
    {"x": "float32"},
    {"x": "float64"},
    {"x": "float16", "residual": True},
    {"x": "float32", "input": "bfloat16", "residual_dtype": "float32"},
    {"x": "float16", "input": "float16", "residual_dtype": "float16", "dropout": True},
)
TILES_OF_CALLERS = [
    (strategy, Tile(pack_size, threads, packs, rows, cluster_size, stages=stages))
    for pack_size in (1, 2, 4, 8)
    for packs in (1, 3, 8)
    for strategy, threads, rows, cluster_size, stages in (
        *(("warp", lanes, 128 // lanes, 1, 0) for lanes in (1, 4, 16, 32)),
        *(("block", threads, 1, 1, 0) for threads in (32, 96, 160, 256)),
        *(("block", threads, 1, 1, stages) for threads in (96, 128) for stages in (1, 2)),
        *(("cluster", threads, 1, 2, stages) for threads in (32, 96, 128) for stages in (0, 2)),
    )
]


@pytest.mark.parametrize("device", ["A100", "RTX 4090", "H200", "B200", "RTX 5090"])
@pytest.mark.parametrize("scaling", ["block", "mx"])
def test_no_plan_splits_the_block_of_a_scale(scaling, device):
    """One launch writes the scales of blocks only where each block lies in one slice of the row,
    and there in lanes of one warp: chosen tiles, forced strategies, and tiles of callers."""
    block, at_once = {"block": 128, "mx": 32}[scaling], {"chosen": 0, "of a caller": 0}

    def look(problem: Problem, strategy: str | None, tile: Tile | None = None) -> None:
        try:
            choice = choose(problem, DEVICES[device], strategy, tile)
        except ValueError:  # too wide or too narrow, or not for this device
            return
        if choice.amax_kernel is None:
            at_once["of a caller" if tile else "chosen"] += 1
            assert not splits_a_block(choice.tile, block), (problem, choice.tile)

    def problem_of(num_cols: int, fused: dict) -> Problem:
        named = {"y": "float8_e5m2", "scaling": scaling, **fused}
        layout = Layout.of_new_arrays(num_cols)
        return Problem("forward", True, num_cols, layout=layout, **named)

    for fused in FUSED_WITH_SCALES:
        for num_cols in (1, 24, 32, 96, 127, 128, 160, 384, 640, 1000, 1024, 4096, 9216, 24576):
            for strategy in (None, "warp", "block", "cluster", "uncached"):
                look(problem_of(num_cols, fused), strategy)
    for num_cols in range(128, 32768, 416):  # ranges of a data file
        look(problem_of(num_cols, FUSED_WITH_SCALES[0]), None)
    for at, (strategy, tile) in enumerate(TILES_OF_CALLERS):
        for exact in (0, 1):
            num_cols = tile.cluster_size * tile.cols - tile.pack_size * (1 - exact)
            fused = FUSED_WITH_SCALES[at % len(FUSED_WITH_SCALES)]
            look(problem_of(num_cols, fused), strategy, replace(tile, exact=exact))
    assert at_once["chosen"] > 50 and at_once["of a caller"] > 30, at_once


def test_the_check_of_split_blocks_can_fail():
    for tile in (
        Tile(8, 96, 2, cluster_size=2, exact=1, path="registers"),
        Tile(2, 128, 4, exact=1, stages=2, path="ring"),
        Tile(1, 64, 4, path="registers"),
    ):
        assert splits_a_block(replace(tile, pack_size=1), 128)


def test_scales_of_blocks_in_a_ring():
    """No warp's part may end inside a block: 32 lanes of 8 or 2 are 256 or 64 columns."""
    ring = replace(RING, exact=1)
    assert scales_at_once(quantized("block"), ring, "block")
    assert scales_at_once(quantized("mx"), replace(ring, pack_size=2), "block")
    assert not scales_at_once(quantized("block"), replace(ring, pack_size=2), "block")
    assert not scales_at_once(quantized("mx"), replace(ring, exact=0), "block")


# Tiles of a width.


@pytest.mark.parametrize(
    ("num_cols", "pack_size", "threads", "cluster_size", "packs", "exact"),
    [
        (1024, 8, 128, 1, 1, 1),
        (1032, 8, 128, 1, 2, 0),
        (1016, 8, 128, 1, 1, 0),
        (1, 1, 32, 1, 1, 0),
        (8, 8, 32, 1, 1, 0),
        (2048, 8, 32, 2, 4, 1),
        # Slices are of 8 packs, 64 columns: 2112 columns give 1088 and 1024 to two blocks.
        (2112, 8, 32, 2, 5, 0),
        (2112, 8, 34, 2, 4, 0),
        (0, 8, 32, 1, 1, 0),
    ],
)
def test_shaped(num_cols, pack_size, threads, cluster_size, packs, exact):
    tile = shaped(forward(num_cols), pack_size, threads, cluster_size)
    assert tile == Tile(pack_size, threads, packs, cluster_size=cluster_size, exact=exact)
    assert tile.path == "registers"


def test_shaped_with_other_counts():
    tile = shaped(forward(1024), 8, 64, path="ring", stages=3, rows_per_block=2)
    assert tile == Tile(8, 64, 2, 2, exact=1, stages=3)
    assert tile.path == "ring"
