"""Kernels on the CPU: results, errors for faults, conversions, sanitizers, compiler, cache."""

import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from cupynorm.gpu import on_cpu
from cupynorm.gpu.on_cpu import NoCompilerError, OnCpuError

KERNELS = Path(__file__).parent / "on_cpu_kernels"
ROOT = Path(__file__).parents[2]
SEEDS = range(20)


def instance(source, name_expression, **options):
    return on_cpu.kernel(source, name_expression, **{"folder": KERNELS, **options})


def words(*arguments):
    """Arrays by address, integers as they are."""
    return b"".join(
        struct.pack("q", each.ctypes.data if isinstance(each, np.ndarray) else each)
        for each in arguments
    )


def aligned(num_values, dtype=np.float32):
    """An array aligned to 16 bytes, which bulk copies need and NumPy does not promise."""
    raw = np.full(num_values * np.dtype(dtype).itemsize + 16, 0xFF, np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : len(raw) - 16 + start].view(dtype)


# Right results, and wrong ones where a barrier is missing.


def block_sums(with_barrier, seed):
    x = np.random.default_rng(seed).standard_normal((6, 128)).astype(np.float32)
    y = np.full(6, np.nan, np.float32)
    block_sum = instance("block_sum.cu", f"block_sum<{str(with_barrier).lower()}>")
    block_sum.launch(6, 128, words(x, y), smem_bytes=16, seed=seed)
    return np.allclose(y, x.sum(1, dtype=np.float64), atol=1e-4)


def test_block_reduction():
    assert all(block_sums(True, seed) for seed in SEEDS)


def test_a_missing_barrier_shows():
    assert not all(block_sums(False, seed) for seed in SEEDS)


def test_same_seed_same_order():
    x = np.random.default_rng(0).standard_normal((6, 128)).astype(np.float32)
    runs = []
    for seed in [*SEEDS, *SEEDS]:
        y = np.full(6, -1, np.float32)
        instance("block_sum.cu", "block_sum<false>").launch(
            6, 128, words(x, y), smem_bytes=16, seed=seed
        )
        runs.append(y.tobytes() if not np.isnan(y).any() else np.isnan(y).tobytes())
    assert runs[: len(SEEDS)] == runs[len(SEEDS) :]
    assert len(set(runs)) > 1


@pytest.mark.parametrize(
    "argument, width", [(0, 32), (1, 32), (5, 8), (3, 4), (16, 32), (9, 8), (1, 2), (31, 32)]
)
def test_shuffles(argument, width):
    y = np.full((7, 32), -1, np.int64)
    instance("warp_calls.cu", "shuffles").launch(1, 32, words(y, argument, width), seed=argument)
    lane = np.arange(32)
    first = lane // width * width
    last = first + width - 1
    assert np.array_equal(y[0], first + argument % width)
    assert np.array_equal(y[1], np.where(lane - argument >= first, lane - argument, lane))
    assert np.array_equal(y[2], np.where(lane + argument <= last, lane + argument, lane))
    assert np.array_equal(y[3], np.where(lane ^ argument <= last, lane ^ argument, lane))
    threes = sum(1 << each for each in range(0, 32, 3))
    assert np.array_equal(y[4], np.where(lane < 8, threes & 0xFF, threes & ~0xFF))
    assert np.array_equal(y[5], lane < 8)
    assert np.array_equal(y[6], lane < 8)


def test_arithmetic():
    x = np.exp(np.random.default_rng(0).standard_normal(32)).astype(np.float32)
    y = np.full((12, 32), np.nan, np.float32)
    instance("arithmetic.cu", "arithmetic").launch(1, 32, words(x, y))
    wide, lane = x.astype(np.float64), np.arange(32)
    assert np.array_equal(y[0], (1 / np.sqrt(wide)).astype(np.float32))
    assert np.array_equal(y[1], np.sqrt(x))
    assert np.array_equal(y[2], 1 / x)
    assert np.array_equal(y[3], np.float32(1) / (x * np.float32(3)))
    assert np.array_equal(y[4], wide * wide - x * x) and y[4].any()
    assert not y[5].any()
    assert np.array_equal(y[6], x) and np.array_equal(y[7], x) and np.array_equal(y[8], -x)
    assert np.array_equal(y[9], y[0])
    bits = [
        (each.bit_count(), 32 - each.bit_length(), (each & -each).bit_length())
        for each in lane.tolist()
    ]
    assert np.array_equal(y[10], np.array(bits) @ [1, 100, 10000])
    assert np.array_equal(y[11], x + x)


def test_struct_as_template_argument_and_atomics():
    y = np.zeros(1, np.int64)
    tile_sizes = instance(
        "tile.cu", "tile_sizes<float, Tile{.pack_size = 4, .threads_per_row = 32}>"
    )
    tile_sizes.launch(7, 33, words(y))
    assert y[0] == 7 * 16


def exchanged(synchronise, seed, cluster_size=4):
    num_blocks, block_size = 2 * cluster_size, 32
    x = np.random.default_rng(seed).standard_normal((num_blocks, block_size)).astype(np.float32)
    y = np.full_like(x, np.nan)
    exchange = instance("cluster_exchange.cu", f"cluster_exchange<Synchronise::{synchronise}>")
    smem_bytes = 4 * block_size + 8
    exchange.launch(
        num_blocks,
        block_size,
        words(x, y),
        smem_bytes=smem_bytes,
        cluster_size=cluster_size,
        seed=seed,
    )
    step = -1 if synchronise == "with_mbarriers" else 1
    rank = np.arange(num_blocks)
    partner = rank // cluster_size * cluster_size + (rank + step) % cluster_size
    return np.array_equal(y, x[partner][:, np.arange(block_size) ^ 1])


@pytest.mark.parametrize("synchronise", ["both", "with_mbarriers"])
def test_cluster_exchange(synchronise):
    assert all(exchanged(synchronise, seed) for seed in SEEDS)
    assert exchanged(synchronise, 0, cluster_size=16)


@pytest.mark.parametrize("synchronise", ["not_before", "not_after"])
def test_a_missing_cluster_barrier_shows(synchronise):
    assert not all(exchanged(synchronise, seed) for seed in SEEDS)


def reused(with_barrier, cluster_size, seed):
    num_rounds, num_blocks, num_warps = 4, 2 * cluster_size, 4
    y = np.zeros((num_rounds, num_blocks), np.float32)
    buffer_reuse = instance("buffer_reuse.cu", f"buffer_reuse<{str(with_barrier).lower()}>")
    smem_bytes = 4 * cluster_size * num_warps
    block_size = 32 * num_warps
    buffer_reuse.launch(
        num_blocks,
        block_size,
        words(y, num_rounds),
        smem_bytes=smem_bytes,
        cluster_size=cluster_size,
        seed=seed,
    )
    expected = cluster_size * sum(np.arange(num_rounds) * 100 + warp for warp in range(num_warps))
    return np.allclose(y, expected[:, None], rtol=1e-5)


@pytest.mark.parametrize("cluster_size", [1, 4])
def test_a_buffer_used_again_too_early_shows(cluster_size):
    assert all(reused(True, cluster_size, seed) for seed in SEEDS)
    assert not all(reused(False, cluster_size, seed) for seed in SEEDS)


def test_the_largest_cluster():
    cluster_size, block_size = 16, 1024
    x = np.random.default_rng(0).standard_normal((cluster_size, block_size)).astype(np.float32)
    y = np.full_like(x, np.nan)
    exchange = instance("cluster_exchange.cu", "cluster_exchange<Synchronise::both>")
    exchange.launch(
        16, block_size, words(x, y), smem_bytes=4 * block_size, cluster_size=cluster_size
    )
    assert np.array_equal(y, np.roll(x, -1, axis=0)[:, np.arange(block_size) ^ 1])


def doubled_by_bulk_copies(fault, seed):
    num_blocks, num_tiles, block_size = 3, 5, 64
    x, y = (
        aligned(num_blocks * num_tiles * block_size),
        aligned(num_blocks * num_tiles * block_size),
    )
    x[:] = np.random.default_rng(seed).standard_normal(x.size)
    bulk_copy = instance("bulk_copy.cu", f"bulk_copy<Fault::{fault}>")
    bulk_copy.launch(
        num_blocks, block_size, words(x, y, num_tiles), smem_bytes=8 * block_size + 16, seed=seed
    )
    return np.array_equal(y, 2 * x)


def test_bulk_copies():
    assert all(doubled_by_bulk_copies("none", seed) for seed in SEEDS)


def test_a_buffer_filled_before_its_store_has_read_it_shows():
    assert not all(doubled_by_bulk_copies("early_reuse", seed) for seed in SEEDS)


@pytest.mark.parametrize(
    "fault, sentence",
    [
        (
            "no_wait",
            r"bulk load of 256 bytes is under way"
            r"|without having waited for a bulk load at the mbarrier",
        ),
        ("wrong_parity", r"under way|without having waited for a bulk load|waits at the mbarrier"),
        ("no_store_wait", r"thread 0 of block \d exits without having waited for its bulk stores"),
        (
            "misaligned",
            r"thread 0 of block \d calls bulk_load of 256 bytes .* must be multiples of 16",
        ),
        ("outside", r"calls bulk_load of 256 bytes outside its dynamic shared memory"),
    ],
)
def test_faults_of_bulk_copies(fault, sentence):
    for seed in SEEDS:
        with pytest.raises(OnCpuError, match=sentence):
            doubled_by_bulk_copies(fault, seed)


def sent_to_all(fault, seed, cluster_size=4):
    num_rounds, num_blocks = 6, 2 * cluster_size
    x = (
        np.random.default_rng(seed).integers(0, 1000, (num_rounds, num_blocks)).astype(np.float32)
    )  # sums are exact
    y = np.full_like(x, np.nan)
    send_to_all = instance("cluster_send.cu", f"send_to_all<Fault::{fault}>")
    smem_bytes = 16 + 8 * cluster_size
    send_to_all.launch(
        num_blocks,
        32,
        words(x, y, num_rounds),
        smem_bytes=smem_bytes,
        cluster_size=cluster_size,
        seed=seed,
    )
    return np.array_equal(y, x.reshape(num_rounds, 2, cluster_size).sum(2).repeat(cluster_size, 1))


@pytest.mark.parametrize("cluster_size", [1, 4, 16])
def test_sends_within_a_cluster(cluster_size):
    assert all(sent_to_all("none", seed, cluster_size) for seed in SEEDS)


@pytest.mark.parametrize(
    "fault, sentence",
    [
        ("no_wait", r"arrives at the mbarrier .* its whole count"),
        ("wrong_parity", r"arrives at the mbarrier .* its whole count|Deadlock"),
        (
            "wrong_rank",
            r"thread 3 of block \d maps shared memory of rank 4 in a cluster of 4 blocks",
        ),
        ("not_shared", r"maps a pointer that is not in its own block's shared memory"),
        (
            "to_the_end",
            r"was overwritten|ends while a bulk load of 4 bytes is under way"
            r"|ends without having waited",
        ),
    ],
)
def test_faults_of_sends(fault, sentence):
    for seed in SEEDS:
        with pytest.raises(OnCpuError, match=sentence):
            sent_to_all(fault, seed)


@pytest.mark.parametrize("fault", ["one_buffer", "too_few_bytes", "before_init"])
def test_sends_that_come_too_early_show(fault):
    """For some orders a value is overwritten or missing, or a peer has not started."""

    def shows(seed):
        try:
            return not sent_to_all(fault, seed)
        except OnCpuError as error:
            return "before mbarrier_init" in str(error) if fault == "before_init" else True

    assert any(shows(seed) for seed in SEEDS)


# Faults.


@pytest.mark.parametrize(
    "fault, sentence",
    [
        (
            "own_lane_missing",
            r"thread (3|35) of block 0 \(lane 3\) calls __shfl_xor_sync with mask 0xfffffff7",
        ),
        (
            "different_masks",
            r"mask 0xffffffff.*, thread 16 .*mask 0xfffffff0.*; "
            r"the lanes of one call must all give",
        ),
        (
            "half_masks",
            r"thread 0 of block 0 waits in __shfl_xor_sync .*, thread 16 of block 0 has exited",
        ),
        (
            "lane_exited",
            r"Deadlock: thread 0 .* waits in __shfl_xor_sync .*, thread 7 of block 0 has exited",
        ),
        ("lane_never_comes", r"Deadlock: thread 0 .*, thread 7 of block 0 waits at __syncthreads"),
        (
            "outside_mask",
            r"\(lane \d+\) reads lane \d+ in __shfl_xor_sync, which mask 0x\w+ does not name",
        ),
        ("width", r"with width 12: it must be"),
    ],
)
def test_faults_of_warp_calls(fault, sentence):
    x, y = np.ones(64), np.zeros(2)
    for seed in SEEDS:
        with pytest.raises(OnCpuError, match=sentence):
            instance("warp_calls.cu", f"warp_sum<Fault::{fault}>").launch(
                1, 64, words(x, y), seed=seed
            )


def test_mask_of_lanes_that_the_block_lacks():
    x, y = np.ones(64), np.zeros(2)
    with pytest.raises(OnCpuError, match="its warp has only 16 lanes"):
        instance("warp_calls.cu", "warp_sum<Fault::none>").launch(1, 48, words(x, y))


@pytest.mark.parametrize(
    "fault, sentence",
    [
        (
            "exit_before_syncthreads",
            r"Deadlock: thread \d of block \d waits at __syncthreads, thread 7 of block \d .*",
        ),
        (
            "shuffle_instead",
            r"Deadlock: thread 0 .* waits at __syncthreads, thread 8 .* waits in __syncwarp",
        ),
        ("cluster_wait_only", r"waits at the barrier of the cluster without having arrived"),
        ("cluster_arrive_twice", r"arrives twice at the barrier of the cluster"),
        (
            "one_block_skips",
            r"Deadlock: thread 0 of block \d waits at the barrier of the cluster, thread",
        ),
        (
            "mbarrier_deadlock",
            r"Deadlock: thread 0 .* for parity 0 \(1 arrivals and 0 bytes are missing\)",
        ),
        (
            "mbarrier_unmade",
            r"uses the mbarrier at byte 0 of the shared memory of block \d before mbarrier_init",
        ),
        (
            "mbarrier_overwritten",
            r"The mbarrier at byte 0 of the shared memory of block \d was overwritten",
        ),
        ("mbarrier_overfull", r"already reached in this phase: its whole count"),
        (
            "write_after",
            r"wrote at byte 100, outside the 100 bytes of dynamic shared memory of block \d",
        ),
        (
            "write_before",
            r"wrote at byte -4, outside the 100 bytes of dynamic shared memory of block \d",
        ),
        ("map_outside", r"maps a pointer that is not in its own block's shared memory"),
        ("trap", r"thread 9 of block \d called __trap"),
    ],
)
def test_faults_of_blocks_and_clusters(fault, sentence):
    for seed in SEEDS:
        with pytest.raises(OnCpuError, match=sentence):
            instance("barriers.cu", f"faulty<Fault::{fault}>").launch(
                4, 32, words(5), smem_bytes=100, cluster_size=2, seed=seed
            )


def test_the_next_launch_after_a_fault_works():
    x, y = np.ones(64), np.zeros(2)
    for seed in SEEDS:
        with pytest.raises(OnCpuError):
            instance("warp_calls.cu", "warp_sum<Fault::lane_exited>").launch(
                1, 64, words(x, y), seed=seed
            )
        y[:] = np.nan
        instance("warp_calls.cu", "warp_sum<Fault::none>").launch(1, 64, words(x, y), seed=seed)
        assert y.tolist() == [32, 32]


@pytest.mark.parametrize(
    "grid_size, block_size, num_words, options, sentence",
    [
        (1, 1025, 2, {}, "A block has 1 to 1024 threads, not 1025"),
        (0, 32, 2, {}, "A grid of 0 blocks is not made of clusters of 1"),
        (3, 32, 2, {"cluster_size": 2}, "A grid of 3 blocks is not made of clusters of 2"),
        (32, 32, 2, {"cluster_size": 32}, "A cluster has 1 to 16 blocks, not 32"),
        (1, 32, 2, {"smem_bytes": 1 << 20}, "No GPU has 1048576 bytes"),
        (1, 32, 3, {}, "The argument struct of the kernel has 16 bytes, but 24 were given"),
        (-1, 32, 2, {}, "not all between 0 and"),
    ],
)
def test_launches_that_no_gpu_would_take(grid_size, block_size, num_words, options, sentence):
    with pytest.raises(OnCpuError, match=sentence):
        instance("block_sum.cu", "block_sum<true>").launch(
            grid_size, block_size, bytes(8 * num_words), **options
        )


def test_two_threads_at_once():
    wrong = []

    def run():
        for seed in SEEDS:
            if not block_sums(True, seed) or not exchanged("both", seed):
                wrong.append(seed)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Conversions.


def converted(name, x, dtype):
    x = np.ascontiguousarray(np.resize(x, -(-x.size // 64) * 64))
    y = np.zeros(x.size, dtype)
    instance("convert.cu", f"convert<{name}>").launch(x.size // 64, 64, words(x, y))
    return x, y


def same(actual, expected):
    """Equal values with equal signs, a NaN for a NaN."""
    number = ~np.isnan(expected)
    return (
        np.array_equal(number, ~np.isnan(actual))
        and np.array_equal(actual[number], expected[number])
        and np.array_equal(np.signbit(actual[number]), np.signbit(expected[number]))
    )


def widened(bfloat16_bits):
    return (bfloat16_bits.astype(np.uint32) << 16).view(np.float32)


def rounded_to_bfloat16(x):
    x = x.astype(np.float64)
    _, exponent = np.frexp(x)
    quantum = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
    with np.errstate(invalid="ignore", over="ignore"):
        y = (
            np.rint(x / quantum) * quantum
        )  # dividing by a power of two is exact, rint rounds ties to even
    return np.where(np.abs(y) >= 2.0**128, np.copysign(np.inf, x), y).astype(np.float32)


def difficult(dtype, mantissa_bits, least_exponent):
    """Random values, ties and their neighbours, subnormals, overflow, double rounding."""
    random = np.random.default_rng(0)
    scales = np.ldexp(
        random.standard_normal(40000), random.integers(least_exponent - 14, 130, 40000)
    )
    exponents = np.arange(least_exponent - mantissa_bits - 3, least_exponent + 35)
    powers = np.ldexp(1.0, exponents)[:, None]
    ties = powers * (1 + (np.arange(64) + 0.5) * 2.0**-mantissa_bits)
    subnormal_ties = (np.arange(300) + 0.5) * 2.0 ** (least_exponent - mantissa_bits)
    ties = np.concatenate([ties.ravel(), subnormal_ties])
    largest = np.ldexp(2 - 2.0**-mantissa_bits, {10: 15, 7: 127}[mantissa_bits])
    edge = np.ldexp(2 - 2.0 ** -(mantissa_bits + 1), {10: 15, 7: 127}[mantissa_bits])
    special = np.array(
        [0, np.inf, np.nan, largest, edge, np.nextafter(edge, 0), 5e-324, 1e-45, 1e300]
    )
    x = np.concatenate([scales, ties, ties * (1 + 2.0**-40), ties * (1 - 2.0**-40), special])
    with np.errstate(over="ignore"):
        x = np.concatenate([x, -x]).astype(dtype)
        nudged = [np.nextafter(x, dtype(np.inf)), np.nextafter(x, dtype(-np.inf))]
    return np.concatenate([x, *nudged])


def test_every_half_to_float():
    bits, y = converted("HalfToFloat", np.arange(65536, dtype=np.uint16), np.float32)
    assert same(y, bits.view(np.float16).astype(np.float32))


def test_every_bfloat16_to_float():
    bits, y = converted("BfloatToFloat", np.arange(65536, dtype=np.uint16), np.float32)
    assert same(y, widened(bits))


@pytest.mark.parametrize("name, dtype", [("Float", np.float32), ("Double", np.float64)])
def test_to_half(name, dtype):
    x, y = converted(f"{name}ToHalf", difficult(dtype, 10, -14), np.float16)
    with np.errstate(over="ignore"):
        assert same(y, x.astype(np.float16))


@pytest.mark.parametrize("name, dtype", [("Float", np.float32), ("Double", np.float64)])
def test_to_bfloat16(name, dtype):
    x, y = converted(f"{name}ToBfloat", difficult(dtype, 7, -126), np.uint16)
    assert same(widened(y), rounded_to_bfloat16(x))


def test_double_is_rounded_once():
    x = np.array([1 + 2.0**-11 + 2.0**-40])
    assert x.astype(np.float32).astype(np.float16)[0] == 1
    assert converted("DoubleToHalf", x, np.float16)[1][0] == 1 + 2.0**-10
    x = np.array([1 + 2.0**-8 + 2.0**-40])
    assert widened(converted("DoubleToBfloat", x, np.uint16)[1])[0] == 1 + 2.0**-7


# Sanitizers.


def run_sanitized(sanitize, body):
    try:
        environment = on_cpu.sanitized_environment()
    except NoCompilerError as error:
        pytest.skip(str(error))
    script = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(KERNELS.parent)!r}]
from functools import partial
import test_on_cpu
from test_on_cpu import np, on_cpu, words
instance = partial(test_on_cpu.instance, sanitize={sanitize!r})
x, y = np.ones(1024, np.float32), np.zeros(1024, np.float32)
{body}
print("sum", y.sum())
"""
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )


SCALE = 'instance("packs.cu", "scale_packs").launch(1, 64, words(x.ctypes.data{}, y, {}))'
BOTH = ("address", "undefined")


@pytest.mark.slow
@pytest.mark.parametrize("sanitize", [("address",), ("undefined",), BOTH])
def test_sanitizers_accept_a_right_kernel(sanitize):
    result = run_sanitized(sanitize, SCALE.format("", 256))
    assert (result.returncode, result.stdout) == (0, "sum 2048.0\n"), result.stderr


def test_sanitizers_live_with_fibers_and_faults():
    body = """
z = np.zeros(16 * 256, np.float32)
v = np.arange(16.0 * 256, dtype=np.float32)
for seed in range(3):
    for name in ("warp_sum<Fault::lane_exited>", "warp_sum<Fault::own_lane_missing>"):
        try:
            instance("warp_calls.cu", name).launch(1, 64, words(v, z), seed=seed)
            raise SystemExit("no fault")
        except on_cpu.OnCpuError:
            pass
    exchange = instance("cluster_exchange.cu", "cluster_exchange<Synchronise::both>")
    exchange.launch(16, 256, words(v, z), smem_bytes=1024, cluster_size=16, seed=seed)
    y[0] = z.sum() - v.sum()
"""
    result = run_sanitized(BOTH, body)
    assert (result.returncode, result.stdout) == (0, "sum 0.0\n"), result.stderr


def test_address_sanitizer_sees_a_global_read_out_of_bounds():
    result = run_sanitized(("address",), "y = np.zeros(2048, np.float32)\n" + SCALE.format("", 257))
    assert result.returncode != 0
    assert (
        "AddressSanitizer: heap-buffer-overflow" in result.stderr and "scale_packs" in result.stderr
    )


def test_address_sanitizer_sees_a_shared_read_out_of_bounds():
    read = 'instance("packs.cu", "shared_read").launch(1, 32, words(y, {}), smem_bytes=128)'
    result = run_sanitized(("address",), read.format(0))
    assert (result.returncode, result.stdout) == (0, "sum 32.0\n"), result.stderr
    result = run_sanitized(("address",), read.format(1))
    assert result.returncode != 0
    assert "AddressSanitizer: use-after-poison" in result.stderr and "shared_read" in result.stderr


def test_undefined_behaviour_sanitizer_sees_a_misaligned_pack():
    result = run_sanitized(("undefined",), SCALE.format(" + 4", 200))
    assert result.returncode != 0
    assert "misaligned address" in result.stderr and "packs.cu" in result.stderr


def test_address_sanitizer_without_its_environment():
    with pytest.raises(OnCpuError, match="sanitized_environment"):
        instance("packs.cu", "scale_packs", sanitize=("address",))
    with pytest.raises(OnCpuError, match='a tuple of "address" and "undefined"'):
        instance("packs.cu", "scale_packs", sanitize=("thread",))


# Compiler and cache.


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        NoCompilerError, match=r"Looked for c\+\+, g\+\+ and clang\+\+ .* Install g\+\+ 11 or newer"
    ):
        instance("packs.cu", "scale_packs")
    monkeypatch.setenv("CXX", "cxx-that-is-not-there")
    with pytest.raises(NoCompilerError, match=r"\$CXX \(cxx-that-is-not-there\)"):
        on_cpu.compiler()


def test_a_compiler_that_is_too_old(monkeypatch, tmp_path):
    old = tmp_path / "g++"
    old.write_text('#!/bin/sh\necho "#define __cplusplus 201709L"\n')
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NoCompilerError, match=r"g\+\+ cannot compile C\+\+20"):
        on_cpu.compiler()


def test_cxx_with_options(monkeypatch):
    monkeypatch.setenv("CXX", f"{on_cpu.compiler()} -DUNUSED")
    assert block_sums(True, 0)


def test_a_kernel_that_does_not_compile():
    with pytest.raises(OnCpuError, match=r"(?s)tile_sizes.*does not compile.*error"):
        instance("tile.cu", "tile_sizes<float, Tile{.pack_sizes = 4}>")
    with pytest.raises(OnCpuError, match=r"There is no missing\.cu"):
        instance("missing.cu", "missing")


def test_a_changed_header_recompiles(tmp_path):
    folder = tmp_path / "kernels"
    shutil.copytree(KERNELS, folder)
    x, y = aligned(64), aligned(64)
    x[:] = 1
    for factor in (2, 3, 2):
        (folder / "factor.cuh").write_text(f"constexpr float factor = {factor};\n")
        instance("packs.cu", "scale_packs", folder=folder).launch(1, 32, words(x, y, 16))
        assert (y == factor).all()


def test_the_same_instance_is_compiled_once(monkeypatch):
    first = instance("packs.cu", "scale_packs")
    monkeypatch.setattr(on_cpu, "_build", lambda *_: pytest.fail("compiled again"))
    assert instance("packs.cu", "scale_packs") is first


@pytest.mark.slow
def test_compile_many(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = [
        ("tile.cu", f"tile_sizes<float, Tile{{{pack_size}, 32}}>") for pack_size in range(1, 9)
    ]
    kernels = on_cpu.compile_many(wanted, folder=KERNELS)
    for pack_size, kernel in zip(range(1, 9), kernels, strict=True):
        y = np.zeros(1, np.int64)
        kernel.launch(1, 32, words(y))
        assert y[0] == 4 * pack_size


@pytest.mark.slow
def test_two_processes_with_an_empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{Path(__file__).parent}")
    script = (
        "import test_on_cpu; assert all(test_on_cpu.block_sums(True, seed) for seed in range(3))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
    made = sorted(path.name.split("-")[0] for path in (tmp_path / "cupynorm" / "on_cpu").iterdir())
    assert len(made) == 2 and made[1] == "runtime"


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert block_sums(True, 0)
