"""What compute-sanitizer is given (every_kernel.py) reaches every kernel and every place in which its rows can wait."""

from __future__ import annotations

import re

from every_kernel import cases

from cupynorm.gradient_check import CpuMachine, random_problem, run_kernels
from cupynorm.strategies import STRATEGIES


class Recorder(CpuMachine):
    """Plans as for an H200 and runs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: set[tuple[str, str]] = set()
        self.functors: set[tuple[str, str]] = set()

    def launch(self, launch, words) -> None:
        tile = launch.tile
        place = "registers" if tile.packs_per_thread else "shared memory or nowhere"
        if tile.stages:
            dtype = re.search(r"Load<(\w+)>", launch.kernel.name_expression)[1]
            place = f"ring of {dtype}, {tile.cluster_size} blocks a row"
        self.reached.add((launch.kernel.source, place))
        functors = re.findall(r"\w*(?:Load\w*|Stores?)(?=<)", launch.kernel.name_expression)
        self.functors |= {(launch.kernel.source, functor) for functor in functors}


def test_every_place_of_every_kernel():
    recorder = Recorder()
    for case in cases():
        run_kernels(random_problem(case), recorder)
    expected = {(f"{direction}_{name}.cu", "registers") for direction in ("forward", "backward") for name in STRATEGIES}
    expected = {each for each in expected if "uncached" not in each[0]}
    for source in (
        "forward_block",
        "forward_cluster",
        "backward_cluster",
        "forward_uncached",
        "backward_uncached",
        "backward_parameters",
    ):
        expected.add((f"{source}.cu", "shared memory or nowhere"))
    for direction in ("forward", "backward"):
        for dtype in ("__nv_bfloat16", "float"):
            expected.add((f"{direction}_block.cu", f"ring of {dtype}, 1 blocks a row"))
            expected |= {(f"{direction}_cluster.cu", f"ring of {dtype}, {size} blocks a row") for size in (2, 16)}
    for name in STRATEGIES:
        assert {functor for source, functor in recorder.functors if source == f"forward_{name}.cu"} == {
            "Load", "ResidualLoad", "SumLoad", "Store", "TwoStores",
        }  # fmt: skip
        assert {functor for source, functor in recorder.functors if source == f"backward_{name}.cu"} == {
            "Load", "LoadXHat", "Store", "AddStore", "SplitStore", "RecomputingStore",
        }  # fmt: skip
    # Wide rows get rings of other clusters, too.
    assert recorder.reached >= expected
    assert {source for source, _ in recorder.reached} == {source for source, _ in expected}
