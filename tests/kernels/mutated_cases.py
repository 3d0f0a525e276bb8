"""What a mutation is, and the problems for which changed kernels run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from cupynorm.check.cases import Case
from cupynorm.plan.problem import Tile

layer_norm = partial(Case, "layer_norm")
# A margin of one of the two multiprocessors makes forward blocks work on several rows, too.
WARP = layer_norm(37, 40, "float32", strategy="warp")
ODD = layer_norm(5, 37, "float32", strategy="warp", tile=Tile(1, 16, 3, rows_per_block=4))
# Bundles of several parts and of one, with a lane for each row, and with idle lanes.
BUNDLE = layer_norm(
    150, 127, "bfloat16", strategy="warp", tile=Tile(1, 8, 16, 8, stages=2, bundle=12)
)
BUNDLE_32 = layer_norm(
    61, 95, "bfloat16", strategy="warp", tile=Tile(1, 32, 3, 2, stages=2, bundle=3)
)
BUNDLE_1 = layer_norm(
    150, 33, "bfloat16", strategy="warp", tile=Tile(1, 1, 33, 64, exact=1, stages=2, bundle=32)
)
BUNDLE_FEW = layer_norm(
    61, 29, "bfloat16", strategy="warp", tile=Tile(1, 32, 1, 2, stages=2, bundle=3)
)
BLOCK = layer_norm(
    5, 1040, "float32", strategy="block", tile=Tile(4, 96, packs_per_thread=3), sm_margin=1
)
SHARED = layer_norm(5, 264, "float32", strategy="block", tile=Tile(4, 96), sm_margin=1)
CLUSTER = layer_norm(5, 264, "float64", strategy="cluster")  # a ring takes no float64
# Rings whose last warp has few columns or none, and with weights in shared memory. A block or
# cluster works on 12 rows, so it uses each slot and each of four buffers three times.
RING = layer_norm(24, 4 * 470, "float32", strategy="block", tile=Tile(4, 96, 5, stages=3))
CLUSTER_RING = layer_norm(
    12, 4 * 210, "float32", strategy="cluster", tile=Tile(4, 64, 1, cluster_size=4, stages=3)
)
GROUP_RING = layer_norm(
    23, 4 * 110, "float32", strategy="block", tile=Tile(4, 64, 2, rows_per_block=3, stages=2)
)
FEW = layer_norm(3, 4096, "bfloat16")
SHARED_CLUSTER = layer_norm(5, 264, "float32", strategy="cluster", tile=Tile(4, 32, cluster_size=4))
UNCACHED = layer_norm(20, 2052, "float32", strategy="uncached", sm_margin=1)
SUM = layer_norm(
    5,
    37,
    "bfloat16",
    strategy="warp",
    residual="float32",
    dsum=True,
)
AGAIN = layer_norm(5, 37, "float32", strategy="warp", recompute=True)
AGAIN_IN_RING = layer_norm(
    24, 4 * 470, "float32", strategy="block", tile=Tile(4, 96, 5, stages=3), recompute=True
)


@dataclass(frozen=True)
class Mutation:
    file: str
    old: str
    new: str
    case: Case
    center: float = 0.0
    backward: Tile | None = None
