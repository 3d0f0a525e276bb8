"""Times a LayerNormLinear that several GPUs share: long products beside collectives, small calls.

    torchrun --nproc-per-node 2 notebooks/time_on_ranks.py

Without GPUs small shapes run on processes of the CPU, whose times mean nothing.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, distributed

import cupynorm

ON_GPUS = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if ON_GPUS else "cpu"
DTYPE = torch.bfloat16 if ON_GPUS else torch.float32
# rows, and the narrower and the wider side of the weight
SHAPES = ((8192, 8192, 28672), (4096, 4096, 12288)) if ON_GPUS else ((64, 64, 128),)
WIDTH = 8192 if ON_GPUS else 64  # of small calls
NUM_RUNS = 10 if ON_GPUS else 2
NUM_CALLS = 100 if ON_GPUS else 2
MODES = ("column", "row")


def say(*text: object) -> None:
    if distributed.get_rank() == 0:
        print(*text, flush=True)


def wait_for_all() -> None:
    if ON_GPUS:
        torch.cuda.synchronize()
    distributed.barrier()
    if ON_GPUS:
        torch.cuda.synchronize()


def slowest(value: float) -> float:
    """The largest of all ranks."""
    found: list[float] = [0.0] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return max(found)


def milliseconds(call: Callable[[], object]) -> float:
    """The median of runs that all ranks begin together, on the slowest rank."""
    times = []
    while len(times) < 3 + NUM_RUNS:
        wait_for_all()
        began = time.perf_counter()
        call()
        if ON_GPUS:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return slowest(statistics.median(times[3:]))


def microseconds_in_a_row(call: Callable[[], object]) -> tuple[float, float]:
    """Of one of many calls without a wait between them: until the host goes on, and in all."""
    for _ in range(5):
        call()
    wait_for_all()
    began = time.perf_counter()
    for _ in range(NUM_CALLS):
        call()
    on_host = time.perf_counter() - began
    if ON_GPUS:
        torch.cuda.synchronize()
    in_all = time.perf_counter() - began
    return tuple(slowest(1e6 * each / NUM_CALLS) for each in (on_host, in_all))


def make_layer(
    mode: str | None, num_in: int, num_out: int, sequence: bool
) -> cupynorm.LayerNormLinear:
    torch.manual_seed(0)
    options = {"normalization": "RMSNorm", "bias": False, "params_dtype": DTYPE, "device": DEVICE}
    options |= {"parallel_mode": mode, "sequence_parallel": sequence}
    options["tp_group"] = None if mode is None else distributed.group.WORLD
    return cupynorm.LayerNormLinear(num_in, num_out, **options)


def rows_of(layer: cupynorm.LayerNormLinear, num_rows: int) -> tuple[Tensor, Tensor]:
    """x and dy of this rank. num_rows: of the products."""
    size = distributed.get_world_size()
    of_mode = {"column": (size, 1), "row": (1, size)}
    parts = of_mode.get(layer.parallel_mode, (1, 1)) if layer.sequence_parallel else (1, 1)
    torch.manual_seed(1 + distributed.get_rank())
    x, dy = (
        torch.randn(num_rows // part, num_cols, device=DEVICE, dtype=DTYPE)
        for part, num_cols in zip(parts, (layer.in_features, layer.out_features))
    )
    return x.requires_grad_(), dy


def calls_of(
    layer: cupynorm.LayerNormLinear, x: Tensor, dy: Tensor, recipe: object = None
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Forward without gradients; forward and backward. Both return y."""

    def forward() -> Tensor:
        with torch.no_grad(), cupynorm.fp8_autocast(recipe is not None, recipe=recipe):
            return layer(x)

    def both() -> Tensor:
        x.grad = layer.weight.grad = None
        with cupynorm.fp8_autocast(recipe is not None, recipe=recipe):
            y = layer(x)
        y.backward(dy)
        return y

    return forward, both


def time_products(mode: str, shape: tuple[int, int, int], recipe: object) -> None:
    """Of a rank alone, and of the layer: forward, and forward and backward."""
    num_rows, *widths = shape
    num_in, num_out = widths if mode == "column" else widths[::-1]
    size = distributed.get_world_size()
    own = (num_in, num_out // size) if mode == "column" else (num_in // size, num_out)
    ways = {"one rank's part": (None, *own, False), "the layer": (mode, num_in, num_out, True)}
    text = []
    for way, of_layer in ways.items():
        layer = make_layer(*of_layer)
        calls = calls_of(layer, *rows_of(layer, num_rows), recipe)
        text.append(f"{way} {', '.join(f'{milliseconds(each):.2f}' for each in calls)}")
    bits = "" if recipe is None else ", 8 bits"
    say(f"{num_rows} x {num_in} x {num_out} {mode}{bits}:", "; ".join(text))


def captured(run: Callable[[], Tensor]) -> Callable[[], None]:
    """The call as a CUDA graph, whose result is compared with the call's."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            right = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = run()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, right)
    return graph.replay


def time_small_calls(mode: str, num_rows: int) -> None:
    layer = make_layer(mode, WIDTH, WIDTH, False)
    run, _ = calls_of(layer, *rows_of(layer, num_rows))
    text = "{:.0f} on the host, {:.0f} in all".format(*microseconds_in_a_row(run))
    if ON_GPUS:
        text += "; as a CUDA graph {:.0f}, {:.0f}".format(*microseconds_in_a_row(captured(run)))
    say(f"{mode}, {num_rows} rows: {text}")


def main() -> None:
    distributed.init_process_group("nccl" if ON_GPUS else "gloo")
    if ON_GPUS:
        torch.cuda.set_device(DEVICE)
    name = torch.cuda.get_device_name() if ON_GPUS else "CPU processes"
    say(f"{distributed.get_world_size()} x {name}, torch {torch.__version__}, {DTYPE}")
    say("ms: forward, forward and backward; rows x in_features x out_features, sequence parallel")
    recipe = cupynorm.recipes.DelayedScaling(amax_history_len=2)
    for shape in SHAPES:
        for mode in MODES:
            time_products(mode, shape, None)
    time_products("column", SHAPES[0], recipe)
    say(f"us: forward without gradients, {WIDTH} x {WIDTH}")
    for num_rows in (1, 256):
        for mode in MODES:
            time_small_calls(mode, num_rows)
    alone = make_layer(None, WIDTH, WIDTH // distributed.get_world_size(), False)
    on_host, _ = microseconds_in_a_row(calls_of(alone, *rows_of(alone, 1))[0])
    say(f"one rank's part, 1 row: {on_host:.0f} on the host")
    wait_for_all()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
