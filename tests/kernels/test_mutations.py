"""Kernels on the CPU show bugs: a test fails for each kind of bug in a copy of the sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from cupynorm.check.cases import Case, random_problem
from cupynorm.check.kernels import CpuMachine, uses_welford
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES
from cupynorm.gpu import nvrtc, on_cpu
from cupynorm.gpu.launch import pack
from cupynorm.gpu.on_cpu import NoCompilerError, OnCpuError
from cupynorm.plan.devices import DEVICES
from cupynorm.plan.instances import Launch
from cupynorm.plan.problem import Tile

ROOT = Path(__file__).parents[2]
H200 = DEVICES["H200"]
# With few multiprocessors each block works on several rows, so errors between rows show.
SMALL = replace(
    H200, name="small", num_sms=2, clusters=tuple((size, 1) for size, _ in H200.clusters)
)
SEEDS = range(20)
_GUARD = 1 << 16  # bytes: more than all rows of a block that a wrong bound may add


class MutatedMachine(CpuMachine):
    """Runs the kernels of a folder. Guards around arrays catch writes to wrong addresses.

    apart: each array begins at another offset within 16 bytes.
    """

    def __init__(self, folder: Path, seed: int = 0, apart: bool = False) -> None:
        super().__init__(SMALL, seed)
        self.folder = folder
        self.apart = apart
        self.guarded = []

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, int]:
        storage = DTYPES[dtype].storage
        size = int(np.prod(shape)) * storage.itemsize
        around = np.full(size + 2 * _GUARD + 16, 0xFF, np.uint8)
        start = _GUARD + -(around.ctypes.data + _GUARD) % 16
        if self.apart:
            start += len(self.guarded) * storage.itemsize % 16
        self.guarded.append((around, start, start + size))
        array = around[start : start + size].view(storage).reshape(shape)
        return array, array.ctypes.data

    def put(self, array: np.ndarray) -> tuple[np.ndarray, int]:
        if array.dtype == np.int64:  # a seed
            return super().put(array)
        name = next(name for name, dtype in DTYPES.items() if dtype.storage == array.dtype)
        copy, pointer = self.empty(array.shape, name)
        copy[...] = array
        return copy, pointer

    def launch(self, kernel_launch: Launch, words: tuple) -> None:
        kernel = kernel_launch.kernel
        on_cpu.kernel(kernel.source, kernel.name_expression, folder=self.folder).launch(
            kernel_launch.grid_size,
            kernel_launch.block_size,
            pack(words),
            smem_bytes=kernel_launch.smem_bytes,
            cluster_size=kernel_launch.cluster_size,
            seed=self.seed,
        )

    def guards_are_whole(self) -> bool:
        return all(
            (around[:start] == 0xFF).all() and (around[end:] == 0xFF).all()
            for around, start, end in self.guarded
        )


def sees_a_bug(folder: Path, case: Case, center: float) -> bool:
    problem = random_problem(case)
    if center:
        # Values near a large mean, exact in float32, show a loss of digits.
        problem = replace(problem, x=np.float64(np.float32(problem.x + center)))
    welford = case.statistics == "welford" or uses_welford(case, SMALL)
    for seed in SEEDS:
        machine = MutatedMachine(folder, seed, apart=bool(case.tile and case.tile.bundle))
        try:
            results = run_kernels(problem, machine)
        except OnCpuError as error:
            assert "does not compile" not in str(error), error
            return True
        if (
            not CheckResult(judge_all(problem, results, rounded_mean=welford)).ok
            or not machine.guards_are_whole()
        ):
            return True
    return False


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Mutated kernels are compiled for one run of the tests: they stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def copy_of_sources(folder: Path) -> Path:
    # Without on_cpu, so that the scheduler is compiled once for all copies.
    shutil.copytree(nvrtc.cuda_src(), folder, ignore=shutil.ignore_patterns("on_cpu"))
    return folder


def mutate(folder: Path, file: str, old: str, new: str) -> None:
    text = (folder / file).read_text()
    assert old in text, f"{file} has no {old!r}: the mutation follows the source"
    (folder / file).write_text(text.replace(old, new))


# A margin of one of the two multiprocessors makes forward blocks work on several rows, too.
WARP = Case("layer_norm", 37, 40, "float32", strategy="warp")
ODD = Case("layer_norm", 5, 37, "float32", strategy="warp", tile=Tile(1, 16, 3, rows_per_block=4))
# Bundles of several parts and of one, with a lane for each row, and with idle lanes.
BUNDLE = Case(
    "layer_norm", 150, 127, "bfloat16", strategy="warp", tile=Tile(1, 8, 16, 8, stages=2, bundle=12)
)
BUNDLE_32 = Case(
    "layer_norm", 61, 95, "bfloat16", strategy="warp", tile=Tile(1, 32, 3, 2, stages=2, bundle=3)
)
BUNDLE_1 = Case(
    "layer_norm",
    150,
    33,
    "bfloat16",
    strategy="warp",
    tile=Tile(1, 1, 33, 64, exact=1, stages=2, bundle=32),
)
BUNDLE_FEW = Case(
    "layer_norm", 61, 29, "bfloat16", strategy="warp", tile=Tile(1, 32, 1, 2, stages=2, bundle=3)
)
BLOCK = Case(
    "layer_norm",
    5,
    1040,
    "float32",
    strategy="block",
    tile=Tile(4, 96, packs_per_thread=3),
    sm_margin=1,
)
SHARED = Case("layer_norm", 5, 264, "float32", strategy="block", tile=Tile(4, 96), sm_margin=1)
CLUSTER = Case("layer_norm", 5, 264, "float64", strategy="cluster")  # a ring takes no float64
# Rings whose last warp has few columns or none, and with weights in shared memory. A block or
# cluster works on 12 rows, so it uses each slot and each of four buffers three times.
RING = Case("layer_norm", 24, 4 * 470, "float32", strategy="block", tile=Tile(4, 96, 5, stages=3))
CLUSTER_RING = Case(
    "layer_norm",
    12,
    4 * 210,
    "float32",
    strategy="cluster",
    tile=Tile(4, 64, 1, cluster_size=4, stages=3),
)
STAGED = Case(
    "layer_norm",
    41,
    2 * 256,
    "bfloat16",
    strategy="block",
    tile=Tile(8, 32, 2, exact=1, blocks_per_sm=2, stages=1),
)
GROUP_RING = Case(
    "layer_norm",
    23,
    4 * 110,
    "float32",
    strategy="block",
    tile=Tile(4, 64, 2, rows_per_block=3, stages=2),
)
SHARED_CLUSTER = Case(
    "layer_norm", 5, 264, "float32", strategy="cluster", tile=Tile(4, 32, cluster_size=4)
)
UNCACHED = Case("layer_norm", 20, 2052, "float32", strategy="uncached", sm_margin=1)
SUM = Case(
    "layer_norm",
    5,
    37,
    "bfloat16",
    strategy="warp",
    residual=True,
    residual_dtype="float32",
    row_scale="float32",
    dropout_p=0.3,
    dsum=True,
)
TWO = Case("rms_norm", 5, 40, "bfloat16", strategy="warp", weight1="float32", bias1="bfloat16")
BY_Y = Case("layer_norm", 5, 40, "float32", strategy="warp", memory_efficient=True)
AGAIN = Case("layer_norm", 5, 37, "float32", strategy="warp", recompute=True)
AGAIN_IN_RING = Case(
    "layer_norm",
    24,
    4 * 470,
    "float32",
    strategy="block",
    tile=Tile(4, 96, 5, stages=3),
    recompute=True,
)


@dataclass(frozen=True)
class Mutation:
    file: str
    old: str
    new: str
    case: Case
    center: float = 0.0
    backward: Tile | None = None


MUTATIONS = {
    "block reduction without its barrier": Mutation(
        "reduce.cuh", "__syncthreads();\n      constexpr int width", "constexpr int width", BLOCK
    ),
    "block reduction with one buffer": Mutation(
        "reduce.cuh",
        "buffers + turn * max_parts * num_warps;\n      turn ^= 1;",
        "buffers;",
        UNCACHED,
    ),
    "block reduction that leaves the last warp out": Mutation(
        "reduce.cuh", "source < num_warps ?", "source < num_warps - 1 ?", BLOCK
    ),
    "cluster reduction without its barrier": Mutation(
        "cluster_reduce.cuh", "cluster_sync();\n    const int source", "const int source", CLUSTER
    ),
    "cluster reduction with one buffer": Mutation(
        "cluster_reduce.cuh",
        "buffers + turn * Block::max_parts * cluster_size;\n    turn ^= 1;",
        "buffers;",
        CLUSTER,
    ),
    "shuffle that names too few lanes": Mutation(
        "reduce.cuh", "__shfl_xor_sync(0xffffffffu", "__shfl_xor_sync(0x7fffffffu", WARP
    ),
    "packs of a thread that are added up with some left out": Mutation(
        "sums.cuh",
        "total_of<first + step, 2 * step, count / 2>",
        "total_of<first, 2 * step, count / 2>",
        Case("rms_norm", 9, 64, "float32", strategy="warp", tile=Tile(4, 4, 4, 8, exact=1)),
    ),
    "shuffle over half of the lanes": Mutation(
        "reduce.cuh",
        "distance = threads / 2; distance > 0",
        "distance = threads / 4; distance > 0",
        WARP,
    ),
    "cluster forward in registers that does not wait for its peers to run": Mutation(
        "forward_cluster.cu", "if (!peers_run) cluster_sync();", "", CLUSTER
    ),
    "cluster backward in registers that does not wait for its peers to run": Mutation(
        "backward_cluster.cu",
        "cluster_sync();  // a block may write to its peers once they run",
        "",
        CLUSTER,
    ),
    "cluster in registers that begins at the first column": Mutation(
        "register_row.cuh",
        "return cols.first_col + register_col<tile>(0)",
        "return register_col<tile>(0)",
        CLUSTER,
    ),
    "pack beyond the row that counts": Mutation(
        "statistics.cuh", "in_row ? squares : Compute(0)", "squares", ODD
    ),
    "pack beyond the row that is written": Mutation(
        "store.cuh", "if (present) store_pack", "store_pack", ODD
    ),
    "gradient of a pack beyond the row that counts": Mutation(
        "register_gradient.cuh",
        "present && in_row(pack);\n      Compute scales",
        "present;\n      Compute scales",
        ODD,
    ),
    "row of shared memory that begins a pack late": Mutation(
        "smem_row.cuh", "f(col, values);", "f(col + tile.pack_size, values);", SHARED
    ),
    "cluster backward in shared memory that does not wait for its peers to run": Mutation(
        "backward_smem.cuh",
        "cluster_sync();  // a block may write to its peers once they run",
        "",
        SHARED_CLUSTER,
    ),
    "one column too many": Mutation(
        "register_row.cuh",
        "register_col<tile>(pack) < num_cols",
        "register_col<tile>(pack) <= num_cols",
        ODD,
    ),
    "one column too few": Mutation(
        "register_row.cuh",
        "register_col<tile>(pack) < num_cols",
        "register_col<tile>(pack) < num_cols - 1",
        ODD,
    ),
    "row offset in columns": Mutation(
        "store.cuh", "y + row * y_stride + col", "y + row * (y_stride - 1) + col", ODD
    ),
    "correction of the mean dropped": Mutation(
        "mean_rstd.cuh",
        "(value - first) * rstd + shift",
        "(value - first) * rstd",
        BLOCK,
        center=1e4,
    ),
    "variance from the mean of squares": Mutation(
        "statistics.cuh",
        "squares_of(centered_values)",
        "squares_of(values) - pack_size * first * first",
        BLOCK,
        center=1e3,
    ),
    "eps left out": Mutation(
        "statistics.cuh", "+ static_cast<Compute>(eps)", "", replace(BLOCK, eps=1e-3)
    ),
    "weight applied twice": Mutation(
        "store.cuh",
        "y_values[at] * weights[at] + biases[at]",
        "y_values[at] * weights[at] * weights[at] + biases[at]",
        WARP,
    ),
    "bias of the neighbouring column": Mutation(
        "parameter.cuh",
        "load_pack<pack_size>(parameter + col)",
        "load_pack<pack_size>(parameter + (col ^ pack_size))",
        WARP,
    ),
    "dx without the mean of wdy": Mutation(
        "backward.cuh", "((wdy - mean_wdy) - x_hat", "(wdy - x_hat", WARP
    ),
    "parameter sums without their barrier": Mutation(
        "backward_parameters.cu", "  __syncthreads();\n", "", WARP
    ),
    "parameter sums without the last warp": Mutation(
        "backward_parameters.cu",
        "warp < num_warps; ++warp",
        "warp < num_warps - 1; ++warp",
        UNCACHED,
    ),
    "sums of the warps of a block without their barrier": Mutation(
        "register_gradient.cuh",
        "        __syncthreads();\n        for_each_sum",
        "        for_each_sum",
        WARP,
    ),
    "bundle whose rows are not waited for": Mutation(
        "bundle.cuh", "bulk_wait(barriers + slot, round);", "", BUNDLE
    ),
    "sum that is not left in a bundle": Mutation(
        "forward_bundle.cuh",
        "values.store_own(sums + own, present);",
        "{}",
        replace(BUNDLE, residual=True),
    ),
    "residual that is read where x is": Mutation(
        "forward_bundle.cuh",
        "slot + at * all_streams[at].slot_bytes()",
        "slot",
        replace(BUNDLE, residual=True),
    ),
    "bundle that is waited for with one parity": Mutation(
        "bundle.cuh", "slot, round)", "slot, 0)", BUNDLE
    ),
    "bundle that is fetched before its lanes have written": Mutation(
        "bundle.cuh", "the slot is free.\n      __syncwarp();", "the slot is free.", BUNDLE
    ),
    "bundle whose last rows are not fetched": Mutation(
        "bundle.cuh", "(part_rows), left)", "(part_rows), left - 1)", BUNDLE_32
    ),
    "bundle whose parts are all the first": Mutation(
        "bundle_stream.cuh", "threadIdx.x) % 32 / lanes;", "threadIdx.x) * 0;", BUNDLE
    ),
    "bundle whose ends are not written": Mutation(
        "result_image.cuh", "if (lane < head) to[lane] = image[lane];", "", BUNDLE
    ),
    "bundle whose results take the place of what is still to read": Mutation(
        "forward_bundle.cuh",
        "__syncwarp();  // all lanes have read what the results overwrite",
        "",
        BUNDLE_1,
    ),
    "bundle whose results take the place of what is still to read, backward": Mutation(
        "register_gradient.cuh",
        "__syncwarp();  // all lanes have read what the results overwrite",
        "",
        BUNDLE_1,
    ),
    "bundle whose sums take the place of rows that others still read": Mutation(
        "backward_bundle.cuh", "__syncthreads();  // the sums overwrite the images", "", BUNDLE_32
    ),
    "bundle whose idle lanes read beyond their row": Mutation(
        "register_row.cuh",
        "tile.packs_per_thread > 1 ? 0 : -register_col<tile>(0)",
        "0",
        BUNDLE_FEW,
    ),
    "a mask of 9 rounds": Mutation("dropout.cuh", "round < 10", "round < 9", SUM),
    "a mask that is the same in every row": Mutation("dropout.cuh", "/ 4, row)", "/ 4, 0)", SUM),
    "a mask whose words change places": Mutation(
        "dropout.cuh", "at & 1 ? odd : even", "at & 1 ? even : odd", SUM
    ),
    "a residual that is scaled": Mutation(
        "sum_load.cuh",
        "    factor.multiply(row, col, values, present);\n",
        "",
        replace(SUM, dropout_p=0.0),
    ),
    "a gradient that is not scaled": Mutation(
        "backward_stores.cuh", "    factor.multiply(row, col, split, present);\n", "", SUM
    ),
    "a second output with the first's weights": Mutation(
        "two_stores.cuh",
        "second.store(row, col, values, kept.second",
        "first.store(row, col, values, kept.first",
        TWO,
    ),
    "y again of the first columns' biases": Mutation(
        "register_gradient.cuh",
        "load(in_row(pack) ? col(pack) : cols.first_col, biases)",
        "load(cols.first_col, biases)",
        AGAIN,
    ),
    "y again beyond the row": Mutation(
        "register_gradient.cuh", "scales, biases, counts", "scales, biases, true", AGAIN
    ),
    "y again of another row": Mutation(
        "recomputing_store.cuh", "store_y.store(row, col", "store_y.store(row ^ 1, col", AGAIN
    ),
    "y again with weights for biases": Mutation(
        "backward_ring.cuh",
        "biases.unpack_to(pack, shifts)",
        "weights.unpack_to(pack, shifts)",
        AGAIN_IN_RING,
    ),
    "biases where the weights are": Mutation(
        "backward_ring.cuh",
        "parameters + decltype(weights)::smem_bytes",
        "parameters",
        AGAIN_IN_RING,
    ),
    "x_hat with the bias in it": Mutation(
        "x_hat_load.cuh",
        "(values[at] - biases[at]) / divisor",
        "values[at] / divisor",
        BY_Y,
    ),
    "x_hat that is normalised again": Mutation(
        "backward.cuh", "if constexpr (normalized) return x;", "", BY_Y
    ),
    "a staged row that is not waited for": Mutation(
        "staged_row.cuh", "bulk_wait(barrier, turn++);", "turn++;", STAGED
    ),
    "a staged row that is waited for with one parity": Mutation(
        "staged_row.cuh", "bulk_wait(barrier, turn++);", "bulk_wait(barrier, 0);", STAGED
    ),
    "a staged row that another block has": Mutation(
        "forward_block.cu",
        "staged.fetch(problem.load, row + turns.step,",
        "staged.fetch(problem.load, row + 1,",
        STAGED,
    ),
    "a last row that first blocks leave out": Mutation(
        "turns.cuh", "min(shared_out, num_rows)", "min(shared_out - 1, num_rows)", STAGED
    ),
    "later blocks that begin a row late": Mutation(
        "turns.cuh", "(is_first ? 0 : shared_out)", "(is_first ? 0 : shared_out + 1)", STAGED
    ),
    "later blocks that leave rows out": Mutation(
        "turns.cuh", "num_blocks - num_first)", "num_blocks)", STAGED
    ),
    "a cluster that leaves its last columns out": Mutation(
        "slice.cuh",
        "whole.first_col + last * step, whole.last_col)",
        "whole.first_col + last * step, whole.last_col - 2)",
        CLUSTER,
    ),
}


# Barriers, exchanged values and the columns of a warp. Fences and the order of release and acquire
# have no mutation, because on the CPU every thread sees a store at once.
def ring_mutations() -> dict[str, Mutation]:
    both = {"block": RING, "cluster": CLUSTER_RING}
    wait = "bulk_wait(barriers + turn % num_buffers, turn / num_buffers);"
    expect = "if (expects) expect(turn % num_buffers);"
    arrive = "bulk_arrive(barriers + turn % num_buffers);"
    free = "// All lanes have written, so all have read: the slot is free.\n    __syncwarp();"
    in_both = {
        "ring whose sums are not waited for": ("exchange.cuh", wait, ""),
        "ring whose sums are waited for with one parity": (
            "exchange.cuh",
            wait,
            wait.replace("turn / num_buffers)", "0)"),
        ),
        "ring with three buffers for four turns of sums": (
            "exchange.cuh",
            "num_buffers = 4;",
            "num_buffers = 3;",
        ),
        "ring whose broadcasts are not waited for": (
            "broadcast.cuh",
            "bulk_wait(barriers + buffer, turn / 2);",
            "",
        ),
        "ring whose broadcasts are waited for with one parity": (
            "broadcast.cuh",
            "bulk_wait(barriers + buffer, turn / 2);",
            "bulk_wait(barriers + buffer, 0);",
        ),
        "ring in which no warp's turn it is to find statistics": (
            "forward_ring.cuh",
            "turns_until_own = Shape::num_warps - 1;",
            "turns_until_own = Shape::num_warps;",
        ),
        "ring whose halves of a warp send each other's values": (
            "forward_ring.cuh",
            "? squares : mean",
            "? mean : squares",
        ),
        "ring in which a part of a row counts as a whole one": (
            "forward_ring.cuh",
            "part_of(Sums::source(index)).size()",
            "Shape::part_cols",
        ),
        "ring whose rows are not waited for": (
            "ring.cuh",
            "if (num_cols > 0) bulk_wait(barriers + at.slot, at.round);",
            "",
        ),
        "ring whose rows are waited for with one parity": (
            "ring.cuh",
            "barriers + at.slot, at.round",
            "barriers + at.slot, 0",
        ),
        "ring that never counts its rounds": ("ring.cuh", "++round;", ""),
        "ring copied a pack short": (
            "ring_shape.cuh",
            "if constexpr (aligned) return bytes;",
            "if constexpr (aligned) return bytes - 16;",
        ),
        "ring whose warps all take the first part": (
            "ring_shape.cuh",
            "source / num_warps), source % num_warps",
            "source / num_warps), 0",
        ),
        "ring that a warp fills before its lanes have read": ("forward_ring.cuh", free, ""),
        "ring that a warp fills before its lanes have read, backward": (
            "backward_ring.cuh",
            free,
            "",
        ),
        "ring that fills the slot of the next row": (
            "forward_ring.cuh",
            "fetch(at.slot);",
            "fetch(ahead.slot);",
        ),
        "ring that fills the slot of the next row, backward": (
            "backward_ring.cuh",
            "fetch(at.slot);",
            "fetch(ahead.slot);",
        ),
        "ring that goes on filling after the last row": (
            "forward_ring.cuh",
            "turn + tile.stages < turns.count",
            "turn + tile.stages <= turns.count",
        ),
        "ring that stops filling a row early": (
            "backward_ring.cuh",
            "turn + tile.stages < turns.count",
            "turn + tile.stages + 1 < turns.count",
        ),
        "ring with garbage beyond the row": (
            "ring_row.cuh",
            "value = in_part(pack) ? value : Compute(0);",
            ";",
        ),
        "ring with garbage beyond the row, backward": (
            "backward_ring.cuh",
            "present = Shape::in_part(pack, cols);",
            "present = true;",
        ),
        "ring whose barriers are used before they are made": (
            "forward_ring.cuh",
            "ring_sync<tile>();",
            "",
        ),
        "ring whose barriers are used before they are made, backward": (
            "backward_ring.cuh",
            "ring_sync<tile>();",
            "",
        ),
        "ring that takes dy for x": (
            "backward_ring.cuh",
            "dy.in(start + RingOffset<tile, X>::part_bytes, is_ahead)",
            "dy.in(start, is_ahead)",
        ),
        "ring that adds x to x": (
            "forward_ring.cuh",
            "+ stream * RingOffset<tile, Held>::part_bytes",
            "",
        ),
        "ring that returns no sum": (
            "forward_ring.cuh",
            "problem.load.keep(row,",
            "problem.load.keep(0,",
        ),
        "ring that takes a row's statistics for the next one's": (
            "backward_ring.cuh",
            "add(turn + 1, next)",
            "add(turn + 1, gradient)",
        ),
    }
    made = {
        f"{name} ({kind})": Mutation(*change, case)
        for name, change in in_both.items()
        for kind, case in both.items()
    }
    for kind, case in both.items():
        for name in ("ring that adds x to x", "ring that returns no sum"):
            made[f"{name} ({kind})"] = replace(
                made[f"{name} ({kind})"], case=replace(case, residual=True)
            )
    return made | {
        "ring of a block that waits for a lane of each warp": Mutation(
            "exchange.cuh",
            "buffer, tile.threads_per_row +",
            "buffer, num_warps +",
            RING,
        ),
        "ring of several rows a block that exchange sums in one place": Mutation(
            "exchange.cuh", "smem + RingShape<tile>::group() * group_bytes", "smem", GROUP_RING
        ),
        "ring of several rows a block that add up their sums at once": Mutation(
            "backward_ring.cuh",
            "    __syncthreads();\n    if (Shape::group() + kept",
            "    if (Shape::group() + kept",
            GROUP_RING,
        ),
        "ring of a block in which nobody arrives": Mutation("exchange.cuh", arrive, ";", RING),
        "ring whose warps share their weights": Mutation(
            "ring_parameters.cuh",
            "(smem) + Shape::thread())",
            "(smem) + Shape::thread() % 32)",
            RING,
        ),
        "ring of a cluster that expects the sums of a turn twice": Mutation(
            "exchange.cuh", wait + "\n", expect + wait + "\n", CLUSTER_RING
        ),
        "ring of a cluster that never expects sums again": Mutation(
            "exchange.cuh", expect, "", CLUSTER_RING
        ),
        "ring of a cluster that expects half of the sums": Mutation(
            "exchange.cuh",
            "num_values * num_sources * static_cast",
            "num_sources * static_cast",
            CLUSTER_RING,
        ),
        "ring of a cluster whose blocks send to one place": Mutation(
            "exchange.cuh",
            "at + cluster_rank() * num_warps",
            "at",
            CLUSTER_RING,
        ),
        "ring of a cluster that only synchronises its blocks": Mutation(
            "ring.cuh", "    cluster_sync();", "    __syncthreads();", CLUSTER_RING
        ),
        "ring of one row that adds the next one up": Mutation(
            "backward_ring.cuh",
            "      add(turn, gradient);",
            "      add(turn, next);",
            RING,
            backward=replace(RING.tile, stages=1),
        ),
    }


MUTATIONS |= ring_mutations()


@pytest.fixture
def same_tile_backward(tile_of_backward):
    """Backward gets its own tile, or that of forward if the strategy allows it."""

    def give(case: Case, backward: Tile | None) -> list:
        if (
            backward is None
            and case.tile
            and (case.tile.packs_per_thread or case.strategy == "cluster")
        ):
            backward = case.tile
        return tile_of_backward(backward)

    return give


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_seen(name, tmp_path, same_tile_backward):
    mutation = MUTATIONS[name]
    folder = copy_of_sources(tmp_path / "cuda_src")
    mutate(folder, mutation.file, mutation.old, mutation.new)
    same_tile_backward(mutation.case, mutation.backward)
    assert sees_a_bug(folder, mutation.case, mutation.center)


@pytest.mark.slow
def test_unchanged_sources_pass(tmp_path, same_tile_backward):
    folder = copy_of_sources(tmp_path / "cuda_src")
    for case, backward, center in {
        (each.case, each.backward, each.center) for each in MUTATIONS.values()
    }:
        same_tile_backward(case, backward)
        assert not sees_a_bug(folder, case, center), case


# Sanitizers.


SANITIZED = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from cupynorm.gpu import on_cpu
from cupynorm.plan.problem import Tile
from cupynorm.check.cases import Case, random_problem
from cupynorm.check.kernels import CpuMachine, uses_welford
from cupynorm.check.run import run_kernels
from cupynorm.check.results import CheckResult, judge_all

sanitize, folder, cases = ("address", "undefined"), {{folder!r}}, {{cases!r}}
if folder:
    kernel = on_cpu.kernel
    own = dict(folder=Path(folder))
    on_cpu.kernel = lambda *arguments, **options: kernel(*arguments, **(options | own))
for case in cases:
    problem, machine = random_problem(case), CpuMachine(sanitize=sanitize)
    welford = uses_welford(case, machine.device)
    findings = judge_all(problem, run_kernels(problem, machine), rounded_mean=welford)
    assert CheckResult(findings).ok, CheckResult(findings)
print(len(cases), "cases pass")
"""


def run_sanitized(cases: list[Case], folder: str = "") -> subprocess.CompletedProcess:
    try:
        environment = on_cpu.sanitized_environment()
    except NoCompilerError as error:
        pytest.skip(str(error))
    script = SANITIZED.format(folder=folder, cases=cases)
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )


# Every kernel and path, in packs and in single elements.
SMALL_CASES = [
    Case("layer_norm", 5, 40, "bfloat16", strategy="warp"),
    Case("layer_norm", 5, 37, "float32", strategy="warp", residual=True),
    Case("rms_norm", 3, 264, "float16", strategy="block"),
    Case("layer_norm", 3, 264, "float16", strategy="block", tile=Tile(8, 64)),
    Case("layer_norm", 3, 263, "float64", strategy="block", tile=Tile(1, 64)),
    Case("layer_norm", 3, 264, "bfloat16", strategy="cluster"),
    Case("layer_norm", 3, 264, "bfloat16", strategy="cluster", tile=Tile(8, 64, cluster_size=4)),
    Case(
        "layer_norm",
        3,
        264,
        "float16",
        strategy="cluster",
        tile=Tile(8, 32, packs_per_thread=1, cluster_size=8),
    ),
    Case("rms_norm", 3, 129, "float32", strategy="cluster"),
    # Wide enough for a ring in backward, too.
    Case(
        "layer_norm",
        3,
        2056,
        "bfloat16",
        weight="float32",
        strategy="block",
        tile=Tile(8, 96, packs_per_thread=3, stages=2),
    ),
    Case(
        "rms_norm",
        3,
        4100,
        "float32",
        strategy="cluster",
        tile=Tile(4, 64, packs_per_thread=2, cluster_size=16, stages=2),
    ),
    Case("layer_norm", 3, 264, "float32", strategy="uncached"),
    # Fused options, in packs and single elements.
    SUM,
    replace(SUM, num_cols=264, strategy="cluster", weight1="float32"),
    replace(SUM, num_cols=264, strategy="uncached", memory_efficient=True),
    TWO,
    BY_Y,
]


@pytest.mark.slow
def test_every_kernel_passes_the_sanitizers():
    result = run_sanitized(SMALL_CASES)
    assert (result.returncode, result.stdout) == (0, f"{len(SMALL_CASES)} cases pass\n"), (
        result.stderr[-4000:]
    )


@pytest.mark.slow
def test_address_sanitizer_sees_a_read_past_the_last_row(tmp_path):
    # The value read is not used: only the sanitizer can see it.
    folder = copy_of_sources(tmp_path / "cuda_src")
    mutate(
        folder,
        "register_row.cuh",
        "return register_pack_in_row<tile>(pack, cols.size()) ? col_of(pack) : cols.first_col;",
        "return col_of(pack);",
    )
    assert not sees_a_bug(folder, ODD, 0.0)
    result = run_sanitized([ODD], str(folder))
    assert result.returncode != 0
    assert (
        "AddressSanitizer: heap-buffer-overflow" in result.stderr
        and "forward_warp" in result.stderr
    )
