"""The benchmark of few rows as a decoder has them: `bench linear --graph`.

A CUDA graph holds one call a layer. Each layer has a weight of its own, and together they are
larger than the L2 cache, so that each call reads its weight from memory. As in a decoder, the next
call begins where the last one ends.

read   a device-to-device copy of half of the weight, which moves as many bytes as a read of it
time   of a replay, by CUDA events, over the number of calls; the contestants in turns
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .contestants import CONTESTANTS, GEMM, Inputs, LinearCell
from .linear import READ, LinearMeasurement, check_error, inputs_of, runner_of
from .peers import fault
from .timer import take_turns

NAMES = (GEMM, "cupynorm", "cupynorm-plain", "torch")
_FEATURES = (
    (1024, 3072),
    (2048, 6144),
    (4096, 4096),
    (5120, 5120),
    (4096, 12288),
    (8192, 8192),
    (8192, 28672),
    (4096, 128256),
)
SHAPES = tuple((rows, *features) for rows in (1, 2, 4, 16, 64) for features in _FEATURES)
_WEIGHT_BYTES = 2**29  # of all layers: ten times the L2 cache of an H200
_FEWEST_LAYERS, _SAMPLED_OUTPUTS = 3, 500


Replay = Callable[[], float]


def layers_of(cell: LinearCell, inputs: Inputs) -> list[Inputs]:
    """The inputs of each layer: a copy of the weight, all else the same."""
    from torch.nn import Parameter

    weight = inputs.weight.detach()
    count = max(_FEWEST_LAYERS, -(-_WEIGHT_BYTES // (weight.numel() * weight.element_size())))
    return [inputs._replace(weight=Parameter(weight.clone(), False)) for _ in range(count)]


def record(calls: Sequence[Callable[[], object]]) -> Replay:
    """A CUDA graph of calls. Replaying it returns the microseconds of one of them."""
    import torch

    calls[0]()  # loads kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3 / len(calls)

    return replay


def measure(
    cell: LinearCell,
    names: Sequence[str],
    runs: int,
    seed: int,
    record: Callable[[Sequence[Callable]], Replay] = record,
    device: str = "cuda",
) -> LinearMeasurement:
    """One forward cell in bfloat16. record: makes what is timed of the layers' calls."""
    layers = layers_of(cell, inputs_of(cell, device, seed))
    halves = [layer.weight.flatten()[: layer.weight.numel() // 2] for layer in layers]
    copies = [half.new_empty(half.shape) for half in halves]
    replays = {
        READ: record([lambda to=to, half=half: to.copy_(half) for to, half in zip(copies, halves)])
    }
    # float64 is slow: some outputs are compared.
    step = max(1, cell.out_features // _SAMPLED_OUTPUTS)
    sample = layers[0]._replace(weight=layers[0].weight[::step], bias=layers[0].bias[::step])
    errors: dict[str, float] = {}
    faults: dict[str, str] = {}
    for name in names:
        try:
            calls = [runner_of(cell, layer, CONTESTANTS[name]).call for layer in layers]
            errors[name] = check_error(cell, sample, name, calls[0]()[:, ::step], faults)
            replays[name] = record(calls)
        except Exception as failure:  # a failing contestant must not end the run
            faults[name] = fault(name, failure)
    samples = take_turns(_Replays(), replays, runs)
    return LinearMeasurement(cell, samples, errors, {}, faults)


class _Replays:
    """A timer of what times itself."""

    @staticmethod
    def sample(replay: Replay) -> float:
        return replay()
