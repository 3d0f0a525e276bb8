"""Traps t13 to t19: dtypes, batches, devices and sums on which other libraries failed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from array_libraries import LIBRARIES, TORCH, api, api_results, library, loaded_torch
from trap_checks import H200, as_dtype, assert_right, check, run_call

import cupynorm
from cupynorm import Launch
from cupynorm.check.bounds import expect
from cupynorm.check.cases import NORMS, Case, random_problem
from cupynorm.check.kernels import CpuMachine
from cupynorm.check.results import judge
from cupynorm.check.run import run_kernels
from cupynorm.dtypes import DTYPES, decode, encode
from cupynorm.gpu.arrays import Rows
from cupynorm.norm.arguments import backward_call
from cupynorm.norm.request import BackwardOptions
from cupynorm.plan import dispatch
from cupynorm.plan.problem import Layout
from cupynorm.plan.problem import Problem as DispatchProblem
from cupynorm.plan.strategies import STRATEGIES


@pytest.mark.parametrize("weight, bias", [(None, None), ("w", None), ("w", "w")])
@pytest.mark.parametrize("kind", ["same", "float32"])
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("name", TORCH)
def test_t13_dtypes_of_x_and_weight(name, x, kind, weight, bias):
    """Elsewhere a weight of another dtype than x was misread or refused.

    Here all pairs of dtypes agree with float64.
    """
    case = Case(
        "layer_norm", 5, 48, x, weight=kind if weight else None, bias=kind if bias else None
    )
    problem = random_problem(case)
    assert_right(problem, api_results(problem, library(name)))


@pytest.mark.slow
def test_t13_weights_of_two_dtypes_in_one_process(where):
    """Elsewhere a kernel cached for one weight dtype was used for the next.

    Here the dtype is part of the kernel's name, so each dtype has its own kernel.
    """
    for weight in ("bfloat16", "float32", "bfloat16", "float16"):
        check(
            random_problem(Case("layer_norm", 4, 256, "bfloat16", weight=weight, bias=weight)),
            where,
        )
    problem = DispatchProblem(
        "forward", True, 256, "bfloat16", Layout.of_new_arrays(256), y="bfloat16", weight="bfloat16"
    )
    kernels = {dispatch.choose(replace(problem, weight=dtype), H200).kernel for dtype in DTYPES}
    assert len(kernels) == len(DTYPES)


@pytest.mark.parametrize("num_rows", [1, 7, 132, 4097])
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_t14_row_alone_and_in_a_batch(norm_name, name, num_rows):
    """Elsewhere the kernel depended on the batch size, and so did the bits of a row.

    Here a row has the same bits alone and in any batch.
    """
    lib = library(name)
    problem = random_problem(Case(norm_name, num_rows, 100, "float32"))
    weight, bias = lib.put(problem.weight, "float32"), lib.put(problem.bias, "float32")

    def y_of(x):
        x = lib.put(x, "float32")
        return lib.get(api(norm_name, "forward")(x, 100, weight, bias=bias).y)

    together = y_of(problem.x)
    for row in {0, num_rows // 2, num_rows - 1}:
        alone = y_of(problem.x[row : row + 1])
        assert alone[0].tobytes() == together[row].tobytes()


@pytest.mark.parametrize("name", LIBRARIES)
def test_t15_twenty_backwards_give_the_same_bits(name):
    """Elsewhere atomics summed dweight in any order, so its last bits changed.

    Here sums have a fixed order, and twenty runs give the same bits.
    """
    problem = random_problem(Case("layer_norm", 1030, 100, "float16"))
    first, *others = (
        {key: value.tobytes() for key, value in api_results(problem, library(name)).items()}
        for _ in range(20)
    )
    assert len(others) == 19 and all(other == first for other in others)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_t16_gradient_in_one_column_only(strategy, where):
    """Elsewhere dweight and dbias were swapped or written to other columns.

    Here a gradient in one column reaches that column of dbias and dweight alone.
    """
    problem = random_problem(Case("layer_norm", 6, 40, "float32", strategy=strategy))
    for col in (0, 17, 39):
        problem.dy[:] = 0
        problem.dy[:, col] = 1
        results = check(problem, where)
        others = np.arange(40) != col
        assert results["dbias"][col] == 6 and (results["dbias"][others] == 0).all()
        assert results["dweight"][col] != 6 and (results["dweight"][others] == 0).all()


@pytest.mark.parametrize("name", TORCH)
def test_t16_gradients_share_no_memory(name):
    """Elsewhere gradients shared memory, or backward overwrote its inputs.

    Here every gradient has its own memory, and inputs keep their values.
    """
    torch, lib = loaded_torch(), library(name)
    problem = random_problem(Case("layer_norm", 6, 40, "float32", residual=True))
    names = ("x", "weight", "bias", "residual")
    leaves = {key: lib.put(getattr(problem, key), "float32").requires_grad_() for key in names}
    dy = lib.put(problem.dy, "float32")
    x, weight, bias, residual = leaves.values()
    y, added = cupynorm.layer_norm(x, 40, weight, bias, residual=residual, return_residual=True)
    torch.autograd.backward([y, added], [dy, dy])
    assert (lib.get(dy) == problem.dy).all()
    for key, leaf in leaves.items():
        assert (lib.get(leaf) == getattr(problem, key)).all(), key
    pointers = [
        tensor.data_ptr()
        for tensor in (y, added, dy, *leaves.values(), *(leaf.grad for leaf in leaves.values()))
    ]
    assert len(set(pointers)) == len(pointers)
    assert torch.equal(x.grad, residual.grad)
    x.grad.zero_()
    assert residual.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "shape, normalized_shape",
    [
        ((3, 5, 40), 40),
        ((2, 3, 5, 40), (40,)),
        ((7, 6, 129), (6, 129)),
        pytest.param((65537, 8, 16), (8, 16), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", TORCH)
def test_t17_ranks_and_normalized_shapes(name, shape, normalized_shape):
    """Elsewhere several normalized dimensions were flattened wrongly, or only the last was used.

    Here gradients have the shapes of their tensors and agree with float64.
    """
    lib = library(name)
    normalized = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    num_cols = int(np.prod(normalized))
    num_rows = int(np.prod(shape)) // num_cols
    problem = random_problem(Case("layer_norm", num_rows, num_cols, "float32"))
    x, dy = (lib.put(values.reshape(shape), "float32") for values in (problem.x, problem.dy))
    weight, bias = (
        lib.put(values.reshape(normalized), "float32") for values in (problem.weight, problem.bias)
    )
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    y = cupynorm.layer_norm(x, normalized_shape, weight, bias)
    gradients = loaded_torch().autograd.grad(y, leaves, dy)
    shapes = [tuple(each.shape) for each in (y, *gradients)]
    assert shapes == [shape, shape, normalized, normalized]
    results = dict(
        zip(("y", "dx", "dweight", "dbias"), (lib.get(each) for each in (y, *gradients)))
    )
    results = {
        key: values.reshape(problem.x.shape if key in ("y", "dx") else -1)
        for key, values in results.items()
    }
    assert_right(problem, results)


@pytest.mark.multi_gpu
def test_t18_device_that_is_not_current():
    """Elsewhere kernels ran on the current device, not on that of the tensors.

    Here the device of the tensors is used, and the current device stays as it was.
    """
    torch = loaded_torch()
    torch.cuda.set_device(0)
    x = torch.randn(64, 1000, device="cuda:1")
    weight = torch.randn(1000, device="cuda:1")
    results = []
    for device in (0, 1):
        with torch.cuda.device(device):
            leaf = x.clone().requires_grad_()
            y = cupynorm.layer_norm(leaf, 1000, weight)
            (dx,) = torch.autograd.grad(y, leaf, x)
            assert torch.cuda.current_device() == device
        assert y.device == dx.device == x.device
        results.append((y, dx))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    there = cupynorm.layer_norm(x.to("cuda:0"), 1000, weight.to("cuda:0"))
    assert torch.equal(there.cpu(), results[0][0].cpu())


@pytest.mark.gpu
def test_t18_first_call_inside_a_graph_capture():
    """Elsewhere compiling or allocating during a capture broke the CUDA graph.

    Here the first call of a shape may be captured, and replays on a side stream are right.
    """
    torch = loaded_torch()
    x, dy = (torch.randn(33, 1111, device="cuda", dtype=torch.float16) for _ in range(2))
    weight = torch.randn(1111, device="cuda", dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # No other call has this shape, so its kernels are compiled during the capture.
        forward = cupynorm.layer_norm_forward(x, 1111, weight)
        backward = cupynorm.layer_norm_backward(dy, x, 1111, forward.mean, forward.rstd, weight)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.current_stream().wait_stream(stream)
        again = cupynorm.layer_norm_forward(x, 1111, weight)
        gradients = cupynorm.layer_norm_backward(dy, x, 1111, again.mean, again.rstd, weight)
        assert torch.equal(forward.y, again.y) and again.y.isfinite().all()
        assert torch.equal(backward.dx, gradients.dx) and torch.equal(
            backward.dweight, gradients.dweight
        )


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("with_dsum", [False, True])
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("norm_name", NORMS)
def test_t19_sum_with_a_residual_and_its_gradient(norm_name, name, with_dsum, dtype):
    """Elsewhere the gradient of the sum was dropped, or added after dx was rounded.

    Here the sum is rounded once to its dtype, and dsum is added to dx before its one rounding.
    """
    lib = library(name)
    problem = random_problem(Case(norm_name, 6, 40, dtype, residual=True))
    put = {
        key: lib.put(getattr(problem, key), dtype)
        for key in ("x", "dy", "weight", "bias", "residual")
    }
    forward = api(norm_name, "forward")(
        put["x"],
        40,
        put["weight"],
        bias=put["bias"],
        eps=problem.case.eps,
        residual=put["residual"],
    )
    added = as_dtype(problem.x + problem.residual, dtype)
    assert (lib.get(forward.sum) == added).all()
    dsum = as_dtype(np.random.default_rng(1).standard_normal((6, 40)), dtype) if with_dsum else None
    statistics = (forward.mean, forward.rstd) if norm_name == "layer_norm" else (forward.rstd,)
    given = None if dsum is None else lib.put(dsum, dtype)
    dx = lib.get(
        api(norm_name, "backward")(
            put["dy"], forward.sum, 40, *statistics, put["weight"], dsum=given
        ).dx
    )
    expected, allowed = expect(problem)["dx"]
    if dsum is not None:
        # dx and dsum are added before the one rounding, to the dtype of dx.
        expected = expected + dsum
        allowed = allowed + np.abs(expected) * DTYPES[dtype].half_ulp + np.abs(dsum) * 2.0**-24
    found = judge(problem.case, "dx", dx, expected, allowed)
    assert found.ok, found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_t19_gradient_of_the_sum_in_the_kernels(dtype, strategy):
    """Every strategy adds dsum to dx before the one rounding."""
    machine = CpuMachine()
    problem = random_problem(Case("layer_norm", 5, 48, dtype, strategy=strategy))
    plain = run_kernels(problem, machine)
    compute = DTYPES[dtype].compute
    dsum = as_dtype(np.random.default_rng(1).standard_normal((5, 48)), dtype)
    kept = [encode(values, dtype) for values in (problem.x, problem.dy, dsum, problem.weight)]
    kept += [encode(plain[name], compute) for name in ("mean", "rstd")]
    dx, _ = machine.empty((5, 48), dtype)
    x, dy, more, dx_rows = (Rows(array.ctypes.data, 5, 48, 48, dtype) for array in (*kept[:3], dx))
    weight = Rows(kept[3].ctypes.data, 1, 48, 48, dtype)
    tensors = {"x": x, "dy": dy, "dsum": more, "dx": dx_rows, "weight": weight}
    options = BackwardOptions(True, (48,), launch=Launch(strategy))
    statistics = {"mean": kept[4].ctypes.data, "rstd": kept[5].ctypes.data}
    run_call(machine, backward_call(machine.device, tensors, options, compute), tensors, statistics)
    expected, allowed = expect(problem)["dx"]
    expected = expected + dsum
    allowed = (
        allowed
        + np.abs(expected) * DTYPES[dtype].half_ulp
        + np.abs(dsum) * DTYPES[compute].half_ulp
    )
    found = judge(problem.case, "dx", decode(dx, dtype), expected, allowed)
    assert found.ok, found
