"""Tensors, calls and modules for the tests of layer_norm_linear and LayerNormLinear."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from linear_bounds import LinearProblem, draw, exact

import cupynorm
from cupynorm.gpu import arrays

torch = pytest.importorskip("torch")

from cupynorm.linear import one_kernel  # noqa: E402  (imports torch)

NORMS = ("layer_norm", "rms_norm")
NORMALIZATION = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WAYS = ({}, {"save_normalized": True})
CPU = {"device": "cpu"}


def tensor(values, dtype="float64", device="cpu", grad=False):
    return (
        None
        if values is None
        else arrays.from_float64(values, dtype, torch.empty(0)).to(device).requires_grad_(grad)
    )


def leaves(problem: LinearProblem, device="cpu") -> dict[str, torch.Tensor | None]:
    own = problem.norm_dtype or problem.dtype
    names = ("x", "norm_weight", "norm_bias", "weight", "bias", "residual")
    return {
        name: tensor(
            getattr(problem, name), own if "norm" in name else problem.dtype, device, grad=True
        )
        for name in names
    }


def call(problem: LinearProblem, given, **options):
    options = {
        "zero_centered_weight": problem.zero_centered_weight,
        "residual": given["residual"],
        **options,
    }
    if problem.centered:
        return cupynorm.layer_norm_linear(
            given["x"],
            given["norm_weight"],
            given["norm_bias"],
            given["weight"],
            given["bias"],
            problem.eps,
            **options,
        )
    return cupynorm.rms_norm_linear(
        given["x"],
        given["norm_weight"],
        given["weight"],
        given["bias"],
        problem.eps,
        norm_bias=given["norm_bias"],
        **options,
    )


def as_float64(named) -> dict[str, np.ndarray]:
    return {
        name: value.detach().double().cpu().numpy()
        for name, value in named.items()
        if value is not None
    }


def recorded(problem: LinearProblem, device="cpu", run=call, **options) -> dict[str, np.ndarray]:
    """Results and gradients by autograd."""
    given = leaves(problem, device)
    asked = {
        "return_normalized": problem.dnormalized is not None,
        "return_residual": problem.dsum is not None,
    }
    results = run(problem, given, **asked, **options)
    results = results if isinstance(results, tuple) else (results,)
    names = [
        "y",
        *(["normalized"] if asked["return_normalized"] else []),
        *(["sum"] if asked["return_residual"] else []),
    ]
    outside = {"y": problem.dy, "normalized": problem.dnormalized, "sum": problem.dsum}
    torch.autograd.backward(
        results, [tensor(outside[name], problem.dtype, device) for name in names]
    )
    gradients = {f"d{name}": value.grad for name, value in given.items() if value is not None}
    if problem.residual is not None:
        assert torch.equal(gradients.pop("dresidual"), gradients["dx"])
    return as_float64(dict(zip(names, results)) | gradients)


SPLIT = {"q_": 8, "k": 4, "v": 4}


def problem_of(module, num_rows=5, dtype="float32", **options) -> LinearProblem:
    norm_name = {value: key for key, value in NORMALIZATION.items()}[module.normalization]
    without = [
        *(("norm_bias",) if norm_name == "rms_norm" else ()),
        *(() if module.use_bias else ("bias",)),
    ]
    problem = draw(
        norm_name,
        dtype,
        num_rows,
        zero_centered_weight=module.zero_centered_gamma,
        without=without,
        **options,
    )
    with torch.no_grad():
        module.layer_norm_weight.copy_(tensor(problem.norm_weight, dtype))
        if problem.norm_bias is not None:
            module.layer_norm_bias.copy_(tensor(problem.norm_bias, dtype))
    set_linear_parameters(module, problem)
    return problem


def set_linear_parameters(module, problem: LinearProblem) -> None:
    """Gives the parts of a layer's weight and bias the values of a problem."""
    sizes = np.cumsum(module.parameter_split_sizes)[:-1]
    with torch.no_grad():
        for parts, whole in ((module.weights(), problem.weight), (module.biases(), problem.bias)):
            for part, values in zip(parts, () if whole is None else np.split(whole, sizes)):
                part.copy_(tensor(values, problem.dtype))


def gradients_of(module) -> dict[str, np.ndarray]:
    found = {"dnorm_weight": module.layer_norm_weight.grad}
    if module.layer_norm_bias is not None:
        found["dnorm_bias"] = module.layer_norm_bias.grad
    found["dweight"] = torch.cat([each.grad for each in module.weights()])
    if module.use_bias:
        found["dbias"] = torch.cat([each.grad for each in module.biases()])
    return as_float64(found)


def captured(module, x) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A CUDA graph of a module's call without gradients, and the y that replays write."""
    with torch.no_grad():
        module(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x)
    return graph, y


@torch.no_grad()
def assert_replays_see_new_values(module, x) -> None:
    """New values of the weight and of x, which keep their addresses."""
    graph, y = captured(module, x)
    for factor in (1.0, 2.0):
        module.weight.mul_(factor)
        x.add_(factor)
        graph.replay()
        assert torch.equal(y, module(x))


def rms_off(problem: LinearProblem, *results: dict[str, np.ndarray]) -> list[float]:
    """The norm of the error of y of each result, beside float64."""
    y = exact(problem)[0].y
    return [np.linalg.norm(each["y"] - y) for each in results]


@contextlib.contextmanager
def kernel_on_cpu() -> Iterator[list[torch.Tensor]]:
    """One kernel on a CPU: norm_linear.cu in float64. The list has the weight of each fold."""
    made = []

    def forward(found, operands, options, weight, bias, *, purpose):
        x, parts = operands.input, (operands.norm_weight, operands.norm_bias, weight, bias)
        given = [None if each is None else each.detach().double().numpy() for each in parts]
        folded = cupynorm.reference.fold(
            *given, centered=options.centered, zero_centered_weight=options.zero_centered_weight
        )
        made.append(torch.from_numpy(folded.weight).to(options.dtype))
        rows = x.detach().double()
        mean = rows.mean(-1) if options.centered else None
        rows = rows if mean is None else rows - mean[..., None]
        rstd = (rows.square().mean(-1) + options.eps).rsqrt()
        y = rstd[..., None] * (rows @ made[-1].double().T) + torch.from_numpy(folded.bias)
        wide = torch.promote_types(x.dtype, torch.float32)
        mean, rstd = (None if each is None else each.to(wide) for each in (mean, rstd))
        return y.to(options.dtype), mean, rstd, x

    def find(operands, options, purpose):
        return None if options.fused == "plain" else "the kernel"

    with mock.patch.multiple(one_kernel, find=find, forward=forward):
        yield made
