"""Kernels on the CPU: the error for a fault of a warp, a block, a cluster or a launch."""

import numpy as np
import pytest
from on_cpu_calls import SEEDS, instance, run

from cupynorm.gpu.on_cpu import OnCpuError


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
            run("warp_calls.cu", f"warp_sum<Fault::{fault}>", 1, 64, x, y, seed=seed)


def test_mask_of_lanes_that_the_block_lacks():
    x, y = np.ones(64), np.zeros(2)
    with pytest.raises(OnCpuError, match="its warp has only 16 lanes"):
        run("warp_calls.cu", "warp_sum<Fault::none>", 1, 48, x, y)


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
    ],
)
def test_faults_of_blocks_and_clusters(fault, sentence):
    for seed in SEEDS:
        with pytest.raises(OnCpuError, match=sentence):
            sizes = {"smem_bytes": 100, "cluster_size": 2}
            run("barriers.cu", f"faulty<Fault::{fault}>", 4, 32, 5, **sizes, seed=seed)


def test_the_next_launch_after_a_fault_works():
    x, y = np.ones(64), np.zeros(2)
    for seed in SEEDS:
        with pytest.raises(OnCpuError):
            run("warp_calls.cu", "warp_sum<Fault::lane_exited>", 1, 64, x, y, seed=seed)
        y[:] = np.nan
        run("warp_calls.cu", "warp_sum<Fault::none>", 1, 64, x, y, seed=seed)
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
    ],
)
def test_launches_that_no_gpu_would_take(grid_size, block_size, num_words, options, sentence):
    with pytest.raises(OnCpuError, match=sentence):
        instance("block_sum.cu", "block_sum<true>").launch(
            grid_size, block_size, bytes(8 * num_words), **options
        )
