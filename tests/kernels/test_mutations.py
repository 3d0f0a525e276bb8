"""Kernels on the CPU show bugs: a test fails for each kind of bug in a copy of the sources."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mutated_cases import (
    AGAIN,
    AGAIN_IN_RING,
    BLOCK,
    BUNDLE,
    BUNDLE_1,
    BUNDLE_32,
    BUNDLE_FEW,
    CLUSTER,
    FEW,
    ODD,
    SHARED,
    SHARED_CLUSTER,
    SUM,
    UNCACHED,
    WARP,
    Mutation,
)
from mutated_machine import copy_of_sources, mutate, sees_a_bug
from ring_mutations import ring_mutations

from cupynorm.check.cases import Case
from cupynorm.plan.problem import Tile

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
        "reduce.cuh",
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
        "present && in_row(pack);\n      Compute weights",
        "present;\n      Compute weights",
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
        "tile.cuh",
        "register_col<tile>(pack) < num_cols",
        "register_col<tile>(pack) <= num_cols",
        ODD,
    ),
    "one column too few": Mutation(
        "tile.cuh",
        "register_col<tile>(pack) < num_cols",
        "register_col<tile>(pack) < num_cols - 1",
        ODD,
    ),
    "row offset in columns": Mutation(
        "store.cuh", "y + row * y_stride + col", "y + row * (y_stride - 1) + col", ODD
    ),
    "correction of the mean dropped": Mutation(
        "statistics.cuh",
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
        "parameter_sums.cuh", "  __syncthreads();\n", "", WARP
    ),
    "parameter sums without the last warp": Mutation(
        "parameter_sums.cuh", "warp < num_warps; ++warp", "warp < num_warps - 1; ++warp", UNCACHED
    ),
    "sums of few rows without their barrier": Mutation(
        "backward_few_ring.cuh", "  __syncthreads();\n", "", FEW
    ),
    "few rows whose first columns have no block": Mutation(
        "backward_few.cu",
        "(parameters, blockIdx.x - num_row_blocks",
        "(parameters, blockIdx.x",
        FEW,
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
        "bundle.cuh", "threadIdx.x) % 32 / lanes;", "threadIdx.x) * 0;", BUNDLE
    ),
    "bundle whose ends are not written": Mutation(
        "bundle.cuh", "if (lane < head) to[lane] = image[lane];", "", BUNDLE
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
        "num_packs > 1 ? 0 : -register_col<tile>(0)",
        "0",
        BUNDLE_FEW,
    ),
    "a residual that is not added": Mutation(
        "sum_load.cuh", "values[at] += added[at];", "values[at] += 0;", SUM
    ),
    "y again of the first columns' biases": Mutation(
        "register_gradient.cuh",
        "load(col_or_first(pack), biases)",
        "load(cols.first_col, biases)",
        AGAIN,
    ),
    "y again beyond the row": Mutation(
        "register_gradient.cuh",
        "weights, biases, counts",
        "weights, biases, true",
        AGAIN,
    ),
    "y again of another row": Mutation(
        "backward_stores.cuh", "store_y.store(row, col", "store_y.store(row ^ 1, col", AGAIN
    ),
    "y again with weights for biases": Mutation(
        "backward_ring.cuh",
        "biases.unpack_to(pack, bias_values)",
        "weights.unpack_to(pack, bias_values)",
        AGAIN_IN_RING,
    ),
    "biases where the weights are": Mutation(
        "backward_ring.cuh",
        "parameters + decltype(weights)::smem_bytes",
        "parameters",
        AGAIN_IN_RING,
    ),
    "a cluster that leaves its last columns out": Mutation(
        "tile.cuh",
        "whole.first_col + last * step, whole.last_col)",
        "whole.first_col + last * step, whole.last_col - 2)",
        CLUSTER,
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
        assert not sees_a_bug(folder, case, center, range(5)), case
