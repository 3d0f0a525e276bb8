"""Runs every kernel once on small problems, for a tool that watches a whole process:

    compute-sanitizer --tool memcheck  python tests/every_kernel.py      (also racecheck, initcheck, synccheck)

Exits with 1 if a result is wrong; the tool says what else is.
"""

from __future__ import annotations

import sys

from cupynorm.dispatch import plan
from cupynorm.gradient_check import Case, CheckResult, GpuCheckMachine, judge_all, random_problem, run_kernels
from cupynorm.strategies import STRATEGIES, Tile


def cases() -> list[Case]:
    every = []
    for strategy in STRATEGIES:
        for norm in ("layer_norm", "rms_norm"):
            # Whole packs, then lone elements and mixed dtypes.
            every.append(Case(norm, 300, 512, "bfloat16", strategy=strategy))
            every.append(Case(norm, 5, 255, "float32", weight="float64", strategy=strategy))
        every.append(Case("layer_norm", 7, 504, "float16", weight="float32", strategy=strategy, residual=True))
        every.append(Case("layer_norm", 3, 256, "float64", strategy=strategy, statistics="welford"))
        every.append(Case("layer_norm", 9, 500, "bfloat16", y="float32", strategy=strategy, zero_centered_weight=True))
        # Sums of their own dtype of an input that is scaled and dropped out: packs and lone elements, whose gradient is split.
        options = {"residual": True, "residual_dtype": "float32", "dropout_p": 0.2, "row_scale": "float32", "dsum": True}
        options |= {"weight1": "bfloat16", "bias1": "float32"}
        every.append(Case("layer_norm", 300, 512, "bfloat16", strategy=strategy, **options))
        every.append(Case("rms_norm", 7, 255, "float16", strategy=strategy, residual_dtype="float32"))
        every.append(Case("rms_norm", 9, 500, "bfloat16", strategy=strategy, weight1="bfloat16", round_x_hat=True))
        every.append(Case("layer_norm", 9, 500, "bfloat16", strategy=strategy, memory_efficient=True))
        every.append(Case("layer_norm", 300, 512, "bfloat16", strategy=strategy, recompute=True))
        every.append(Case("rms_norm", 7, 255, "float32", strategy=strategy, bias="bfloat16", recompute=True))
    # Rows that begin anywhere, through the rings of a block and of a cluster.
    every += [Case("layer_norm", num_rows, num_cols, "bfloat16") for num_rows, num_cols in ((300, 1023), (60, 33333))]
    every += [Case("layer_norm", 300, num_cols, "bfloat16", recompute=True) for num_cols in (1023, 1024, 12288)]
    # Rows in the registers of clusters of 2 to 16 blocks, and (200001 and 262144 backward) beyond them.
    every += [Case("layer_norm", 2, num_cols, "bfloat16") for num_cols in (20000, 40000, 66000, 131072, 200001, 262144)]
    for strategy, sizes in (("block", (1,)), ("cluster", (2, 16))):
        for cluster_size in sizes:
            num_rows = (
                40 if cluster_size == 16 else 300
            )  # more than are resident; racecheck takes a second for a million elements
            # Forward rows in shared memory: other devices and wider rows get them.
            tile = Tile(8, 64, cluster_size=cluster_size)
            every.append(Case("layer_norm", num_rows, 4096, "bfloat16", strategy=strategy, tile=tile, sm_margin=32))
            # Rings: forward of few packs, so that several rounds of them are quick;
            # backward of the narrowest rows that get one.
            for dtype, pack_size in (("bfloat16", 8), ("float32", 4)):
                num_cols = narrowest_ring(dtype, cluster_size)
                packs_per_thread = max(1, -(-num_cols // (cluster_size * pack_size * 256)))
                tile = Tile(pack_size, 256, packs_per_thread, cluster_size=cluster_size, stages=2)
                every.append(Case("layer_norm", num_rows, num_cols, dtype, strategy=strategy, tile=tile, sm_margin=32))
    return every


def narrowest_ring(dtype: str, cluster_size: int) -> int:
    """Columns, in steps of 1000 so that they do not fill their tile, of the first row whose backward is a ring of such
    clusters."""
    for num_cols in range(1000, 200_000, 1000):
        tile = plan(num_cols, dtype=dtype, direction="backward", device="H200").tile
        if tile.stages and tile.cluster_size == cluster_size:
            return num_cols
    raise ValueError(f"no backward of {dtype} is a ring of clusters of {cluster_size}")


def main() -> int:
    where = GpuCheckMachine()
    result = CheckResult()
    for case in cases():
        problem = random_problem(case)
        welford = case.statistics == "welford" or case.strategy == "uncached"
        result.findings += judge_all(problem, run_kernels(problem, where), rounded_mean=welford)
    print(result.summary())
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
