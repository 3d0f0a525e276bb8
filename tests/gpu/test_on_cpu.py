"""Kernels on the CPU: right results, and wrong ones where a barrier or a wait is missing."""

import os
import signal
import threading

import numpy as np
import pytest
from on_cpu_calls import SEEDS, aligned, block_sums, instance, run, words

from cupynorm.gpu.on_cpu import OnCpuError


def test_block_reduction():
    assert all(block_sums(True, seed) for seed in SEEDS)


def test_a_missing_barrier_shows():
    assert not all(block_sums(False, seed) for seed in SEEDS)


def test_same_seed_same_order():
    x = np.random.default_rng(0).standard_normal((6, 128)).astype(np.float32)
    runs = []
    for seed in [*SEEDS, *SEEDS]:
        y = np.full(6, -1, np.float32)
        run("block_sum.cu", "block_sum<false>", 6, 128, x, y, smem_bytes=16, seed=seed)
        runs.append(y.tobytes() if not np.isnan(y).any() else np.isnan(y).tobytes())
    assert runs[: len(SEEDS)] == runs[len(SEEDS) :]
    assert len(set(runs)) > 1


@pytest.mark.parametrize(
    "argument, width", [(0, 32), (1, 32), (5, 8), (3, 4), (16, 32), (9, 8), (1, 2), (31, 32)]
)
def test_shuffles(argument, width):
    y = np.full((3, 32), -1, np.int64)
    run("warp_calls.cu", "shuffles", 1, 32, y, argument, width, seed=argument)
    lane = np.arange(32)
    first = lane // width * width
    last = first + width - 1
    assert np.array_equal(y[0], first + argument % width)
    assert np.array_equal(y[1], np.where(lane ^ argument <= last, lane ^ argument, lane))
    assert np.array_equal(y[2], lane < 8)


def test_arithmetic():
    x = np.exp(np.random.default_rng(0).standard_normal(32)).astype(np.float32)
    y = np.full((9, 32), np.nan, np.float32)
    run("arithmetic.cu", "arithmetic", 1, 32, x, y)
    wide = x.astype(np.float64)
    assert np.array_equal(y[0], (1 / np.sqrt(wide)).astype(np.float32))
    assert np.array_equal(y[1], np.sqrt(x))
    assert np.array_equal(y[2], np.float32(1) / (x * np.float32(3)))
    assert np.array_equal(y[3], wide * wide - x * x) and y[3].any()
    assert not y[4].any()
    assert np.array_equal(y[5], x) and np.array_equal(y[6], x) and np.array_equal(y[7], -x)
    assert np.array_equal(y[8], x + x)


def test_struct_as_template_argument_and_atomics():
    y = np.zeros(1, np.int64)
    run("tile.cu", "tile_sizes<float, Tile{.pack_size = 4, .threads_per_row = 32}>", 7, 33, y)
    assert y[0] == 7 * 16


def exchanged(synchronise, seed, cluster_size=4):
    num_blocks, block_size = 2 * cluster_size, 32
    x = np.random.default_rng(seed).standard_normal((num_blocks, block_size)).astype(np.float32)
    y = np.full_like(x, np.nan)
    name = f"cluster_exchange<Synchronise::{synchronise}>"
    sizes = {"smem_bytes": 4 * block_size + 8, "cluster_size": cluster_size}
    run("cluster_exchange.cu", name, num_blocks, block_size, x, y, **sizes, seed=seed)
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
    name = f"buffer_reuse<{str(with_barrier).lower()}>"
    sizes = {"smem_bytes": 4 * cluster_size * num_warps, "cluster_size": cluster_size}
    run("buffer_reuse.cu", name, num_blocks, 32 * num_warps, y, num_rounds, **sizes, seed=seed)
    expected = cluster_size * sum(np.arange(num_rounds) * 100 + warp for warp in range(num_warps))
    return np.allclose(y, expected[:, None], rtol=1e-5)


@pytest.mark.parametrize("cluster_size", [1, 4])
def test_a_buffer_used_again_too_early_shows(cluster_size):
    assert all(reused(True, cluster_size, seed) for seed in SEEDS)
    assert not all(reused(False, cluster_size, seed) for seed in SEEDS)


def doubled_by_bulk_copies(fault, seed):
    num_blocks, num_tiles, block_size = 3, 5, 64
    x, y = (aligned(num_blocks * num_tiles * block_size) for _ in range(2))
    x[:] = np.random.default_rng(seed).standard_normal(x.size)
    name, sizes = f"bulk_copy<Fault::{fault}>", {"smem_bytes": 8 * block_size + 16}
    run("bulk_copy.cu", name, num_blocks, block_size, x, y, num_tiles, **sizes, seed=seed)
    return np.array_equal(y, 2 * x)


def test_bulk_copies():
    assert all(doubled_by_bulk_copies("none", seed) for seed in SEEDS)


def test_a_buffer_filled_before_it_is_read_shows():
    def is_right(seed):
        try:
            return doubled_by_bulk_copies("early_reuse", seed)
        except OnCpuError:  # a thread came too late for its phase
            return False

    assert not all(map(is_right, SEEDS))


@pytest.mark.parametrize(
    "fault, sentence",
    [
        (
            "no_wait",
            r"bulk load of 256 bytes is under way"
            r"|without having waited for a bulk load at the mbarrier",
        ),
        ("wrong_parity", r"under way|without having waited for a bulk load|waits at the mbarrier"),
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
    sizes = {"smem_bytes": 16 + 8 * cluster_size, "cluster_size": cluster_size}
    name = f"send_to_all<Fault::{fault}>"
    run("cluster_send.cu", name, num_blocks, 32, x, y, num_rounds, **sizes, seed=seed)
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


def test_a_child_that_was_forked_while_another_thread_ran_a_kernel():
    kernel = instance("block_sum.cu", "block_sum<true>")
    x, y = np.zeros((4096, 128), np.float32), np.zeros(4096, np.float32)
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            kernel.launch(4096, 128, words(x, y), smem_bytes=16)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(3):
            child = os.fork()
            if child == 0:
                signal.alarm(60)  # ends a child that hangs
                os._exit(0 if block_sums(True, 0) else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()
