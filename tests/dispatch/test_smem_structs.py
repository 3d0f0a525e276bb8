"""model.py: shared memory as in the structs of cuda_src.

Nothing here needs a GPU. The sizes of the structs come from the C++ compiler.
"""

from __future__ import annotations

import shutil
import struct
from dataclasses import dataclass, replace

import numpy as np
import pytest
from plan_problems import QUANTIZED, RING, backward, forward

from cupynorm.dispatch.model import reduce_bytes, smem_bytes_of
from cupynorm.dispatch.problem import Problem, Tile
from cupynorm.dtypes import DTYPES
from cupynorm.gpu import on_cpu
from cupynorm.gpu.nvrtc import cuda_src


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
            parameters = f"RingParameters<LoadParameter<{cpp_of(name)}, false>, {tile.cpp}, true>"
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
    strategy = "uncached" if tile.path == "uncached" else strategy
    return Layouts(problem, tile, strategy, reduction(tile, DTYPES[problem.compute].cpp))


LONG_RING = Tile(8, 64, 3, stages=2, path="ring")
ROWS_RING = Tile(8, 32, 3, rows_per_block=3, stages=3, path="ring")
CLUSTER_RING = Tile(8, 64, 3, cluster_size=16, stages=4, path="ring")
LONE_RING = Tile(1, 64, 24, stages=2, path="ring")
PAIRS_RING = Tile(2, 64, 12, cluster_size=4, stages=3, path="ring")
LANES = Tile(1, 8, 16, 8, stages=2, bundle=12, path="bundle")
LONE_LANE = Tile(1, 1, 33, 64, stages=2, bundle=32, path="bundle")
WHOLE_WARP = Tile(1, 32, 16, 2, stages=3, bundle=3, path="bundle")
SMEM = Tile(8, 512, path="smem")
CLUSTER_SMEM = Tile(1, 512, cluster_size=4, path="smem")
REGISTERS = Tile(8, 96, 2, path="registers")
CLUSTER_REGISTERS = Tile(8, 96, 2, cluster_size=8, path="registers")

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
    "row that is read again": in_registers(
        backward(1 << 22, "float64"), Tile(2, 512, path="uncached")
    ),
    "row in the registers of a cluster": in_registers(backward(12288), CLUSTER_REGISTERS),
}


SIZES = """
#include "backward.cuh"
#include "ring_statistics.cuh"
#include "bundle.cuh"
#include "cluster_reduce.cuh"
#include "exchange.cuh"
#include "forward.cuh"
#include "ring.cuh"
#include "backward_ring_inputs.cuh"

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


@pytest.mark.slow
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
