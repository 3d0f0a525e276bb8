"""Bugs in the rings of a block and of a cluster, for test_mutations.py."""

from __future__ import annotations

from dataclasses import replace

from mutated_cases import CLUSTER_RING, GROUP_RING, RING, Mutation


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
            "ring_statistics.cuh",
            "bulk_wait(barriers + buffer, turn / 2);",
            "",
        ),
        "ring whose broadcasts are waited for with one parity": (
            "ring_statistics.cuh",
            "bulk_wait(barriers + buffer, turn / 2);",
            "bulk_wait(barriers + buffer, 0);",
        ),
        "ring in which no warp's turn it is to find statistics": (
            "forward_ring.cuh",
            "turns_until_own = Shape::num_warps - 1;",
            "turns_until_own = Shape::num_warps;",
        ),
        "ring whose halves of a warp send each other's values": (
            "ring_statistics.cuh",
            "? squares : mean",
            "? mean : squares",
        ),
        "ring in which a part of a row counts a column more": (
            "forward_ring.cuh",
            "part_of(MomentExchange::source(index)).size()",
            "part_of(MomentExchange::source(index)).size() + 1",
        ),
        "ring whose rows are not waited for": (
            "ring.cuh",
            "if (num_cols > 0) bulk_wait(barriers + of.slot, of.round);",
            "",
        ),
        "ring whose rows are waited for with one parity": (
            "ring.cuh",
            "barriers + of.slot, of.round",
            "barriers + of.slot, 0",
        ),
        "ring that never counts its rounds": ("ring.cuh", "++round;", ""),
        "ring copied a pack short": (
            "ring.cuh",
            "return aligned ? bytes :",
            "return aligned ? bytes - 16 :",
        ),
        "ring whose warps all take the first part": (
            "ring.cuh",
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
            "streams.fetch(written.slot);",
            "streams.fetch(summed.slot);",
        ),
        "ring that fills the slot of the next row, backward": (
            "backward_ring.cuh",
            "streams.fetch(written.slot);",
            "streams.fetch(summed.slot);",
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
            "forward_ring.cuh",
            "value = in_part(pack) ? value : Compute(0);",
            ";",
        ),
        "ring with garbage beyond the row, backward": (
            "backward_ring.cuh",
            "present = Shape::in_part(pack, cols);\n      sums",
            "present = true;\n      sums",
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
            "backward_ring_inputs.cuh",
            "(of, RingPart<tile, X>::most_bytes)",
            "(of, 0)",
        ),
        "ring that adds x to x": (
            "forward_ring.cuh",
            "(of, RingPart<tile, Held>::most_bytes)",
            "(of, 0)",
        ),
        "ring that returns no sum": (
            "forward_ring.cuh",
            "call.load.keep(row,",
            "call.load.keep(0,",
        ),
        "ring that takes a row's statistics for the next one's": (
            "backward_ring.cuh",
            "sum_row(turn + 1, next)",
            "sum_row(turn + 1, gradient)",
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
            "buffer, Shape::num_warps +",
            RING,
        ),
        "ring of several rows a block that exchange sums in one place": Mutation(
            "exchange.cuh", "smem + Shape::group() * group_bytes", "smem", GROUP_RING
        ),
        "ring of several rows a block that add up their sums at once": Mutation(
            "backward_ring.cuh",
            "    __syncthreads();\n    if (Shape::group() + kept",
            "    if (Shape::group() + kept",
            GROUP_RING,
        ),
        "ring of a block in which nobody arrives": Mutation("exchange.cuh", arrive, ";", RING),
        "ring whose warps share their weights": Mutation(
            "backward_ring_inputs.cuh",
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
            "at + cluster_rank() * Shape::num_warps",
            "at",
            CLUSTER_RING,
        ),
        "ring of a cluster that only synchronises its blocks": Mutation(
            "ring.cuh", "    cluster_sync();", "    __syncthreads();", CLUSTER_RING
        ),
        "ring of one row that adds the next one up": Mutation(
            "backward_ring.cuh",
            "      sum_row(turn, gradient);",
            "      sum_row(turn, next);",
            RING,
            backward=replace(RING.tile, stages=1),
        ),
    }
