"""layer_norm_linear with a folded weight: values, kept folds and errors."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from linear_bounds import LinearProblem, assert_right, draw

import cupynorm
from cupynorm.check.activations import read
from cupynorm.dtypes import DTYPES, decode, encode

torch = pytest.importorskip("torch")

from linear_cases import (  # noqa: E402
    CPU,
    DEVICES,
    NORMS,
    SPLIT,
    as_float64,
    call,
    captured,
    leaves,
    recorded,
    tensor,
)

from cupynorm import LayerNormLinear  # noqa: E402
from cupynorm.linear import fold as folding  # noqa: E402  (imports torch)

pytestmark = pytest.mark.usefixtures("sums_in_float32")


@pytest.mark.parametrize("zero_centered_weight", (False, True))
@pytest.mark.parametrize("norm_name", NORMS)
def test_fold_in_float64_is_the_reference(norm_name, zero_centered_weight):
    problem = draw(norm_name, "float64", zero_centered_weight=zero_centered_weight)
    assert_right(problem, recorded(problem, fused="fold"), ("normalized", "sum"))
    given = leaves(problem)
    folded = folding.fold(
        given["norm_weight"],
        given["norm_bias"],
        given["weight"],
        given["bias"],
        centered=problem.centered,
        zero_centered_weight=zero_centered_weight,
    )
    truth = cupynorm.reference.fold(
        problem.norm_weight,
        problem.norm_bias,
        problem.weight,
        problem.bias,
        centered=problem.centered,
        zero_centered_weight=zero_centered_weight,
    )
    np.testing.assert_allclose(folded.weight.detach().numpy(), truth.weight, rtol=0, atol=1e-14)
    np.testing.assert_allclose(folded.bias.detach().numpy(), truth.bias, rtol=0, atol=1e-13)
    assert (folded.sums is None) == (norm_name == "rms_norm")


def test_a_fold_is_kept_between_microbatches(monkeypatch):
    made, plain = [], folding.fold
    monkeypatch.setattr(
        folding, "fold", lambda *given, **options: made.append(1) or plain(*given, **options)
    )
    module = LayerNormLinear(24, 16, fused="fold", parameters_split=SPLIT, **CPU)
    x = torch.arange(72.0).reshape(3, 24).sin()
    expected = module(x)
    made.clear()
    for first, times in ((False, 1), (False, 1), (True, 2), (False, 2), (None, 3), (None, 4)):
        y = module(x, is_first_microbatch=first)
        with torch.no_grad():
            assert torch.equal(module(x, is_first_microbatch=False), expected)
        y.sum().backward()
        assert torch.equal(y, expected) and len(made) == times, first
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x, is_first_microbatch=False).dtype == torch.bfloat16 and len(made) == 5
    assert module.double()._folded is None and copy.deepcopy(module)._folded is None


@pytest.fixture
def folds(monkeypatch) -> list:
    """The arguments of each fold."""
    made, plain = [], folding.fold
    monkeypatch.setattr(
        folding, "fold", lambda *given, **options: made.append(given) or plain(*given, **options)
    )
    return made


@pytest.mark.parametrize(
    "split",
    (None, pytest.param({"q_": 8, "k": 4, "v": 4}, marks=pytest.mark.slow)),
    ids=("whole", "split"),
)
def test_a_fold_is_kept_in_inference_until_a_parameter_changes(folds, split):
    torch.manual_seed(0)  # the bound below is that of most draws, not of all
    module = LayerNormLinear(24, 16, fused="fold", parameters_split=split, **CPU)
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
@pytest.mark.parametrize("fused", ("fold", "kernel"))
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_of_an_optimizer_drops_folds(device, fused, options):
    """Fused optimizers do not change the versions of parameters."""
    shape = (8192, 64, 1024) if device == "cuda" else (5, 64, 16)  # which the kernel computes
    num_rows, in_features, out_features = shape
    module = LayerNormLinear(
        in_features, out_features, fused=fused, params_dtype=torch.bfloat16, device=device
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
        first = call(problem, given, fused="fold")
        assert torch.equal(call(problem, given, fused="fold"), first) and len(folds) == 1
        call(problem, given | {"norm_weight": given["norm_weight"].clone()}, fused="fold")
        call(problem, given | {"norm_bias": None}, fused="fold")
        zero_centered = cupynorm.layer_norm_linear(
            given["x"],
            given["norm_weight"] - 1,
            given["norm_bias"],
            given["weight"],
            given["bias"],
            zero_centered_weight=True,
            fused="fold",
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
            torch.equal(call(problem, given, fused="fold"), call(problem, given, fused="fold"))
            and len(folds) == 2
        )


@pytest.mark.gpu
def test_each_replay_of_a_graph_folds_again():
    module = LayerNormLinear(64, 32, fused="fold", params_dtype=torch.bfloat16)
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    graph, y = captured(module, x)
    with torch.no_grad():
        for factor in (1.0, 2.0):
            module.weight.mul_(factor)
            graph.replay()
            assert torch.equal(y, module(x))
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
            assert torch.equal(module(x), y)
        torch.cuda.synchronize()


def folded_errors(x, norm_weight, norm_bias, weight, eps, dtype):
    """Errors of the plain and the folded path, and the bound of fold's docstring."""
    x, norm_weight, norm_bias, weight = (
        decode(encode(each, dtype), dtype) for each in (x, norm_weight, norm_bias, weight)
    )
    problem = LinearProblem(
        "layer_norm",
        dtype,
        x,
        norm_weight,
        norm_bias,
        weight,
        None,
        np.zeros((len(x), len(weight))),
        eps=eps,
    )
    truth = cupynorm.reference.norm_linear(x, norm_weight, norm_bias, weight, None, eps)
    given = {
        name: value if value is None else value.detach() for name, value in leaves(problem).items()
    }
    plain, folded = (
        as_float64({"y": call(problem, given, fused=fused)})["y"] for fused in (None, "fold")
    )
    folded_weight = np.abs(cupynorm.reference.fold(norm_weight, norm_bias, weight).weight)
    centered = np.abs(x - truth.mean[:, None])
    half_ulp, u = DTYPES[dtype].half_ulp, 2.0**-24
    allowed = truth.rstd[:, None] * (
        half_ulp * centered @ folded_weight.T + (x.shape[1] + 2) * u * (np.abs(x) @ folded_weight.T)
    )
    allowed = (
        allowed
        + half_ulp * np.abs(truth.y)
        + 8 * u * (np.abs(truth.y) + np.abs(weight) @ np.abs(norm_bias))
    )
    return np.abs(plain - truth.y), np.abs(folded - truth.y), allowed


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("at", range(3))
def test_numerics_of_fold_on_real_activations(at, dtype):
    """With outliers of 36 standard deviations.

    Errors are within the bound, and over all elements at most 1.1 times those of the plain path.
    """
    layer = list(read(Path(__file__).parents[1] / "data" / "minilm_layer_norms.npz"))[at]
    weight = (
        np.random.default_rng(0).standard_normal((64, layer.x.shape[1])) / layer.x.shape[1] ** 0.5
    )
    plain, folded, allowed = folded_errors(
        layer.x, layer.weight, layer.bias, weight, layer.eps, dtype
    )
    assert (folded <= allowed).all()
    assert np.sqrt((folded**2).mean()) <= 1.1 * np.sqrt((plain**2).mean())


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_numerics_of_fold_under_a_large_mean(dtype):
    """With a mean of 64 standard deviations.

    In bfloat16 the errors are about those of the plain path, because the sums correct for the mean.
    """
    generator = np.random.default_rng(1)
    x = decode(encode(generator.standard_normal((16, 256)) + 64.0, dtype), dtype)
    norm_weight, norm_bias = generator.uniform(0.5, 2, 256), generator.standard_normal(256)
    weight = generator.standard_normal((32, 256)) / 16
    plain, folded, allowed = folded_errors(x, norm_weight, norm_bias, weight, 1e-5, dtype)
    assert (folded <= allowed).all()
    if dtype == "bfloat16":
        assert np.sqrt((folded**2).mean()) <= 1.1 * np.sqrt((plain**2).mean())
    without = folding.fold(*(tensor(each, dtype) for each in (norm_weight, norm_bias, weight)))
    x = tensor(x, dtype)
    mean, rstd = (
        tensor(each, "float32") for each in cupynorm.layer_norm_forward(x.double().numpy())[1:3]
    )
    uncorrected = (
        folding.project_folded(x, mean, rstd, without._replace(sums=None)).double().numpy()
    )
    off = np.abs(uncorrected - folding.project_folded(x, mean, rstd, without).double().numpy())
    # The sums of the rounded rows correct by many times the error that is left.
    if dtype == "bfloat16":
        assert off.max() > 4 * folded.max()
