"""Proof that running the kernels on the CPU sees bugs: each known kind of bug, put into a copy of the sources, shows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from cupynorm import nvrtc, on_cpu
from cupynorm.dispatch import DEVICES, Device, Launch, Tile
from cupynorm.dtypes import DTYPES
from cupynorm.gradient_check import Case, CheckResult, CpuMachine, judge_all, random_problem, run_kernels, uses_welford
from cupynorm.launch import pack
from cupynorm.on_cpu import NoCompilerError, OnCpuError

ROOT = Path(__file__).parents[1]
H200 = DEVICES["H200"]
# Few multiprocessors: blocks and clusters take several rows each, so that what is missing between rows shows.
SMALL = replace(H200, name="small", num_sms=2, clusters=tuple((size, 1) for size, _ in H200.clusters))
# No row fits its registers, so that clusters keep theirs in shared memory, forward and backward.
NO_REGISTERS = replace(SMALL, name="no registers", registers_per_sm=0)
SEEDS = range(20)
_GUARD = 1 << 16  # bytes: more than all rows of a block that a wrong bound may add


class MutatedMachine(CpuMachine):
    """Runs the kernels of a folder of sources. A wrong index must not hurt this process: memory around arrays is watched."""

    def __init__(self, folder: Path, seed: int = 0, device: Device = SMALL) -> None:
        super().__init__(device, seed)
        self.folder = folder
        self.guarded = []

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, int]:
        storage = DTYPES[dtype].storage
        size = int(np.prod(shape)) * storage.itemsize
        around = np.full(size + 2 * _GUARD + 16, 0xFF, np.uint8)
        start = _GUARD + -(around.ctypes.data + _GUARD) % 16
        self.guarded.append((around, start, start + size))
        array = around[start : start + size].view(storage).reshape(shape)
        return array, array.ctypes.data

    def put(self, array: np.ndarray) -> tuple[np.ndarray, int]:
        name = next(name for name, dtype in DTYPES.items() if dtype.storage == array.dtype)
        copy, pointer = self.empty(array.shape, name)
        copy[...] = array
        return copy, pointer

    def launch(self, kernel_launch: Launch, words: tuple) -> None:
        kernel = kernel_launch.kernel
        on_cpu.kernel(kernel.source, kernel.name_expression, folder=self.folder).launch(
            kernel_launch.grid_size, kernel_launch.block_size, pack(words), smem_bytes=kernel_launch.smem_bytes,
            cluster_size=kernel_launch.cluster_size, seed=self.seed,
        )  # fmt: skip

    def guards_are_whole(self) -> bool:
        return all((around[:start] == 0xFF).all() and (around[end:] == 0xFF).all() for around, start, end in self.guarded)


def sees_a_bug(folder: Path, case: Case, center: float, device: Device = SMALL) -> bool:
    problem = random_problem(case)
    if center:
        # Values about a large mean, exact in float32: what is computed carelessly loses digits here.
        problem = replace(problem, x=np.float64(np.float32(problem.x + center)))
    welford = case.statistics == "welford" or uses_welford(case, device)
    for seed in SEEDS:
        machine = MutatedMachine(folder, seed, device)
        try:
            results = run_kernels(problem, machine)
        except OnCpuError:
            return True
        if not CheckResult(judge_all(problem, results, rounded_mean=welford)).ok or not machine.guards_are_whole():
            return True
    return False


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Mutated kernels are compiled for one run of the tests: they stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def copy_of_sources(folder: Path) -> Path:
    # The headers that stand in for CUDA stay where they are: the scheduler is then compiled once for all copies.
    shutil.copytree(nvrtc.cuda_src(), folder, ignore=shutil.ignore_patterns("on_cpu"))
    return folder


def mutate(folder: Path, file: str, old: str, new: str) -> None:
    text = (folder / file).read_text()
    assert old in text, f"{file} has no {old!r}: the mutation follows the source"
    (folder / file).write_text(text.replace(old, new))


# A margin of one of the two multiprocessors: a forward block, too, goes from row to row.
WARP = Case("layer_norm", 37, 40, "float32", strategy="warp")
ODD = Case("layer_norm", 5, 37, "float32", strategy="warp")
BLOCK = Case("layer_norm", 5, 1040, "float32", strategy="block", tile=Tile(4, 96, packs_per_thread=3), sm_margin=1)
SHARED = Case("layer_norm", 5, 264, "float32", strategy="block", tile=Tile(4, 96, bulk=1), sm_margin=1)
CLUSTER = Case("layer_norm", 5, 264, "float32", strategy="cluster")
# 129 packs over 4 blocks: slices of 33, and a last one of 30, in which two of 32 threads have not even a first pack.
UNEVEN = Case("layer_norm", 5, 516, "float32", strategy="cluster", tile=Tile(4, 32, packs_per_thread=2, cluster_size=4))
UNCACHED = Case("layer_norm", 20, 2052, "float32", strategy="uncached", sm_margin=1)


@dataclass(frozen=True)
class Mutation:
    file: str
    old: str
    new: str
    case: Case
    center: float = 0.0
    device: Device = SMALL


MUTATIONS = {
    "block reduction without its barrier": Mutation(
        "reduce.cuh", "__syncthreads();\n      constexpr int width", "constexpr int width", BLOCK
    ),
    "block reduction with one buffer": Mutation(
        "reduce.cuh", "buffers + turn * max_parts * num_warps;\n      turn ^= 1;", "buffers;", UNCACHED
    ),
    "block reduction that leaves the last warp out": Mutation(
        "reduce.cuh", "source < num_warps ?", "source < num_warps - 1 ?", BLOCK
    ),
    "cluster reduction without its barrier": Mutation(
        "reduce.cuh", "cluster_sync();\n    const int source", "const int source", CLUSTER
    ),
    "cluster reduction with one buffer": Mutation(
        "reduce.cuh", "buffers + turn * Block::max_parts * cluster_size;\n    turn ^= 1;", "buffers;", CLUSTER
    ),
    "shuffle that names too few lanes": Mutation(
        "reduce.cuh", "__shfl_xor_sync(0xffffffffu", "__shfl_xor_sync(0x7fffffffu", WARP
    ),
    "shuffle over half of the lanes": Mutation(
        "reduce.cuh", "distance < threads; distance *= 2", "distance < threads / 2; distance *= 2", WARP
    ),
    "cluster forward without a barrier between rows": Mutation(
        "forward_cluster.cu", "if constexpr (tile.bulk) bulk_reuse();\n      __syncthreads();", "", CLUSTER, device=NO_REGISTERS
    ),
    "cluster backward without a barrier between rows": Mutation(
        "backward_cluster.cu", "if constexpr (tile.bulk) bulk_reuse();\n      __syncthreads();", "", CLUSTER, device=NO_REGISTERS
    ),
    "cluster forward in registers that does not wait for its peers to run": Mutation(
        "forward_cluster.cu", "if (!peers_run) cluster_sync();", "", CLUSTER
    ),
    "cluster backward in registers that does not wait for its peers to run": Mutation(
        "backward_cluster.cu", "cluster_sync();  // peers run", "", CLUSTER
    ),
    "cluster in registers with slices taken for even": Mutation(
        "row.cuh", "tile.cluster_size == 1 && pack <", "pack <", UNEVEN
    ),
    "cluster in registers that begins at the first column": Mutation(
        "row.cuh", "(row, cols.first_col + register_col<tile>(pack))", "(row, register_col<tile>(pack))", CLUSTER
    ),
    "block forward without a barrier between rows of shared memory": Mutation(
        "forward_block.cu", "if constexpr (tile.bulk) bulk_reuse();\n      __syncthreads();", "", SHARED
    ),
    "bulk copy used before it has landed": Mutation(
        "row.cuh", "if (first_col < last_col) bulk_wait(barrier, phase++);", "", SHARED
    ),
    "bulk copy waited for with one parity": Mutation(
        "bulk.cuh", "mbarrier_wait(barrier, phase & 1)", "mbarrier_wait(barrier, 0)", SHARED
    ),
    "bulk copy one pack short": Mutation(
        "row.cuh", "(last - first) * static_cast", "(last - first - 4) * static_cast", SHARED
    ),
    "one column too many": Mutation("row.cuh", "register_col<tile>(pack) < num_cols", "register_col<tile>(pack) <= num_cols", ODD),
    "one column too few": Mutation("row.cuh", "register_col<tile>(pack) < num_cols", "register_col<tile>(pack) < num_cols - 1", ODD),
    "row offset in columns": Mutation("load_store.cuh", "y + row * y_stride + col", "y + row * (y_stride - 1) + col", ODD),
    "correction of the mean dropped": Mutation(
        "statistics.cuh", "(value - mean) * rstd + shift", "(value - mean) * rstd", BLOCK, center=1e4
    ),
    "variance from the mean of squares": Mutation(
        "statistics.cuh", "squares_of(centered_values)",
        "squares_of(values) - pack_size * first * first", BLOCK, center=1e3,
    ),
    "eps left out": Mutation(
        "statistics.cuh", "+ static_cast<Compute>(eps)", "", replace(BLOCK, eps=1e-3)
    ),
    "weight applied twice": Mutation(
        "load_store.cuh", "values[at] * weights[at] + biases[at]", "values[at] * weights[at] * weights[at] + biases[at]", WARP
    ),
    "bias of the neighbouring column": Mutation(
        "load_store.cuh", "unpack_parameter<zero_centered>(load_pack<pack_size>(parameter + col), values);",
        "unpack_parameter<zero_centered>(load_pack<pack_size>(parameter + (col ^ pack_size)), values);", WARP,
    ),
    "dx without the mean of wdy": Mutation("backward.cuh", "((wdy - mean_wdy) - x_hat", "(wdy - x_hat", WARP),
    "parameter sums without their barrier": Mutation("backward_parameters.cu", "  __syncthreads();\n", "", WARP),
    "parameter sums without the last group": Mutation(
        "backward_parameters.cu", "other < tile.rows_per_block", "other < tile.rows_per_block - 1", UNCACHED
    ),
    "a cluster that leaves its last columns out": Mutation(
        "row.cuh", "min((rank + 1) * slice_cols, num_cols)", "min((rank + 1) * slice_cols, num_cols - 4)", CLUSTER
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_seen(name, tmp_path):
    mutation = MUTATIONS[name]
    folder = copy_of_sources(tmp_path / "cuda_src")
    mutate(folder, mutation.file, mutation.old, mutation.new)
    assert sees_a_bug(folder, mutation.case, mutation.center, mutation.device)


def test_sources_as_they_are_pass(tmp_path):
    folder = copy_of_sources(tmp_path / "cuda_src")
    for case, center, device in {(mutation.case, mutation.center, mutation.device) for mutation in MUTATIONS.values()}:
        assert not sees_a_bug(folder, case, center, device), case


# -- sanitizers ------------------------------------------------------------------------------------------


SANITIZED = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from cupynorm import gradient_check, on_cpu
from cupynorm.dispatch import Tile
from cupynorm.gradient_check import Case, CheckResult, CpuMachine, judge_all, random_problem, run_kernels, uses_welford

sanitize, folder, cases = ("address", "undefined"), {{folder!r}}, {{cases!r}}
if folder:
    kernel = on_cpu.kernel
    on_cpu.kernel = lambda *arguments, **options: kernel(*arguments, **options, folder=Path(folder))
for case in cases:
    problem, machine = random_problem(case), CpuMachine(sanitize=sanitize)
    findings = judge_all(problem, run_kernels(problem, machine), rounded_mean=uses_welford(case, machine.device))
    assert CheckResult(findings).ok, CheckResult(findings)
print(len(cases), "cases pass")
"""


def run_sanitized(cases: list[Case], folder: str = "") -> subprocess.CompletedProcess:
    try:
        environment = on_cpu.sanitized_environment()
    except NoCompilerError as error:
        pytest.skip(str(error))
    script = SANITIZED.format(folder=folder, cases=cases)
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)


# Every kernel, rows in registers and in shared memory, whole packs and single elements.
SMALL_CASES = [
    Case("layer_norm", 5, 40, "bfloat16", strategy="warp"),
    Case("layer_norm", 5, 37, "float32", strategy="warp", residual=True),
    Case("rms_norm", 3, 264, "float16", strategy="block"),
    Case("layer_norm", 3, 264, "float16", strategy="block", tile=Tile(8, 64, bulk=1)),
    Case("layer_norm", 3, 263, "float64", strategy="block", tile=Tile(1, 64)),
    Case("layer_norm", 3, 264, "bfloat16", strategy="cluster"),
    Case("layer_norm", 3, 264, "bfloat16", strategy="cluster", tile=Tile(8, 64, cluster_size=4, bulk=1)),
    Case("layer_norm", 3, 264, "float16", strategy="cluster", tile=Tile(8, 32, packs_per_thread=1, cluster_size=8)),
    Case("rms_norm", 3, 129, "float32", strategy="cluster"),
    Case("layer_norm", 3, 264, "float32", strategy="uncached"),
]


def test_every_kernel_passes_the_sanitizers():
    result = run_sanitized(SMALL_CASES)
    assert (result.returncode, result.stdout) == (0, f"{len(SMALL_CASES)} cases pass\n"), result.stderr[-4000:]


def test_address_sanitizer_sees_a_read_past_the_last_row(tmp_path):
    # The value read is not used: only the sanitizer can see it.
    folder = copy_of_sources(tmp_path / "cuda_src")
    condition = "if (register_pack_in_row<tile>(pack, cols.size())) {\n        packs[pack] ="
    mutate(folder, "row.cuh", condition, "{\n        packs[pack] =")
    assert not sees_a_bug(folder, ODD, 0.0)
    result = run_sanitized([ODD], str(folder))
    assert result.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in result.stderr and "forward_warp" in result.stderr
