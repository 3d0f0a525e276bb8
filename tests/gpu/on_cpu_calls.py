"""Instances of tests/gpu/on_cpu_kernels and their arguments."""

import struct
from pathlib import Path

import numpy as np

from cupynorm.gpu import on_cpu

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


def run(source, name_expression, grid_size, block_size, *arguments, **options):
    """Launches an instance of those kernels."""
    instance(source, name_expression).launch(grid_size, block_size, words(*arguments), **options)


def aligned(num_values, dtype=np.float32):
    """An array aligned to 16 bytes, which bulk copies need and NumPy does not promise."""
    raw = np.full(num_values * np.dtype(dtype).itemsize + 16, 0xFF, np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : len(raw) - 16 + start].view(dtype)


def block_sums(with_barrier, seed):
    x = np.random.default_rng(seed).standard_normal((6, 128)).astype(np.float32)
    y = np.full(6, np.nan, np.float32)
    name = f"block_sum<{str(with_barrier).lower()}>"
    run("block_sum.cu", name, 6, 128, x, y, smem_bytes=16, seed=seed)
    return np.allclose(y, x.sum(1, dtype=np.float64), atol=1e-4)
