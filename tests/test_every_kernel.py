"""What compute-sanitizer is given (every_kernel.py) reaches every kernel and every place in which its rows can wait."""

from __future__ import annotations

from every_kernel import cases

from cupynorm.dispatch import STRATEGIES
from cupynorm.gradient_check import CpuMachine, random_problem, run_kernels


class Recorder(CpuMachine):
    """Plans as for an H200 and runs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: set[tuple[str, str]] = set()

    def launch(self, launch, words) -> None:
        tile = launch.tile
        place = "registers" if tile.packs_per_thread else "bulk" if tile.bulk else "threads"
        self.reached.add((launch.kernel.source, place))


def test_every_place_of_every_kernel():
    recorder = Recorder()
    for case in cases():
        run_kernels(random_problem(case), recorder)
    expected = {(f"{direction}_{name}.cu", "registers") for direction in ("forward", "backward") for name in STRATEGIES}
    expected = {each for each in expected if "uncached" not in each[0]}
    expected |= {("forward_uncached.cu", "threads"), ("backward_uncached.cu", "threads"), ("backward_parameters.cu", "threads")}
    # Rows in shared memory, copied by the threads or by the copy engine.
    for source in ("forward_block.cu", "forward_cluster.cu", "backward_cluster.cu"):
        expected |= {(source, "threads"), (source, "bulk")}
    assert recorder.reached == expected
