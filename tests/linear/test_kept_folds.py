"""What changes the parameters between the microbatches of a step, or the layer itself: a fold that
was kept does not serve the changed ones."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from linear_cases import DEVICES  # noqa: E402

from cupynorm import CurrentScaling, LayerNormLinear, fp8_autocast  # noqa: E402

WIDTH = 24


def in_place(layer, name):
    with torch.no_grad():
        layer.get_parameter(name).add_(0.5)


def in_inference_mode(layer, name):
    with torch.inference_mode():
        layer.get_parameter(name).mul_(2.0)


def by_detach(layer, name):
    layer.get_parameter(name).detach().sub_(1.0)


def replaced_data(layer, name):
    parameter = layer.get_parameter(name)
    parameter.data = parameter.data * 3.0


def turned(layer, name):
    """The same memory, of the same version, with other strides."""
    parameter = layer.get_parameter(name)
    parameter.data = parameter.data.flip(0) if parameter.ndim == 1 else parameter.data.t()


def negated(layer, name):
    """The same memory, of the same version, with a mark."""
    parameter = layer.get_parameter(name)
    parameter.data = torch._neg_view(parameter.data)


def other_parameter(layer, name):
    setattr(layer, name, torch.nn.Parameter(layer.get_parameter(name).detach() - 0.25))


def other_in_inference_mode(layer, name):
    with torch.inference_mode():
        other_parameter(layer, name)


def loaded(layer, name):
    state = {key: torch.randn_like(value) for key, value in layer.named_parameters()}
    layer.load_state_dict(state, strict=False)


def assigned(layer, name):
    state = {key: torch.randn_like(value) for key, value in layer.named_parameters()}
    layer.load_state_dict(state, strict=False, assign=True)


def stepped(layer, name):
    layer.get_parameter(name).grad = torch.ones_like(layer.get_parameter(name))
    torch.optim.Adam([layer.get_parameter(name)], lr=0.1).step()


def zero_centered(layer, name):
    layer.zero_centered_gamma = not layer.zero_centered_gamma


def without_mean(layer, name):
    layer.normalization = "RMSNorm"


def there_and_back(layer, name):
    layer.double()
    with torch.no_grad():
        layer.get_parameter(name).div_(3.0)
    layer.float()


CHANGES = (
    in_place,
    in_inference_mode,
    by_detach,
    replaced_data,
    turned,
    negated,
    other_parameter,
    other_in_inference_mode,
    loaded,
    assigned,
    stepped,
    zero_centered,
    without_mean,
    there_and_back,
)


def make(device):
    torch.manual_seed(0)
    layer = LayerNormLinear(WIDTH, WIDTH, fused="fold", device=device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("name", ["weight", "bias", "layer_norm_weight", "layer_norm_bias"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("device", DEVICES)
def test_a_kept_fold_is_that_of_the_parameters(device, change, name, is_recorded):
    if is_recorded and change is other_in_inference_mode:
        pytest.skip("torch records no inference tensor")
    layer = make(device)
    x = torch.randn(5, WIDTH, device=device)
    with torch.set_grad_enabled(is_recorded):
        for first in (True, False):
            before = layer(x, is_first_microbatch=first)
        change(layer, name)
        after = layer(x, is_first_microbatch=False)
        layer.fused = None
        expected = layer(x)
    torch.testing.assert_close(after, expected, rtol=2.0**-16, atol=2.0**-16)
    assert not torch.allclose(after, before, rtol=2.0**-8, atol=2.0**-8)


@pytest.mark.parametrize("change", [turned, negated], ids=lambda change: change.__name__)
def test_a_fold_without_microbatches_is_that_of_the_same_memory_in_another_layout(change):
    layer = make("cpu")
    x = torch.randn(5, WIDTH)
    with torch.no_grad():
        layer(x)
        change(layer, "weight")
        after = layer(x)
        layer.fused = None
        torch.testing.assert_close(after, layer(x), rtol=2.0**-16, atol=2.0**-16)


def test_another_way_to_fuse_makes_another_fold():
    layer = make("cpu")
    x = torch.randn(5, WIDTH)
    with torch.no_grad():
        layer(x, is_first_microbatch=True)
        kept = layer._folded
        layer(x, is_first_microbatch=False)
        assert layer._folded is kept
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                assert layer(x, is_first_microbatch=False).dtype == dtype


WAYS = ("fold", "fp8")


def kept_by(layer, way):
    return layer._folded if way == "fold" else layer._fp8_weight[-1]


def region_of(way):
    return fp8_autocast(way == "fp8", CurrentScaling())


def make_on_gpu(way):
    layer = make("cuda")
    layer.fused = "fold" if way == "fold" else None
    return layer, torch.randn(16, WIDTH, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_another_stream_makes_a_weight_of_its_own(way):
    """It would read the first one before that is written."""
    layer, x = make_on_gpu(way)
    with torch.no_grad(), region_of(way):
        layer(x, is_first_microbatch=True)
        kept = kept_by(layer, way)
        layer(x, is_first_microbatch=False)
        assert kept_by(layer, way) is kept
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            layer(x, is_first_microbatch=False)
        torch.cuda.synchronize()
        assert kept_by(layer, way) is not kept


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_a_weight_of_a_capture_is_not_used_outside_of_it(way):
    """Its memory is written by replays alone, and those read new parameters."""
    layer, x = make_on_gpu(way)
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.no_grad(), region_of(way):
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
