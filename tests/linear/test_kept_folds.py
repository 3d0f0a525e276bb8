"""Folds of fused="kernel" that are kept, between the microbatches of a step and in inference: they
do not serve changed parameters, or a changed layer."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
from linear_bounds import draw

import cupynorm

torch = pytest.importorskip("torch")

from linear_cases import CPU, DEVICES, SPLIT, call, leaves  # noqa: E402

from cupynorm import CurrentScaling, LayerNormLinear, fp8_autocast  # noqa: E402
from cupynorm.linear import fold as folding  # noqa: E402

WIDTH = 24
GPU_SHAPE = (8192, 64, 1024)  # rows, in_features and out_features that the kernel computes


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


def make():
    torch.manual_seed(0)
    layer = LayerNormLinear(WIDTH, WIDTH, fused="kernel", **CPU)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("name", ["weight", "bias", "layer_norm_weight", "layer_norm_bias"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.usefixtures("folds")
def test_a_kept_fold_is_that_of_the_parameters(change, name, is_recorded):
    if is_recorded and change is other_in_inference_mode:
        pytest.skip("torch records no inference tensor")
    layer = make()
    x = torch.randn(5, WIDTH)
    with torch.set_grad_enabled(is_recorded):
        for first in (True, False):
            before = layer(x, is_first_microbatch=first)
        change(layer, name)
        after = layer(x, is_first_microbatch=False)
        layer.fused = None
        expected = layer(x)
    torch.testing.assert_close(after, expected, rtol=2.0**-16, atol=2.0**-16)
    assert not torch.allclose(after, before, rtol=2.0**-8, atol=2.0**-8)


@pytest.mark.usefixtures("folds")
@pytest.mark.parametrize("change", [turned, negated], ids=lambda change: change.__name__)
def test_a_fold_without_microbatches_is_that_of_the_same_memory_in_another_layout(change):
    layer = make()
    x = torch.randn(5, WIDTH)
    with torch.no_grad():
        layer(x)
        change(layer, "weight")
        after = layer(x)
        layer.fused = None
        torch.testing.assert_close(after, layer(x), rtol=2.0**-16, atol=2.0**-16)


@pytest.mark.usefixtures("folds")
def test_another_dtype_makes_another_fold():
    layer = make()
    x = torch.randn(5, WIDTH)
    with torch.no_grad():
        layer(x, is_first_microbatch=True)
        kept = layer._folded
        layer(x, is_first_microbatch=False)
        assert layer._folded is kept
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                assert layer(x, is_first_microbatch=False).dtype == dtype


def test_a_fold_is_kept_between_microbatches(folds):
    module = LayerNormLinear(24, 16, fused="kernel", parameters_split=SPLIT, **CPU)
    x = torch.arange(72.0).reshape(3, 24).sin()
    expected = module(x)
    folds.clear()
    for first, times in ((False, 1), (False, 1), (True, 2), (False, 2), (None, 3), (None, 4)):
        y = module(x, is_first_microbatch=first)
        with torch.no_grad():
            assert torch.equal(module(x, is_first_microbatch=False), expected)
        y.sum().backward()
        assert torch.equal(y, expected) and len(folds) == times, first
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x, is_first_microbatch=False).dtype == torch.bfloat16 and len(folds) == 5
    assert module.double()._folded is None and copy.deepcopy(module)._folded is None


@pytest.mark.parametrize(
    "split",
    (None, pytest.param({"q_": 8, "k": 4, "v": 4}, marks=pytest.mark.slow)),
    ids=("whole", "split"),
)
def test_a_fold_is_kept_in_inference_until_a_parameter_changes(folds, split):
    torch.manual_seed(0)  # the bound below is that of most draws, not of all
    module = LayerNormLinear(24, 16, fused="kernel", parameters_split=split, **CPU)
    plain = LayerNormLinear(24, 16, parameters_split=split, **CPU)
    x = torch.randn(4, 24)

    def runs(times: int) -> None:
        """Checks two calls, which fold that many times."""
        folds.clear()
        plain.load_state_dict(module.state_dict())
        with torch.no_grad():
            y = module(x)
            assert torch.equal(module(x), y) and len(folds) == times
            torch.testing.assert_close(y, plain(x), rtol=2.0**-18, atol=2.0**-18)

    runs(1)
    runs(0)
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            parameter.add_(0.5)
        runs(1)
        parameter.data = parameter.data * 2
        runs(1)
        setattr(module, name, torch.nn.Parameter(parameter.detach() + 0.25))
        runs(1)
        runs(0)
    module.load_state_dict(
        {
            name: torch.randn_like(value)
            for name, value in module.state_dict().items()
            if "extra" not in name
        },
        strict=False,
    )
    runs(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x).sum().backward()
    optimizer.step()
    runs(1)
    module(x).sum().backward()
    for parameter in module.parameters():
        parameter.data.mul_(0.5)  # as an optimizer that torch does not record
    runs(1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        folds.clear()
        assert module(x).dtype == torch.bfloat16 and len(folds) == 1
    module.double().float()
    runs(1)
    module.get_parameter(module.weight_names[0]).data.mul_(
        2
    )  # not noticed without is_first_microbatch
    folds.clear()
    with torch.no_grad():
        module(x)
        assert not folds
        module(x, is_first_microbatch=True)
    runs(1)


@pytest.mark.parametrize("options", ({"fused": True}, {"foreach": True}), ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_of_an_optimizer_drops_folds(device, request, options):
    """Fused optimizers do not change the versions of parameters."""
    shape = GPU_SHAPE
    if device == "cpu":
        shape = (5, 64, 16)
        request.getfixturevalue("folds")
    num_rows, in_features, out_features = shape
    module = LayerNormLinear(
        in_features, out_features, fused="kernel", params_dtype=torch.bfloat16, device=device
    )
    x = torch.randn(num_rows, in_features, dtype=torch.bfloat16, device=device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, **options)
    module(x).sum().backward()
    with torch.no_grad():
        before = module(x)
        optimizer.step()
        after = module(x)
        expected = module(x, is_first_microbatch=True)
    assert torch.equal(after, expected) and not torch.equal(after, before)


def test_a_fold_of_the_functional_form_is_freed_with_its_weight(folds):
    problem = draw()
    given = leaves(problem)
    with torch.no_grad():
        first = call(problem, given, fused="kernel")
        assert torch.equal(call(problem, given, fused="kernel"), first) and len(folds) == 1
        call(problem, given | {"norm_weight": given["norm_weight"].clone()}, fused="kernel")
        call(problem, given | {"norm_bias": None}, fused="kernel")
        zero_centered = cupynorm.layer_norm_linear(
            given["x"],
            given["norm_weight"] - 1,
            given["norm_bias"],
            given["weight"],
            given["bias"],
            zero_centered_weight=True,
            fused="kernel",
        )
        torch.testing.assert_close(zero_centered, first, rtol=2.0**-18, atol=2.0**-18)
        assert len(folds) == 4
        kept = weakref.ref(folding._cache[given["weight"]].folded.weight)
        folds.clear()
        assert kept() is not None
        given.clear()
        gc.collect()
        assert kept() is None
    with torch.inference_mode():
        given = leaves(problem)
        assert (
            torch.equal(call(problem, given, fused="kernel"), call(problem, given, fused="kernel"))
            and len(folds) == 2
        )


# On a GPU.

WAYS = ("kernel", "fp8")


def kept_by(layer, way):
    return layer._folded if way == "kernel" else layer._fp8_weight[-1]


def region_of(way):
    return fp8_autocast(way == "fp8", CurrentScaling())


def make_on_gpu(way):
    if way == "kernel" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    num_rows, *features = GPU_SHAPE
    fused = "kernel" if way == "kernel" else None
    layer = LayerNormLinear(*features, fused=fused, params_dtype=torch.bfloat16)
    return layer, torch.randn(num_rows, features[0], device="cuda", dtype=torch.bfloat16)


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
