"""Linear layers on a GPU: steps in CUDA graphs, several streams, and rows beside others."""

from __future__ import annotations

import contextlib
import copy

import pytest

torch = pytest.importorskip("torch")
from cuda_graphs import side_stream  # noqa: E402
from fp8_linear_cases import RECIPES, make  # noqa: E402

from cupynorm import LayerNormLinear, Linear, fp8_autocast  # noqa: E402
from cupynorm.recipes import BlockScaling, CurrentScaling  # noqa: E402

pytestmark = pytest.mark.gpu
PLACE = {"device": "cuda", "dtype": torch.bfloat16}


def linear():
    return Linear(256, 128, **PLACE)


def norm_linear():
    return make(64, 256, 128, device="cuda")[0]


@pytest.mark.parametrize("make_layer", (norm_linear, linear))
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_steps_in_a_cuda_graph(recipe, make_layer):
    """Replays see new inputs, gradients and parameters."""
    module = make_layer()
    twin = copy.deepcopy(module)
    x, dy = torch.randn(64, 256, **PLACE, requires_grad=True), torch.randn(64, 128, **PLACE)

    def run(module):
        module.zero_grad(set_to_none=False)
        with fp8_autocast(recipe=recipe):
            y = module(x)
        y.backward(dy)
        return y

    with side_stream():
        for _ in range(3):
            run(module), run(twin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(module)
    for size in (1.0, 20.0, 0.1):
        with torch.no_grad():
            x.copy_(torch.randn_like(x) * size)
            dy.copy_(torch.randn_like(dy) * size)
            for pair in zip(module.parameters(), twin.parameters()):
                pair[0].mul_(1.5)
                pair[1].copy_(pair[0])
        graph.replay()
        assert torch.equal(y, run(twin))
        for ours, theirs in zip(module.parameters(), twin.parameters()):
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("num_rows", (2, 5, 700))
@pytest.mark.parametrize("way", (None, "kernel", CurrentScaling(), BlockScaling()), ids=str)
def test_one_layer_on_several_streams(way, num_rows):
    in_8_bits = way is not None and not isinstance(way, str)
    module = make(64, 256, 128, device="cuda", fused=None if in_8_bits else way)[0]
    region = fp8_autocast(recipe=way) if in_8_bits else contextlib.nullcontext()
    inputs = torch.randn(4, num_rows, 256, **PLACE)
    expected, streams, made = [], [torch.cuda.Stream() for _ in inputs], []
    with torch.no_grad(), region:
        for x in inputs:
            expected.append(module(x))
        torch.cuda.synchronize()
        for x, stream in zip(inputs, streams):
            with torch.cuda.stream(stream):
                made.append(module(x))
    torch.cuda.synchronize()
    assert all(map(torch.equal, made, expected))


@pytest.mark.parametrize("num_rows", (2, 16, 300, 8192))
@pytest.mark.parametrize("fused", (None, "kernel"))
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_a_nan_stays_in_its_row(value, fused, num_rows):
    module = make(64, 256, 1024, device="cuda", fused=fused)[0]
    x = torch.randn(num_rows, 256, **PLACE)
    with torch.no_grad():
        y = module(x)
        x[num_rows // 2, 7] = value
        spoilt = module(x)
    assert spoilt[num_rows // 2].isnan().all()
    others = torch.arange(num_rows, device="cuda") != num_rows // 2
    assert torch.equal(spoilt[others], y[others]) and not y.isnan().any()


def kept_weight():
    """A layer in 8 bits whose quantised weight is kept, and its input."""
    layer = LayerNormLinear(64, 1024, params_dtype=torch.bfloat16)
    return layer, torch.randn(8192, 64, **PLACE)


def test_another_stream_makes_a_weight_of_its_own():
    """It would read the first one before that is written."""
    layer, x = kept_weight()
    with torch.no_grad(), fp8_autocast(recipe=CurrentScaling()):
        layer(x, is_first_microbatch=True)
        kept = layer._fp8.weight[-1]
        layer(x, is_first_microbatch=False)
        assert layer._fp8.weight[-1] is kept
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            layer(x, is_first_microbatch=False)
        torch.cuda.synchronize()
        assert layer._fp8.weight[-1] is not kept


def test_a_weight_of_a_capture_is_not_used_outside_of_it():
    """Its memory is written by replays alone, and those read new parameters."""
    layer, x = kept_weight()
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.no_grad(), fp8_autocast(recipe=CurrentScaling()):
        expected = layer(x, is_first_microbatch=True)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            results += [layer(x, is_first_microbatch=False) for _ in range(2)]
        for each in (layer(x, is_first_microbatch=False), layer(x)):
            torch.testing.assert_close(each, expected)
        layer.weight.mul_(2.0)
        expected = layer(x)
        graph.replay()
        for each in results:
            torch.testing.assert_close(each, expected)
