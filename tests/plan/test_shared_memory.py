"""Shared memory of plans: the layouts of the kernels by hand, and resident blocks."""

from __future__ import annotations

import re

import pytest
from plan_problems import DIRECTIONS, problem_of, slice_of

from cupynorm.dtypes import DTYPES
from cupynorm.gpu.source_files import source_files
from cupynorm.norm.plans import plan
from cupynorm.plan.devices import DEVICES
from cupynorm.plan.dispatch import choose
from cupynorm.plan.problem import Tile
from cupynorm.plan.tile_model import reduce_bytes


def constant(pattern: str, file: str = "reduce.cuh") -> str:
    found = re.findall(pattern, source_files()[file].read_text())
    assert len(found) == 1, f"{pattern} is found {len(found)} times in {file}"
    return found[0]


@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_reduce_bytes_are_those_of_reduce_cuh(dtype):
    """The formulas of the two headers, read from their text, against reduce_bytes."""
    block = constant(r"static constexpr int smem_bytes = (\(2 \* max_parts \* num_warps .*);")
    of_cluster = "cluster_reduce.cuh"
    all_bytes = constant(r"smem_bytes = (Block::smem_bytes .*);", of_cluster)
    assert all_bytes == "Block::smem_bytes + buffer_bytes"
    cluster = "Block::smem_bytes + " + constant(r"buffer_bytes =\s+(.*);", of_cluster)
    max_parts = int(constant(r"static constexpr int max_parts = (\d+);"))
    assert constant(r"static constexpr int num_warps = (.*);") == "threads / 32"
    block, cluster = (text.replace("/", "//") for text in (block, cluster))
    problem = problem_of(1024, dtype)
    itemsize = DTYPES[dtype].itemsize
    for threads in (32, 64, 128, 512, 1024):
        names = {"max_parts": max_parts, "num_warps": threads // 32, "item": itemsize}
        block_bytes = eval(block.replace("sizeof(Compute)", "item"), {}, names)
        assert reduce_bytes(problem, threads) == block_bytes > 0
        for cluster_size in (2, 4, 8, 16):
            names |= {"block_bytes": block_bytes, "cluster_size": cluster_size}
            text = (
                cluster.replace("Block::smem_bytes", "block_bytes")
                .replace("Block::", "")
                .replace("sizeof(Compute)", "item")
            )
            assert reduce_bytes(problem, threads, cluster_size) == eval(text, {}, names)


def aligned(value: int) -> int:
    return (value + 15) // 16 * 16


def test_smem_bytes_of_each_kernel():
    """The layout of each kernel, as its .cu file has it, written out by hand."""
    for file in ("forward_block.cu", "forward_cluster.cu"):
        assert "dynamic_smem() + Reduce::smem_bytes" in source_files()[file].read_text()

    def smem(num_cols, dtype, direction="forward", at=0, device="H200", **options):
        made = plan(num_cols, 2000, dtype, direction=direction, device=device, **options)
        return made.launches[at].smem_bytes, made

    assert smem(128, "float32", strategy="warp")[0] == 0  # forward_warp reduces by shuffles
    # Two rows of sums, of dweight and dbias, for each of 4 warps.
    for dtype, itemsize in (("float32", 4), ("float64", 8)):
        got, made = smem(128, dtype, "backward", strategy="warp")
        assert made.tile.block_size == 128 and got == 2 * 4 * 128 * itemsize
        # backward_parameters has 512 threads and two sums for each pack in each warp.
        parameters = smem(1024, dtype, "backward", at=1)[1].launches[1]
        assert (
            parameters.smem_bytes
            == 2 * parameters.tile.pack_size * parameters.tile.threads_per_row * 16 * itemsize
        )
    for num_cols in (1536, 4096, 8192):
        got, made = smem(num_cols, "bfloat16", strategy="block")
        assert got == aligned(24 * made.tile.threads_per_row // 32) and made.tile.packs_per_thread
    got, made = smem(256, "float32", "backward", strategy="block")
    assert got == aligned(24 * made.tile.threads_per_row // 32)
    # Without clusters, block keeps wide rows in shared memory: 512 threads, 16 warps.
    got, made = smem(80000, "bfloat16", device="A100")
    assert got == aligned(24 * 16) + aligned(80000 * 2) and made.strategy == "block"
    got, made = smem(33331, "float32", device="A100")
    assert got == aligned(24 * 16) + aligned(33331 * 4) and made.strategy == "block"
    for direction in DIRECTIONS:
        got, made = smem(1 << 22, "float64", direction)
        assert got == 48 * 16 and made.strategy == "uncached"
    # A cluster that keeps rows in registers: only the sums of its warps and of its blocks.
    for direction in DIRECTIONS:
        got, made = smem(30000, "float64", direction)
        assert made.strategy == "cluster" and made.tile.packs_per_thread
        assert got == aligned(48 * made.tile.threads_per_row // 32) + aligned(
            48 * made.tile.cluster_size
        )
    got, made = smem(200000, "bfloat16", strategy="cluster", tile=Tile(8, 512, cluster_size=2))
    assert got == aligned(24 * 16) + aligned(24 * 2) + aligned(
        100032 * 2
    )  # 1563 steps of 64 columns
    got, made = smem(1 << 20, "bfloat16", strategy="cluster", tile=Tile(8, 512, cluster_size=16))
    assert got == 2 * aligned(24 * 16) + (1 << 20) // 16 * 2
    # 70001 single columns over 4 blocks: slices of 17504. x, dy, and two rows of float sums.
    got, made = smem(
        70001, "bfloat16", "backward", strategy="cluster", tile=Tile(1, 512, cluster_size=4)
    )
    slice_cols = slice_of(70001, made.tile)
    assert got == aligned(24 * 16) + aligned(24 * made.tile.cluster_size) + 2 * aligned(
        slice_cols * 2
    ) + 2 * aligned(slice_cols * 4)
    without = plan(
        70001,
        1000,
        "bfloat16",
        direction="backward",
        device="H200",
        strategy="cluster",
        bias_dtype=None,
        tile=made.tile,
    )
    assert got - without.launches[0].smem_bytes == aligned(slice_cols * 4)


@pytest.mark.parametrize("weight", ["bfloat16", "float32", None])
@pytest.mark.parametrize("x", ["bfloat16", "float32"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_smem_bytes_of_a_ring(direction, x, weight):
    """Slots of all warps, four buffers of sums, and a barrier for each slot and buffer.

    Forward adds two broadcasts of four floats. Backward adds weights beyond 16 elements a thread.
    """
    item = DTYPES[x].itemsize
    for tile in (
        Tile(8, 96, 2, stages=3),
        Tile(8, 64, 3, rows_per_block=2, stages=2),
        Tile(8, 64, 3, cluster_size=16, stages=4),
    ):
        num_cols = (tile.cols - 8) * tile.cluster_size
        strategy = "cluster" if tile.cluster_size > 1 else "block"
        made = plan(
            num_cols,
            8,
            x,
            direction=direction,
            weight_dtype=weight,
            device="H200",
            strategy=strategy,
            tile=tile,
        )
        rows, warps = tile.rows_per_block, tile.threads_per_row // 32
        ring = tile.cols * item * (1 if direction == "forward" else 2)
        # Forward also sends what rounding takes from the means.
        values = 3 if direction == "forward" else 2
        got = rows * tile.stages * (ring + 8 * warps)
        if direction == "forward":
            got = aligned(got) + rows * 2 * (16 + 8)
        got += rows * 4 * (8 + 4 * values * warps * tile.cluster_size)
        if weight and direction == "backward" and tile.packs_per_thread > 2:
            # One pack of 16-bit weights stays in registers.
            packs = tile.packs_per_thread - (weight == "bfloat16")
            got = (
                aligned(got)
                + packs * tile.pack_size * tile.threads_per_row * DTYPES[weight].itemsize
            )
        assert made.launches[0].smem_bytes == aligned(got)
        if direction == "forward":  # the largest of a row are sent, too
            to_8_bits = {
                "weight_dtype": weight,
                "device": "H200",
                "strategy": strategy,
                "tile": tile,
                "out_dtype": "float8_e4m3fn",
            }
            row, given = (
                plan(num_cols, 8, x, scale=scale, **to_8_bits).launches[0]
                for scale in ("row", "given")
            )
            sent = rows * 4 * (8 + 4 * warps * tile.cluster_size)
            assert (row.smem_bytes, given.smem_bytes) == (aligned(got + sent), aligned(got))
    assert "num_buffers = 4;" in source_files()["exchange.cuh"].read_text()


def test_shared_memory_limits_resident_blocks():
    """Each resident block needs its shared memory and 1 KiB that the driver keeps."""
    for device in DEVICES.values():
        for direction in DIRECTIONS:
            for num_cols in (768, 4096, 8192, 20000, 40000, 65536):
                problem = problem_of(num_cols, "float16", direction)
                choice = choose(problem, device)
                assert 1 <= choice.resident <= choice.tile.blocks_per_sm
                assert (
                    choice.resident * (choice.smem_bytes + 1024) <= device.smem_per_sm
                    or choice.resident == 1
                )
    # Of 233472 bytes two blocks of 116000 fit only without the driver's share.
    tile = Tile(pack_size=8, threads_per_row=512, blocks_per_sm=2)
    for num_cols, smem_bytes, resident in ((57008, 114400, 2), (57808, 116000, 1)):
        choice = choose(problem_of(num_cols, "float16"), DEVICES["H200"], "block", tile)
        assert (choice.smem_bytes, choice.resident) == (smem_bytes, resident)
