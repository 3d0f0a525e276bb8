"""layer_norm_linear as torch uses it, and LayerNormLinear: arguments, parameters, returns, gradients that go elsewhere."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
from pathlib import Path

import numpy as np
import pytest
from linear_bounds import LinearProblem, assert_right, draw, expected

import cupynorm
from cupynorm.check.activations import read
from cupynorm.dtypes import DTYPES, decode, encode
from cupynorm.gpu import arrays
from cupynorm.plan.strategies import STRATEGIES

torch = pytest.importorskip("torch")
from torch.library import opcheck  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from cupynorm.linear import fold as folding  # noqa: E402  (imports torch)
from cupynorm.linear.call import Operands  # noqa: E402
from cupynorm.linear.module import LayerNormLinear  # noqa: E402
from cupynorm.norm import kept, route  # noqa: E402
from cupynorm.norm.request import BackwardOperands, BackwardOptions, BackwardRequest, Options  # noqa: E402

NORMS = ("layer_norm", "rms_norm")
NORMALIZATION = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WAYS = ({}, {"save_normalized": True}, {"fused": "fold"})
CPU = {"device": "cpu"}


@pytest.fixture(autouse=True)
def sums_in_float32():
    """A product whose sum cuBLAS splits is added in float32, as the bounds have it."""
    switches = torch.backends.cuda.matmul
    before = (
        switches.allow_bf16_reduced_precision_reduction,
        switches.allow_fp16_reduced_precision_reduction,
    )
    switches.allow_bf16_reduced_precision_reduction = (
        switches.allow_fp16_reduced_precision_reduction
    ) = False
    yield
    (
        switches.allow_bf16_reduced_precision_reduction,
        switches.allow_fp16_reduced_precision_reduction,
    ) = before


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


# -- the functional form under autograd ------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    (
        {},
        {"without": ("norm_bias", "bias")},
        {"zero_centered_weight": True, "norm_dtype": "float32"},
        {"residual": True, "dnormalized": True, "dsum": True},
    ),
    ids=str,
)
@pytest.mark.parametrize("way", WAYS[:2], ids=("recomputed", "saved"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_name", NORMS)
@pytest.mark.parametrize("device", DEVICES)
def test_values_and_gradients(device, norm_name, dtype, way, options):
    problem = draw(norm_name, dtype, **options)
    absent = tuple(
        name
        for name, there in (("normalized", problem.dnormalized), ("sum", problem.dsum))
        if there is None
    )
    assert_right(problem, recorded(problem, device, **way), absent)


@pytest.mark.parametrize("way", WAYS, ids=("recomputed", "saved", "fold"))
@pytest.mark.parametrize("norm_name", NORMS)
def test_derivatives_of_every_tensor(norm_name, way):
    problem = draw(norm_name, "float64", 3, 5, 4, residual=True)
    given = leaves(problem)
    asked = {"return_residual": True, "return_normalized": way != WAYS[2]}

    def function(*tensors):
        return call(problem, dict(zip(given, tensors)), **asked, **way)

    assert torch.autograd.gradcheck(function, tuple(given.values()))
    assert torch.autograd.gradgradcheck(function, tuple(given.values()))
    if way == {}:
        assert torch.autograd.gradcheck(function, tuple(given.values()), check_batched_grad=True)


@pytest.mark.parametrize("frozen", ("x", "norm_weight", "norm_bias", "weight", "bias"))
def test_only_wanted_gradients_are_made(frozen):
    problem = draw()
    given = leaves(problem)
    given[frozen].requires_grad_(False)
    call(problem, given).backward(tensor(problem.dy, "float32"))
    results = recorded(problem)
    for name, value in given.items():
        if name == frozen:
            assert value.grad is None
        elif value is not None:
            np.testing.assert_array_equal(value.grad.double().numpy(), results[f"d{name}"])


def count_normalizations(monkeypatch) -> list:
    made = []
    plain = route.prepare_forward

    def prepare_forward(request, purpose):
        made.append(request)
        return plain(request, purpose)

    monkeypatch.setattr(route, "prepare_forward", prepare_forward)
    return made


def saved_bytes(function) -> tuple[int, object]:
    """Bytes that autograd keeps beyond the leaves."""
    seen = {}

    def pack(saved):
        if not saved.is_leaf or not saved.requires_grad:
            seen[saved.data_ptr()] = saved.numel() * saved.element_size()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        result = function()
    return sum(seen.values()), result


def test_what_waits_for_backward(monkeypatch):
    """x, mean and rstd: 2 bytes an element in bfloat16; with save_normalized 4.
    A norm without gradients is made again by itself."""
    problem = draw(dtype="bfloat16", num_rows=64, in_features=96)
    for way, frozen, num_bytes, again in (
        ({}, (), 0, 0), ({}, ("x", "norm_weight", "norm_bias"), 2 * (64 + 2) * 96, 1),
        ({"save_normalized": True}, (), 2 * 64 * 96, 0),
    ):  # fmt: skip
        given = leaves(problem)
        for name in frozen:
            given[name].requires_grad_(False)
        found, y = saved_bytes(lambda: call(problem, given, **way))  # noqa: B023
        assert found == num_bytes + 2 * 64 * 4
        made = count_normalizations(monkeypatch)
        y.backward(torch.ones_like(y))
        assert len(made) == again
        monkeypatch.undo()
    given = leaves(problem)
    given["weight"].requires_grad_(False)  # then nobody needs the normalised tensor
    y = call(problem, given)
    made = count_normalizations(monkeypatch)
    y.backward(torch.ones_like(y))
    assert not made


@pytest.mark.parametrize("way", WAYS, ids=("recomputed", "saved", "fold"))
def test_twice_over_one_graph_and_twice_in_one_forward(way):
    problem = draw(dtype="float64")
    once, dy = recorded(problem, **way), tensor(problem.dy)
    given = leaves(problem)
    y = call(problem, given, **way)
    for _ in range(2):
        y.backward(dy, retain_graph=True)
    for name in ("x", "norm_weight", "norm_bias", "weight", "bias"):
        np.testing.assert_array_equal(given[name].grad.numpy(), 2 * once[f"d{name}"])
    given = leaves(problem)
    (call(problem, given, **way) + call(problem, given, **way)).backward(dy)
    for name in ("x", "norm_weight", "norm_bias", "weight", "bias"):
        np.testing.assert_array_equal(given[name].grad.numpy(), 2 * once[f"d{name}"])


@pytest.mark.parametrize("use_reentrant", (False, True))
@pytest.mark.parametrize("way", WAYS, ids=("recomputed", "saved", "fold"))
def test_checkpointing(way, use_reentrant):
    problem = draw("rms_norm")

    def run(problem, given, **options):
        def block(x):
            return call(problem, given | {"x": x}, **options)

        return checkpoint(block, given["x"], use_reentrant=use_reentrant)

    expected = recorded(problem, **way)
    for name, value in recorded(problem, run=run, **way).items():
        np.testing.assert_array_equal(value, expected[name])


@pytest.mark.parametrize("way", WAYS, ids=("recomputed", "saved", "fold"))
@pytest.mark.parametrize("norm_name", NORMS)
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_break(device, norm_name, way):
    problem = draw(norm_name, "float32", residual=True, dnormalized=way != WAYS[2], dsum=True)
    if way == WAYS[2]:
        problem.dnormalized = None
    torch._dynamo.reset()
    compiled = torch.compile(
        call, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor"
    )
    eager, traced = (recorded(problem, device, run=run, **way) for run in (call, compiled))
    assert set(eager) == set(traced)
    if way != WAYS[2]:
        assert_right(problem, traced, () if problem.dnormalized is not None else ("normalized",))
    for name, value in traced.items():
        if device == "cpu":
            np.testing.assert_array_equal(value, eager[name], err_msg=name)
    with torch.no_grad():
        given = leaves(problem, device)
        np.testing.assert_array_equal(
            as_float64({"y": compiled(problem, given, **way)})["y"],
            as_float64({"y": call(problem, given, **way)})["y"],
        )


@pytest.mark.parametrize("save_normalized, num_kept", ((False, 1), (True, 2)))
def test_what_waits_in_a_compiled_graph(save_normalized, num_kept):
    """As in eager mode: x, and the normalised tensor only if it was asked to be saved."""
    from functorch.compile import min_cut_rematerialization_partition, nop
    from torch._functorch.aot_autograd import aot_module_simplified

    handed = []

    def backend(module, inputs):
        def backward(graph, tensors):
            handed.extend(
                each.meta["val"] for each in graph.graph.nodes if each.op == "placeholder"
            )
            return nop(graph, tensors)

        return aot_module_simplified(
            module,
            inputs,
            fw_compiler=nop,
            bw_compiler=backward,
            partition_fn=min_cut_rematerialization_partition,
        )

    problem = draw(dtype="bfloat16", num_rows=64, in_features=96)
    torch._dynamo.reset()
    given = leaves(problem)
    call_it = torch.compile(
        lambda given: call(problem, given, save_normalized=save_normalized),
        backend=backend,
        fullgraph=True,
    )
    call_it(given).sum().backward()
    whole = [
        each for each in handed if isinstance(each, torch.Tensor) and tuple(each.shape) == (64, 96)
    ]
    assert len(whole) == num_kept


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("norm_name", NORMS)
@pytest.mark.parametrize(
    "options",
    (
        {},
        {"without": ("norm_bias",)},
        {"zero_centered_weight": True, "dsum": True, "residual": True},
    ),
    ids=str,
)
def test_one_kernel_gives_the_gradients_and_the_normalised_tensor(
    kernels, options, norm_name, compiled
):
    problem = draw(
        norm_name, "bfloat16", num_rows=7, in_features=96, norm_dtype="float32", **options
    )
    run = call
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_right(
        problem,
        recorded(problem, run=run),
        ("normalized", *(() if options.get("dsum") else ("sum",))),
    )
    names = [each.kernel.name_expression for each in kernels]
    of_bias = (
        [] if compiled else ["survey", "backward_parameters"]
    )  # torch compiles its own sum over rows
    of_norm = ["backward_warp", "backward_parameters"]
    assert [name.split("<")[0] for name in names] == ["forward_warp", *of_bias, *of_norm]
    assert "RecomputingStore<" in names[-2] and ".dx = true, .dweight = true" in names[-2]


def test_a_normalised_tensor_of_the_autocast_dtype_is_made_again(kernels):
    problem = draw(num_rows=4)
    given = leaves(problem)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(problem, given)
    y.backward(torch.ones_like(y))
    store = "RecomputingStore<Store<float, void, void, false>, __nv_bfloat16, float, float, false>"
    assert len(kernels) == 5 and store in kernels[-2].kernel.name_expression
    truth = expected(problem)["dweight"][0].shape
    assert given["weight"].grad.shape == truth and given["weight"].grad.isfinite().all()


SPENT = [
    *((strategy, 40, None) for strategy in STRATEGIES),
    *(
        ("block", 640, cupynorm.Tile(8, 32, 3, stages=3)),
        ("cluster", 640, None),
        ("warp", 36, None),
        ("uncached", 37, None),
    ),
]


@pytest.mark.parametrize("recomputed", (False, True))
@pytest.mark.parametrize("names", (("dx",), ("dx", "dweight", "dbias")), ids="-".join)
@pytest.mark.parametrize("strategy, num_cols, tile", SPENT, ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_dx_takes_the_place_of_a_dy_that_is_spent(
    device, dtype, strategy, num_cols, tile, names, recomputed
):
    """The same bits, but where a kernel reads dy after another has written dx; and nowhere else."""
    generator = torch.Generator().manual_seed(num_cols)
    x, dy = torch.randn(2, 300, num_cols, generator=generator).to(dtype).to(device)
    weight, bias = torch.randn(2, num_cols, generator=generator).to(dtype).to(device)
    _, mean, rstd, _ = cupynorm.layer_norm_forward(x, weight, bias)
    options = Options(strategy=strategy, tile=tile)

    def gradients(dy, **more):
        operands = BackwardOperands(dy, x, mean, rstd, weight, bias=bias if recomputed else None)
        asked = BackwardOptions(
            True, (num_cols,), False, names, recompute=recomputed, launch=options, **more
        )
        return route.backward(BackwardRequest(operands, asked))

    spent = dy.clone()
    expected, made = gradients(dy), gradients(spent, overwrite_dy=True)
    assert all(
        one is other is None or torch.equal(one, other) for one, other in zip(expected, made)
    )
    assert (made[0].data_ptr() == spent.data_ptr()) == (strategy != "uncached" or len(names) == 1)
    strided = dy.new_empty(300, num_cols + 8)[:, :num_cols]
    strided.copy_(dy)
    expected, made = gradients(strided), gradients(strided, overwrite_dy=True)
    assert (
        torch.equal(expected[0], made[0]) and made[0].is_contiguous() and torch.equal(strided, dy)
    )


def peak_of(function):
    """Bytes of CPU tensors that are there at most, beyond what was before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    changes = sorted(
        (each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"
    )
    return int(np.cumsum([0, *(change for _, change in changes)]).max())


@pytest.mark.parametrize("options", ({}, {"save_normalized": True}), ids=str)
def test_few_tensors_are_there_at_a_time(kernels, options):
    """dx, in the place of what reached the norm, the normalised tensor, and the gradient of the weight."""
    num_rows, in_features, out_features = 1024, 128, 512
    layer = cupynorm.LayerNormLinear(in_features, out_features, device="cpu", **options)
    x, dy = (
        torch.randn(num_rows, in_features, requires_grad=True),
        torch.randn(num_rows, out_features),
    )
    y = layer(x)
    peak = peak_of(lambda: torch.autograd.grad(y, (x, *layer.parameters()), dy))
    row_size, weight_size = 4 * num_rows * in_features, 4 * in_features * out_features
    made = 1 if options else 2
    vectors = (
        4 * 8 * (in_features + out_features)
    )  # gradients of parameters, and what they are summed up from
    assert made * row_size + weight_size <= peak < made * row_size + weight_size + vectors


@pytest.mark.gpu
@pytest.mark.parametrize("in_features", (96, 1024, 8192, 20000, 300000))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_one_kernel_of_every_strategy(dtype, in_features):
    problem = draw("layer_norm", dtype, num_rows=40, in_features=in_features, out_features=24)
    assert_right(problem, recorded(problem, "cuda"), ("normalized", "sum"))


def test_a_backward_that_writes_y_again_is_another_than_one_that_does_not(kernels):
    """Also where there is no bias, by which alone they would differ: each is prepared once, and kept."""
    x, dy = torch.randn(2, 3, 24)
    _, mean, rstd, _ = cupynorm.layer_norm_forward(x, normalized_shape=24)
    operands = BackwardOperands(dy, x, mean, rstd)
    options = BackwardOptions(True, (24,), gradients=("dx",))
    for _ in range(2):
        for recompute, bias in ((False, None), (True, None), (True, torch.ones(24))):
            asked = options._replace(recompute=recompute)
            dx, _, _, _, y = route.backward(BackwardRequest(operands._replace(bias=bias), asked))
            assert dx.isfinite().all() and (y is None) == (not recompute)
            if y is not None:
                shift = 0.0 if bias is None else 1.0
                torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (24,)) + shift)
    assert len(kept.backwards) == 3
    operands = BackwardOperands(dy[:0], x[:0], mean[:0], rstd[:0])
    asked = BackwardRequest(operands, options._replace(recompute=True))
    assert route.backward(asked).y.shape == (0, 24)


def test_the_operator_that_makes_y_again():
    problem = draw()
    given = {
        name: None if value is None else value.detach() for name, value in leaves(problem).items()
    }
    y, mean, rstd, x = cupynorm.layer_norm_forward(
        given["x"], given["norm_weight"], given["norm_bias"]
    )
    dy = torch.randn_like(x)
    for dtype, wanted in ((torch.float32, [True] * 3), (torch.bfloat16, [False, True, False])):
        for parameters in ((given["norm_weight"], given["norm_bias"]), (None, None)):
            arguments = (dy.to(dtype), x, mean, rstd, *parameters, None, (24,), wanted, False, 0)
            opcheck(torch.ops.cupynorm.recomputing_norm_backward.default, arguments)
    dx, dweight, dbias, again = torch.ops.cupynorm.recomputing_norm_backward(
        dy,
        x,
        mean,
        rstd,
        given["norm_weight"],
        given["norm_bias"],
        None,
        (24,),
        [True] * 3,
        False,
        0,
    )
    plain = cupynorm.layer_norm_backward(dy, x, mean, rstd, given["norm_weight"])
    assert all(torch.equal(one, other) for one, other in zip((dx, dweight, dbias), plain))
    # Of mean and rstd as they were rounded.
    torch.testing.assert_close(again, y, rtol=2.0**-22, atol=2.0**-22)
    leaf = x.clone().requires_grad_()
    made = torch.ops.cupynorm.recomputing_norm_backward(
        dy, leaf, mean, rstd, None, None, None, (24,), [True] * 3, False, 0
    )
    with pytest.raises(NotImplementedError, match="or of recomputing_norm_backward"):
        made[3].sum().backward()


def test_operator_is_an_operator():
    problem = draw(residual=True)
    given = leaves(problem)
    arguments = (
        given["x"], given["residual"], given["norm_weight"], given["norm_bias"], [given["weight"]], [given["bias"]], 1e-5, True,
        False, torch.float32,
    )  # fmt: skip
    for rest in (
        (True, False, None),
        (False, True, None),
        (False, False, None),
        (False, False, "fold"),
    ):
        opcheck(torch.ops.cupynorm.norm_linear.default, (*arguments, *rest, 0, 0))


@pytest.mark.parametrize("norm_name", NORMS)
def test_transforms_and_forward_mode(norm_name):
    problem = draw(norm_name, "float64", 3, 5, 4)
    given = leaves(problem)
    x, tangent = given["x"].detach(), torch.randn(3, 5, dtype=torch.float64)

    def function(x):
        return call(problem, given | {"x": x}) ** 2

    plain = torch.func.vmap(lambda row: call(problem, given | {"x": row}))(x)
    torch.testing.assert_close(plain, call(problem, given))
    jacobian = torch.autograd.functional.jacobian(function, x)
    torch.testing.assert_close(torch.func.jacrev(function)(x), jacobian)
    _, pushed = torch.func.jvp(function, (x,), (tangent,))
    torch.testing.assert_close(pushed, torch.einsum("abcd,cd->ab", jacobian, tangent))


@pytest.mark.parametrize("way", WAYS, ids=("recomputed", "saved", "fold"))
@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device, way):
    """Products in the autocast dtype from parameters of float32; the norm still reads float32, and rounds once."""
    problem = draw(num_rows=4)
    given = leaves(problem, device)
    with torch.autocast(device, torch.bfloat16):
        y = call(problem, given, **way)
        with torch.no_grad():
            assert torch.equal(call(problem, given, **way), y)
    assert y.dtype == torch.bfloat16
    y.backward(torch.ones_like(y))
    assert all(value.grad.dtype == torch.float32 for value in given.values() if value is not None)
    # Each product is of operands rounded to bfloat16, and is rounded itself: three times 2^-8 of terms that do not cancel.
    problem.dy = np.ones_like(problem.dy)
    truth = {name: values for name, (values, *_) in expected(problem).items()}
    for name, got in {
        "y": y,
        **{f"d{name}": value.grad for name, value in given.items() if value is not None},
    }.items():
        off = np.abs(got.detach().double().cpu().numpy() - truth[name]).max()
        assert off <= 3 * 2.0**-8 * 24**0.5 * np.abs(truth[name]).max(), name
    with torch.autocast(device, torch.bfloat16), pytest.raises(TypeError, match="dtype"):
        call(problem, given | {"x": torch.ones(4, 24, dtype=torch.int32, device=device)})


@pytest.mark.parametrize("way", WAYS, ids=("recomputed", "saved", "fold"))
def test_autocast_inside_and_outside_of_what_is_compiled(way):
    torch._dynamo.reset()
    problem = draw(num_rows=4)

    def inside(problem, given, **options):
        with torch.autocast("cpu", torch.bfloat16):
            return call(problem, given, **options)

    eager = recorded(problem, run=lambda *a, **o: inside(*a, **o).float(), **way)
    for function in (
        torch.compile(inside, fullgraph=True, backend="aot_eager"),
        torch.compile(call, fullgraph=True, backend="aot_eager"),
    ):

        def run(problem, given, **options):
            with torch.autocast("cpu", torch.bfloat16):
                return function(problem, given, **options).float()  # noqa: B023

        for name, value in recorded(problem, run=run, **way).items():
            np.testing.assert_array_equal(value, eager[name], err_msg=name)


@pytest.mark.parametrize("options", ({}, {"fused": "fold"}, {"delay_wgrad_compute": True}), ids=str)
def test_backward_inside_of_autocast(options):
    """The gradients are those of the forward, whatever region they are made in."""
    module = LayerNormLinear(24, 16, **options, **CPU)
    problem, made = problem_of(module), []
    for inside in (False, True):
        module.zero_grad()
        x = tensor(problem.x, "float32", grad=True)
        y = module(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            y.backward(tensor(problem.dy, "float32"))
            module.backward_dw()
        made.append([x.grad, *(each.grad for each in module.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*made))


def test_autocast_leaves_float64_alone():
    problem = draw(dtype="float64")
    with torch.autocast("cpu", torch.bfloat16):
        y = call(problem, leaves(problem))
    assert y.dtype == torch.float64


# -- folded ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_centered_weight", (False, True))
@pytest.mark.parametrize("norm_name", NORMS)
def test_fold_in_float64_is_the_reference(norm_name, zero_centered_weight):
    problem = draw(norm_name, "float64", zero_centered_weight=zero_centered_weight)
    assert_right(problem, recorded(problem, fused="fold"), ("normalized", "sum"))
    given = leaves(problem)
    folded = folding.fold(
        given["norm_weight"], given["norm_bias"], given["weight"], given["bias"], centered=problem.centered,
        zero_centered_weight=zero_centered_weight,
    )  # fmt: skip
    truth = cupynorm.reference.fold(
        problem.norm_weight, problem.norm_bias, problem.weight, problem.bias, centered=problem.centered,
        zero_centered_weight=zero_centered_weight,
    )  # fmt: skip
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
    """What was folded."""
    made, plain = [], folding.fold
    monkeypatch.setattr(
        folding, "fold", lambda *given, **options: made.append(given) or plain(*given, **options)
    )
    return made


@pytest.mark.parametrize("split", (None, {"q_": 8, "k": 4, "v": 4}), ids=("whole", "split"))
def test_a_fold_is_kept_in_inference_until_a_parameter_changes(folds, split):
    module = LayerNormLinear(24, 16, fused="fold", parameters_split=split, **CPU)
    plain = LayerNormLinear(24, 16, parameters_split=split, **CPU)
    x = torch.randn(4, 24)

    def runs(times: int) -> None:
        """Two calls fold so many times, and are right."""
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
        parameter.data.mul_(0.5)  # as an optimizer that torch does not see
    runs(1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        folds.clear()
        assert module(x).dtype == torch.bfloat16 and len(folds) == 1
    module.double().float()
    runs(1)
    module.get_parameter(module.weight_names[0]).data.mul_(2)  # is not seen, and can be told
    folds.clear()
    with torch.no_grad():
        module(x)
        assert not folds
        module(x, is_first_microbatch=True)
    runs(1)


def test_a_fold_of_the_functional_form_lives_as_long_as_its_weight(folds):
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
        kept = len(folding._cache)
        folds.clear()
        given.clear()
        gc.collect()
        assert len(folding._cache) == kept - 1
    with torch.inference_mode():
        given = leaves(problem)
        assert (
            torch.equal(call(problem, given, fused="fold"), call(problem, given, fused="fold"))
            and len(folds) == 2
        )


@pytest.mark.gpu
def test_a_fold_is_made_anew_in_each_replay_of_a_graph():
    module = LayerNormLinear(64, 32, fused="fold", params_dtype=torch.bfloat16)
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        module(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x)
        for factor in (1.0, 2.0):
            module.weight.mul_(factor)
            graph.replay()
            assert torch.equal(y, module(x))
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
            assert torch.equal(module(x), y)
        torch.cuda.synchronize()


def folded_errors(x, norm_weight, norm_bias, weight, eps, dtype):
    """Errors of the plain and of the folded path in float64 terms, and what fold's docstring allows the folded one."""
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
    """Outliers of 36 standard deviations: within what is stated, and over all elements no worse than the plain path by a
    tenth."""
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
    """A mean of 64 standard deviations. bfloat16: as the plain path, for no weight's error meets the mean;
    float32: as stated."""
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
    if (
        dtype == "bfloat16"
    ):  # what the sums of the rounded rows take back is many times the error that is left
        assert off.max() > 4 * folded.max()


# -- the module: what is TransformerEngine's -------------------------------------------------------------

# Its constructor in its order, with its defaults.
ARGUMENTS = {
    "in_features": inspect.Parameter.empty, "out_features": inspect.Parameter.empty, "eps": 1e-5, "sequence_parallel": False,
    "fuse_wgrad_accumulation": False, "tp_group": None, "tp_size": 1, "get_rng_state_tracker": None, "init_method": None,
    "bias": True, "normalization": "LayerNorm", "return_bias": False, "params_dtype": None, "parallel_mode": None,
    "return_layernorm_output": False, "return_layernorm_output_gathered": False, "parameters_split": None,
    "zero_centered_gamma": False, "device": "cuda", "ub_overlap_ag": False, "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False, "ub_bulk_wgrad": False, "ub_bulk_dgrad": False, "ub_name": None, "delay_wgrad_compute": False,
    "symmetric_ar_type": None, "name": None,
}  # fmt: skip


def test_the_arguments_are_those_of_transformer_engine():
    given = list(inspect.signature(LayerNormLinear).parameters.values())
    positional = [each for each in given if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert {each.name: each.default for each in positional} == ARGUMENTS and len(ARGUMENTS) == 28
    assert [each.name for each in positional] == list(ARGUMENTS)
    assert [each.name for each in given[28:]] == ["save_normalized", "fused", "sm_margin"]
    called = {
        each.name: each.default
        for each in inspect.signature(LayerNormLinear.forward).parameters.values()
    }
    assert list(called)[1:] == ["inp", "is_first_microbatch", "fp8_output", "fp8_grad"]
    assert list(called.values())[2:] == [None, False, False]


SPLIT = {"q_": 8, "k": 4, "v": 4}


@pytest.mark.parametrize(
    "options, names",
    (
        ({}, ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]),
        ({"normalization": "RMSNorm", "bias": False}, ["layer_norm_weight", "weight"]),
        (
            {"parameters_split": ("query", "key_")},
            [
                "layer_norm_weight",
                "layer_norm_bias",
                "query_weight",
                "key_weight",
                "query_bias",
                "key_bias",
            ],
        ),
        (
            {"parameters_split": SPLIT, "bias": False},
            ["layer_norm_weight", "layer_norm_bias", "q_weight", "k_weight", "v_weight"],
        ),
    ),
    ids=str,
)
def test_parameters_and_state_dict(options, names):
    module = LayerNormLinear(24, 16, **options, **CPU)
    assert [name for name, _ in module.named_parameters()] == names
    assert [name for name in module.state_dict() if name != "_extra_state"] == names
    assert (module.layer_norm_weight == 1).all() and all(
        (each == 0).all() for each in module._biases()
    )
    other = LayerNormLinear(24, 16, **options, **CPU)
    other.load_state_dict(module.state_dict(), strict=True)
    x = torch.randn(3, 24)
    assert torch.equal(other(x), module(x))
    zero = LayerNormLinear(24, 16, **options, zero_centered_gamma=True, **CPU)
    assert (zero.layer_norm_weight == 0).all()
    assert (module.layer_norm_bias is None) == (options.get("normalization") == "RMSNorm")
    if options.get("bias") is False:
        assert all(getattr(module, name).shape == (0,) for name in module.bias_names)
    assert [len(each) for each in module._weights()] == module.parameter_split_sizes
    assert (
        sum(module.parameter_split_sizes) == 16
        and module.weight_names == [name for name in names if name.endswith("weight")][1:]
    )


def lie_together(module) -> bool:
    weights = module._weights()
    return all(
        before.data_ptr() + before.numel() * before.element_size() == after.data_ptr()
        for before, after in zip(weights, weights[1:])
    )


def test_splits_are_views_of_one_buffer_whatever_moves_them():
    module = LayerNormLinear(24, 16, parameters_split=SPLIT, **CPU)
    assert lie_together(module)
    x = torch.randn(3, 24)
    y = module(x)
    for moved in (
        copy.deepcopy(module),
        module.double().float(),
        LayerNormLinear(24, 16, parameters_split=SPLIT, device="meta"),
    ):
        if moved.q_weight.is_meta:
            moved.to_empty(device="cpu")
            moved.load_state_dict(module.state_dict())
        assert lie_together(moved) and torch.equal(moved(x), y)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), y)
    # Where they do not lie together the result is the same, by a copy.
    apart = LayerNormLinear(24, 16, parameters_split=SPLIT, **CPU)
    apart.load_state_dict(
        {name: value.clone() for name, value in module.state_dict().items() if value is not None},
        assign=True,
    )
    assert not lie_together(apart) and torch.equal(apart(x), y)


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
        for parts, whole in ((module._weights(), problem.weight), (module._biases(), problem.bias)):
            for part, values in zip(
                parts,
                ()
                if whole is None
                else np.split(whole, np.cumsum(module.parameter_split_sizes)[:-1]),
            ):
                part.copy_(tensor(values, dtype))
    return problem


def gradients_of(module) -> dict[str, np.ndarray]:
    found = {"dnorm_weight": module.layer_norm_weight.grad}
    if module.layer_norm_bias is not None:
        found["dnorm_bias"] = module.layer_norm_bias.grad
    found["dweight"] = torch.cat([each.grad for each in module._weights()])
    if module.use_bias:
        found["dbias"] = torch.cat([each.grad for each in module._biases()])
    return as_float64(found)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32", "float64"))
@pytest.mark.parametrize(
    "options",
    (
        {},
        {"normalization": "RMSNorm", "zero_centered_gamma": True},
        {"bias": False, "save_normalized": True},
        {"parameters_split": SPLIT, "return_bias": True},
        {"parameters_split": ("a", "b"), "return_layernorm_output": True},
        {
            "return_bias": True,
            "return_layernorm_output": True,
            "return_layernorm_output_gathered": True,
        },
        {"normalization": "RMSNorm", "return_bias": True, "bias": False},
    ),
    ids=str,
)
@pytest.mark.parametrize("device", DEVICES)
def test_module_values_and_gradients(device, options, dtype):
    module = LayerNormLinear(
        24, 16, 0.01, params_dtype=getattr(torch, dtype), device=device, **options
    )
    returns_normalized, returns_bias = (
        options.get("return_layernorm_output", False),
        options.get("return_bias", False),
    )
    problem = problem_of(module, dtype=dtype, eps=0.01, dnormalized=returns_normalized)
    x = tensor(problem.x, dtype, device, grad=True)
    results = module(x)
    results = results if isinstance(results, tuple) else (results,)
    assert len(results) == 1 + returns_bias + returns_normalized
    y, outside = results[0], [tensor(problem.dy, dtype, device)]
    if returns_bias:
        returned = results[1]
        assert returned.dtype == y.dtype and returned.shape == ((16,) if module.use_bias else (0,))
        if module.use_bias:
            y = y + returned  # what the caller does with it
    results = [y, *results[2 if returns_bias else 1 :]]
    if returns_normalized:
        outside.append(tensor(problem.dnormalized, dtype, device))
    torch.autograd.backward(results, outside)
    found = as_float64(dict(zip(("y", "normalized"), results)) | {"dx": x.grad}) | gradients_of(
        module
    )
    # A bias that the caller adds: y is rounded once more.
    left_out = ("y", "dbias") if returns_bias and dtype == "bfloat16" else ()
    assert_right(
        problem, found, ("sum", *(() if returns_normalized else ("normalized",)), *left_out)
    )


def test_the_gradient_of_the_gathered_normalised_tensor_counts():
    plain, gathered = (
        LayerNormLinear(
            24, 16, return_layernorm_output=True, return_layernorm_output_gathered=each, **CPU
        )
        for each in (False, True)
    )
    gathered.load_state_dict(plain.state_dict())
    made = []
    for module in (plain, gathered):
        x = torch.ones(3, 24).cumsum(1).requires_grad_()
        y, normalized = module(x)
        (y.sum() + (normalized**3).sum()).backward()
        made.append(x.grad)
    assert torch.equal(*made) and made[0].abs().max() > 1e-3
    assert (
        LayerNormLinear(
            24, 16, return_layernorm_output_gathered=True, **CPU
        ).return_layernorm_output_gathered
        is False
    )


def test_initial_values():
    seen = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self, *names):
            seen.append(("enter", names))
            yield
            seen.append(("leave", names))

    def fill(weight):
        seen.append(tuple(weight.shape))
        weight.fill_(2.0)

    module = LayerNormLinear(
        24,
        16,
        None or 1e-5,
        get_rng_state_tracker=Tracker,
        init_method=fill,
        parameters_split=SPLIT,
        **CPU,
    )
    assert seen == [
        each for size in (8, 4, 4) for each in (("enter", ()), (size, 24), ("leave", ()))
    ]
    assert all((weight == 2).all() for weight in module._weights())
    seen.clear()
    module.rng_tracker_name = "model-parallel"
    module.reset_parameters()
    assert seen[0] == ("enter", ("model-parallel",)) and len(seen) == 9
    torch.manual_seed(0)
    weight = LayerNormLinear(500, 400, **CPU).weight
    # 200,000 draws: the standard deviation errs by 0.16% of itself, one sigma.
    assert abs(weight.std() / 0.023 - 1) < 0.01 and abs(weight.mean()) < 3e-4


def test_attributes_for_those_who_reduce_gradients():
    for mode in (None, "column"):
        module = LayerNormLinear(24, 16, parallel_mode=mode, ub_name="qkv", name="layer", **CPU)
        for again in (module, copy.deepcopy(module), module.double()):
            assert (
                again.layer_norm_weight.sequence_parallel
                is again.layer_norm_bias.sequence_parallel
                is False
            )
            for parameter, is_marked in ((again.weight, True), (again.bias, mode == "column")):
                assert getattr(parameter, "tensor_model_parallel", False) == is_marked
                assert getattr(parameter, "partition_dim", None) == (0 if is_marked else None)
                assert getattr(parameter, "partition_stride", None) == (1 if is_marked else None)


@pytest.mark.parametrize(
    "options, error, sentence",
    (
        ({"normalization": "BatchNorm"}, ValueError, "normalization is 'BatchNorm'; expected 'LayerNorm' or 'RMSNorm'"),
        ({"eps": "small"}, TypeError, "eps is 'small'; expected a real number"),
        ({"params_dtype": torch.int32}, TypeError, "params_dtype is torch.int32; expected torch.bfloat16, torch.float16, "),
        ({"params_dtype": "half"}, TypeError, "params_dtype is 'half'; expected torch.bfloat16, torch.float16, "),
        ({"parallel_mode": "row"}, NotImplementedError, "parallel_mode is 'row'; expected 'column' or None"),
        ({"parallel_mode": "both"}, ValueError, "parallel_mode is 'both'"),
        ({"parameters_split": ()}, ValueError, r"parameters_split is \(\); expected at least one name"),
        ({"parameters_split": (1, 2)}, TypeError, r"parameters_split is \(1, 2\); expected names"),
        ({"parameters_split": 3}, TypeError, "parameters_split is 3; expected names, or a dict of names and sizes"),
        ({"parameters_split": {"a", "b"}}, TypeError, "parameters_split is {.*}; expected names, or a dict of names and sizes"),
        ({"parameters_split": ("q", "q_")}, ValueError, "which differ in more than underscores at their end"),
        ({"parameters_split": ("layer_norm", "b")}, ValueError, "none of which is layer_norm, the norm's"),
        ({"parameters_split": {"a.b": 8, "c": 8}}, ValueError, "expected names without a dot"),
        ({"parameters_split": ("a", "b", "c")}, ValueError, r"sizes \[5, 5, 5\], 15 together; expected out_features, 16"),
        ({"parameters_split": {"a": 8, "b": 9}}, ValueError, r"sizes \[8, 9\], 17 together"),
        ({"parameters_split": {"a": 8.0, "b": 8}}, TypeError, "expected sizes that are numbers of rows"),
        ({"parameters_split": {"a": True, "b": 15}}, TypeError, "expected sizes that are numbers of rows"),
        ({"fused": "gemm"}, ValueError, "fused is 'gemm'; expected None or 'fold'"),
        ({"fused": "fold", "return_layernorm_output": True}, ValueError, "no normalised tensor exists"),
        ({"sm_margin": -1}, ValueError, "sm_margin is -1"),
        *(
            ({name: value}, ValueError, f"{name} is .*; expected {single!r}: this layer works on one GPU")
            for name, value, single in (
                ("sequence_parallel", True, False), ("tp_group", object(), None), ("tp_size", 2, 1),
                ("ub_overlap_ag", True, False), ("ub_overlap_rs", True, False), ("ub_overlap_rs_dgrad", True, False),
                ("ub_bulk_wgrad", True, False), ("ub_bulk_dgrad", True, False),
                ("symmetric_ar_type", "multimem_all_reduce", None),
            )
        ),
    ),
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_what_the_module_refuses(options, error, sentence):
    with pytest.raises(error, match=sentence):
        LayerNormLinear(24, 16, **options, **CPU)


@pytest.mark.parametrize(
    "given, error",
    [
        (0, ValueError),
        (-1, ValueError),
        (8.5, TypeError),
        (8.0, TypeError),
        ("8", TypeError),
        (True, TypeError),
        (None, TypeError),
    ],
)
@pytest.mark.parametrize("name", ["in_features", "out_features"])
def test_what_is_no_number_of_features(name, given, error):
    with pytest.raises(error, match=f"{name} is {given!r}; expected an int, 1 or more"):
        LayerNormLinear(**{"in_features": 24, "out_features": 16, name: given}, **CPU)
    LayerNormLinear(**{"in_features": 24, "out_features": 16, name: np.int64(8)}, **CPU)(
        torch.ones(3, 8 if name == "in_features" else 24)
    )


def test_a_group_of_one_rank_is_one_gpu():
    class Group:
        def __init__(self, num_ranks):
            self.num_ranks = num_ranks

        def size(self):
            return self.num_ranks

    LayerNormLinear(24, 16, tp_group=Group(1), parallel_mode="column", **CPU)
    with pytest.raises(ValueError, match="tp_group is .*; expected None"):
        LayerNormLinear(24, 16, tp_group=Group(2), **CPU)


def test_inputs_that_the_module_refuses():
    module = LayerNormLinear(24, 16, **CPU)
    for x, error, sentence in (
        (np.ones((3, 24), np.float32), TypeError, "input is a ndarray; expected a torch tensor"),
        ([1.0] * 24, TypeError, "input is a list; expected a torch tensor"),
        (
            torch.ones(3, 23),
            ValueError,
            r"input has shape \(3, 23\); expected \(..., 24\), in_features of this layer",
        ),
        (
            torch.ones(3, 24, dtype=torch.bfloat16),
            TypeError,
            "weight is of dtype float32, input of bfloat16; expected both the same",
        ),
    ):
        with pytest.raises(error, match=sentence):
            module(x)
    for name in ("fp8_output", "fp8_grad"):
        with pytest.raises(ValueError, match=f"{name} is True outside of fp8_autocast"):
            module(torch.ones(3, 24), **{name: True})


def test_meta():
    module = LayerNormLinear(24, 16, device="meta", parallel_mode="column")
    assert all(each.is_meta for each in module.parameters()) and module.weight.partition_dim == 0
    module.to_empty(device="cpu").reset_parameters()
    assert (
        (module.layer_norm_weight == 1).all()
        and 0.01 < module.weight.std() < 0.04
        and (module.bias == 0).all()
    )
    assert module.weight.partition_dim == 0


def test_repr():
    assert (
        repr(LayerNormLinear(24, 16, **CPU)) == "LayerNormLinear(in_features=24, out_features=16)"
    )
    module = LayerNormLinear(24, 16, 0.1, bias=False, normalization="RMSNorm", fused="fold", **CPU)
    assert (
        repr(module)
        == "LayerNormLinear(in_features=24, out_features=16, eps=0.1, bias=False, normalization='RMSNorm', fused='fold')"
    )


@pytest.mark.parametrize(
    "options", ({}, {"parameters_split": SPLIT}, {"return_bias": True}, {"fused": "fold"}), ids=str
)
def test_the_module_compiles_without_a_break(options):
    torch._dynamo.reset()
    module = LayerNormLinear(24, 16, **options, **CPU)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    made = []
    for run in (module, compiled):
        module.zero_grad()
        x = torch.arange(72.0).reshape(3, 24).sin().requires_grad_()
        results = run(x)
        results = results if isinstance(results, tuple) else (results,)
        sum((each**2).sum() for each in results).backward()
        made.append([*results, x.grad, *(each.grad for each in module.parameters())])
    for eager, traced in zip(*made):
        # The compiler's own sums of squares may be made in another order: float32 of 48 terms.
        torch.testing.assert_close(
            traced, eager, rtol=2.0**-18, atol=2.0**-18 * eager.abs().max().item()
        )


def test_one_graph_for_any_number_of_rows():
    torch._dynamo.reset()
    module = LayerNormLinear(24, 16, parameters_split=SPLIT, **CPU)
    compiled = torch.compile(module, dynamic=True, fullgraph=True, backend="aot_eager")
    for num_rows in (3, 5, 0, 1, 7):
        made = []
        for run in (module, compiled):
            module.zero_grad()
            x = torch.arange(24.0 * num_rows).reshape(num_rows, 24).sin().requires_grad_()
            y = run(x)
            y.sum().backward()
            made.append((y, x.grad, module.q_weight.grad, module.k_bias.grad))
        assert all(torch.equal(*pair) for pair in zip(*made)), num_rows


def test_the_compiler_refuses_what_eager_mode_does():
    compiled = torch.compile(cupynorm.layer_norm_linear, backend="aot_eager")
    x, one, weight = torch.ones(3, 24), torch.ones(24), torch.ones(16, 24)
    for given in (
        (x, one, one, weight[:, 1:]),
        (x, one, one[1:], weight),
        (x, one, one, weight, one),
        (x, one, one, weight.half()),
    ):
        torch._dynamo.reset()
        for run in (cupynorm.layer_norm_linear, compiled):
            with pytest.raises(
                (ValueError, TypeError, RuntimeError),
                match="has shape .* expected|is of dtype .* expected",
            ):
                run(*given)


def test_what_keeps_python_objects_runs_as_it_is_when_compiled():
    torch._dynamo.reset()
    x = torch.arange(96.0).reshape(4, 24).sin()
    for options, recipe in (
        ({"delay_wgrad_compute": True}, recipe) for recipe in (None, cupynorm.CurrentScaling())
    ):
        module = LayerNormLinear(24, 16, **options, **CPU)
        compiled = torch.compile(module, backend="aot_eager")
        made = []
        for run in (module, compiled):
            module.zero_grad()
            with cupynorm.fp8_autocast(recipe is not None, recipe):
                y = run(x)
            y.square().sum().backward()
            module.backward_dw()
            made.append((y, module.weight.grad, module.bias.grad))
        assert all(torch.equal(*pair) for pair in zip(*made))


def test_products_are_torchs_and_so_is_their_precision():
    """float32 factors go to torch's own products as they are: torch.backends.cuda.matmul decides about TF32."""
    module = LayerNormLinear(24, 16, params_dtype=torch.float32, **CPU)
    x = torch.arange(96.0).reshape(4, 24).sin().requires_grad_()
    switches = torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    with torch.autograd.profiler.profile() as profile:
        module(x).sum().backward()
    names = [event.name for event in profile.function_events]
    assert sum(name in ("aten::mm", "aten::addmm") for name in names) == 3  # y, dx, dweight
    assert switches == (torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision())


def test_export_and_functional_calls():
    module = LayerNormLinear(24, 16, **CPU)
    x = torch.arange(96.0).reshape(4, 24).sin()
    exported = torch.export.export(module, (x,))
    assert sum("norm_linear" in str(node.target) for node in exported.graph.nodes) == 1
    assert torch.equal(exported.module()(x), module(x))
    parameters = dict(module.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    loss(parameters).backward()
    for name, gradient in torch.func.grad(loss)(parameters).items():
        # The same float32 sums of 4 rows in another order.
        torch.testing.assert_close(
            gradient,
            parameters[name].grad,
            rtol=2.0**-18,
            atol=2.0**-18 * gradient.abs().max().item(),
        )


@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_the_module_under_checkpointing(dtype):
    module = LayerNormLinear(24, 16, params_dtype=getattr(torch, dtype), **CPU)
    problem = problem_of(module, dtype=dtype)
    made = []
    for run in (module, lambda x: checkpoint(module, x, use_reentrant=False)):
        module.zero_grad()
        run(tensor(problem.x, dtype, grad=True)).backward(tensor(problem.dy, dtype))
        made.append(gradients_of(module))
    for name, value in made[0].items():
        np.testing.assert_array_equal(made[1][name], value)


# -- gradients that go to main_grad, and later -----------------------------------------------------------


def main_grads(module, dtype=torch.float32, value=0.0):
    for weight in module._weights():
        weight.main_grad = torch.full(weight.shape, value, dtype=dtype, device=weight.device)


def whole(module, name) -> torch.Tensor:
    return torch.cat([getattr(each, name) for each in module._weights()])


def step(module, problem, first=None, dtype="float32", device="cpu"):
    x = tensor(problem.x, dtype, device, grad=True)
    y = module(x, is_first_microbatch=first)
    y.backward(tensor(problem.dy, dtype, device))
    return x.grad


@pytest.mark.parametrize("main_dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("split", (None, SPLIT))
@pytest.mark.parametrize("device", DEVICES)
def test_weight_gradients_in_main_grad(device, split, dtype, main_dtype):
    options = {"parameters_split": split, "params_dtype": getattr(torch, dtype), "device": device}
    module, plain = (
        LayerNormLinear(24, 16, fuse_wgrad_accumulation=True, **options),
        LayerNormLinear(24, 16, **options),
    )
    problem = problem_of(module, dtype=dtype)
    plain.load_state_dict(module.state_dict())
    main_grads(module, main_dtype, 3.0)
    dx = step(module, problem, dtype=dtype, device=device)
    assert torch.equal(dx, step(plain, problem, dtype=dtype, device=device))
    assert all(each.grad is None for each in module._weights())
    for one, other in zip(
        (*module._biases(), module.layer_norm_weight), (*plain._biases(), plain.layer_norm_weight)
    ):
        assert torch.equal(one.grad, other.grad)
    values, allowed, _ = expected(problem)["dweight"]
    # Added to 3 in main_grad's dtype: one rounding more, of the sum.
    half_ulp = 2.0**-8 if main_dtype == torch.bfloat16 else 2.0**-24
    got = whole(module, "main_grad").double().cpu().numpy()
    assert (np.abs(got - (values + 3)) <= allowed + 2 * half_ulp * (np.abs(values) + 3)).all()
    if dtype == "bfloat16" and main_dtype == torch.float32:
        # The product is not rounded to bfloat16 on the way: closer than half a unit of that, most of the time.
        rounded = np.abs(decode(encode(values, "bfloat16"), "bfloat16") - values)
        exact = np.abs(got - 3 - as_float64({"dweight": whole_product(module, problem)})["dweight"])
        assert exact.max() <= 2.0**-20 * (np.abs(values).max() + 3) < rounded.max()


def whole_product(module, problem) -> torch.Tensor:
    """dy^T normalized in float64, of the normalised tensor as it was rounded."""
    given = (problem.x, problem.norm_weight, problem.norm_bias)
    normalized = cupynorm.layer_norm_linear_forward(
        *(tensor(each, problem.dtype) for each in (*given, problem.weight))
    ).normalized
    return tensor(problem.dy).t() @ normalized.double()


def assert_times(module, problem, once, times):
    """main_grad is so many times one step's: sums of as many products, whose every rounding may fall another way."""
    x, dy = tensor(problem.x), tensor(problem.dy)
    with torch.no_grad():
        y = torch.nn.functional.layer_norm(
            x, x.shape[-1:], module.layer_norm_weight, module.layer_norm_bias, module.eps
        )
    sizes = times * (dy.abs().flatten(0, -2).T @ y.abs().flatten(0, -2))
    num_terms = times * dy.numel() // dy.shape[-1]
    off = (module.weight.main_grad - times * once).abs()
    assert (off <= num_terms * 2.0**-53 * sizes).all()


def test_microbatches_of_main_grad():
    module = LayerNormLinear(
        24, 16, fuse_wgrad_accumulation=True, params_dtype=torch.float64, **CPU
    )
    problem = problem_of(module, dtype="float64")
    main_grads(module, torch.float64)
    step(module, problem, dtype="float64")
    once = module.weight.main_grad.clone()
    for first, expected_times in (
        (None, 2),
        (False, 3),
        (True, 1),
        (False, 2),
        (None, 3),
        (True, 1),
        (True, 1),
    ):
        step(module, problem, first, "float64")
        assert_times(module, problem, once, expected_times)
    module.weight.overwrite_main_grad = True
    step(module, problem, False, "float64")
    assert torch.equal(module.weight.main_grad, once)


def test_microbatches_whose_backwards_come_in_another_order():
    """Two forwards, the last backward first; and one layer used twice in one forward: nothing is lost."""
    module = LayerNormLinear(
        24, 16, fuse_wgrad_accumulation=True, params_dtype=torch.float64, **CPU
    )
    problem = problem_of(module, dtype="float64")
    main_grads(module, torch.float64)
    step(module, problem, dtype="float64")
    once, x, dy = module.weight.main_grad.clone(), tensor(problem.x), tensor(problem.dy)
    for flags in ((True, False), (True, True), (True, None)):
        made = [module(x, is_first_microbatch=first) for first in flags]
        for y in reversed(made):
            y.backward(dy)
        assert_times(module, problem, once, 2)
    with torch.no_grad():
        module(x, is_first_microbatch=True)  # records nothing, so begins nothing
    step(module, problem, False, "float64")
    assert_times(module, problem, once, 3)


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_microbatches_of_main_grad_under_checkpointing(use_reentrant):
    """A forward that is run again inside of backward begins no step, whatever it says; where its first run was not recorded, it
    does so then, once."""
    module = LayerNormLinear(
        24, 16, fuse_wgrad_accumulation=True, params_dtype=torch.float64, **CPU
    )
    problem = problem_of(module, dtype="float64")
    main_grads(module, torch.float64)
    step(module, problem, dtype="float64")
    once, dy = module.weight.main_grad.clone(), tensor(problem.dy)

    def run(first):
        x = tensor(problem.x, grad=True)
        return checkpoint(
            lambda x: module(x, is_first_microbatch=first), x, use_reentrant=use_reentrant
        )

    for _ in range(2):
        made = [run(True), run(False)]
        for y in reversed(made):
            y.backward(dy)
        assert_times(module, problem, once, 2)
        run(False).backward(dy)
        assert_times(module, problem, once, 3)
    for first, expected_times in (
        (True, 1),
        (False, 2),
        (None, 3),
        (True, 1),
    ):  # each backward after its forward
        run(first).backward(dy)
        assert_times(module, problem, once, expected_times)


def test_those_who_mark_a_weight_are_told():
    module = LayerNormLinear(
        24, 16, fuse_wgrad_accumulation=True, parameters_split=("a", "b"), **CPU
    )
    problem = problem_of(module)
    main_grads(module)
    module.a_weight.grad_added_to_main_grad, module.a_weight.zero_out_wgrad = False, True
    fired = []
    module.a_weight.register_hook(lambda gradient: fired.append(gradient))
    step(module, problem)
    assert module.a_weight.grad_added_to_main_grad is True and len(fired) == 1
    assert fired[0].shape == module.a_weight.shape and not fired[0].any()
    assert module.b_weight.grad is None and not hasattr(module.b_weight, "grad_added_to_main_grad")
    asked = []
    module.b_weight.__fsdp_param__ = True
    kept = module.b_weight.main_grad
    del module.b_weight.main_grad
    module.b_weight.get_main_grad = lambda: asked.append(1) or kept
    before = kept.clone()
    step(module, problem)
    assert asked == [1]
    torch.testing.assert_close(kept, 2 * before, rtol=2.0**-22, atol=0)


def test_main_grad_must_be_there():
    module = LayerNormLinear(24, 16, fuse_wgrad_accumulation=True, **CPU)
    x = torch.ones(3, 24)
    with pytest.raises(
        RuntimeError,
        match="weight has no main_grad, to which fuse_wgrad_accumulation=True adds its gradient",
    ):
        module(x)
    with torch.no_grad():
        module(x)
    module.weight.requires_grad_(False)
    module(x.requires_grad_()).sum().backward()


@pytest.mark.parametrize("fuse", (False, True))
@pytest.mark.parametrize(
    "options", ({}, {"parameters_split": SPLIT}, {"bias": False, "save_normalized": True}), ids=str
)
def test_delayed_weight_gradients(options, fuse):
    """They are those of an ordinary layer: accumulated over microbatches, twice before a step, with splits."""
    options = options | {"params_dtype": torch.float64} | CPU
    module = LayerNormLinear(
        24, 16, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse, **options
    )
    plain = LayerNormLinear(24, 16, **options)
    assert module.need_backward_dw() and not plain.need_backward_dw()
    problem = problem_of(module, dtype="float64")
    plain.load_state_dict(module.state_dict())
    if fuse:
        main_grads(module, torch.float64)
    ran = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: ran.append(1))
    for _ in range(2):
        step(plain, problem, dtype="float64")
        dx = step(module, problem, dtype="float64")
        assert dx.abs().max() > 0 and not ran
        assert all(each.grad is None for each in (*module._weights(), *module._biases()))
    for count in (1, 2):
        module.backward_dw()
        assert len(ran) == count
    name = "main_grad" if fuse else "grad"
    torch.testing.assert_close(
        whole(module, name), whole(plain, "grad"), rtol=2.0**-50, atol=2.0**-50
    )
    for one, other in zip(module._biases(), plain._biases()):
        assert torch.equal(one.grad, other.grad)
    with pytest.raises(RuntimeError, match="no backward has left a weight gradient"):
        module.backward_dw()
    assert all(each.skip_backward_post_hook for each in (*module._weights(), *module._biases()))
    plain.backward_dw()  # nothing to do
    step(module, problem, dtype="float64")
    assert not copy.deepcopy(module)._delayed and len(module._delayed) == 1


@pytest.mark.parametrize("frozen", (False, True))
def test_what_is_delayed_waits_as_little_as_it_can(frozen):
    """Until backward_dw: dy, and beside it the normalised tensor, or x if nothing has made that."""
    module = LayerNormLinear(96, 64, delay_wgrad_compute=True, params_dtype=torch.bfloat16, **CPU)
    x = torch.randn(32, 96, dtype=torch.bfloat16, requires_grad=not frozen)
    (
        module.layer_norm_weight.requires_grad_(not frozen),
        module.layer_norm_bias.requires_grad_(not frozen),
    )
    y = module(x)
    y.backward(torch.ones_like(y))
    rows, make_normalized, *_ = module._delayed[0].args[0]
    if frozen:
        cells = [cell.cell_contents for cell in make_normalized.__closure__]
        (operands,) = [each for each in cells if isinstance(each, Operands)]
        held = [each for each in (*cells, *operands.all) if isinstance(each, torch.Tensor)]
    else:
        held = list(make_normalized.args)
    large = [each for each in held if each.numel() > 96]
    assert rows.shape == (32, 64) and sum(each.numel() for each in large) == 32 * 96
    assert any(each.data_ptr() == x.data_ptr() for each in large) == frozen


@pytest.mark.parametrize(
    "written", ("the gradient of y", "the normalised tensor", "the input", "the norm's weight")
)
def test_what_was_written_to_before_it_is_read_is_refused(written):
    """As autograd refuses what it has saved."""
    module = LayerNormLinear(
        24, 16, delay_wgrad_compute=True, return_layernorm_output=True, save_normalized=True, **CPU
    )
    if written in ("the input", "the norm's weight"):
        module = LayerNormLinear(24, 16, delay_wgrad_compute=True, **CPU)
        module.layer_norm_weight.requires_grad_(False), module.layer_norm_bias.requires_grad_(False)
    x, dy = torch.randn(3, 24), torch.randn(3, 16)
    made = module(x)
    y, normalized = made if isinstance(made, tuple) else (made, None)
    y.backward(dy)
    with torch.no_grad():
        {
            "the gradient of y": dy, "the normalised tensor": normalized, "the input": x,
            "the norm's weight": module.layer_norm_weight,
        }[written].mul_(2)  # fmt: skip
    with pytest.raises(
        RuntimeError, match=f"{written} was written to between a backward and its backward_dw"
    ):
        module.backward_dw()
    assert module.weight.grad is None


def test_a_gradient_of_y_that_shares_memory_with_a_parameters():
    """autograd adds up there; the hook that the refusal names keeps them apart."""
    made = {}
    for delays in (False, True):
        torch.manual_seed(0)
        module = LayerNormLinear(
            16, 8, delay_wgrad_compute=delays, params_dtype=torch.float64, **CPU
        )
        position = torch.nn.Parameter(torch.randn(5, 8, dtype=torch.float64))
        for _ in range(2):
            y = module(torch.randn(1, 5, 16, dtype=torch.float64))
            y.register_hook(torch.clone)
            (y + position.unsqueeze(0)).square().sum().backward()
        for _ in range(2):
            module.backward_dw()
        made[delays] = module.weight.grad, module.bias.grad, position.grad
    assert all(torch.equal(*pair) for pair in zip(made[True], made[False]))


def test_a_backward_without_a_gradient_of_y_is_one_of_backward_dw():
    module = LayerNormLinear(24, 16, delay_wgrad_compute=True, return_layernorm_output=True, **CPU)
    x = torch.randn(3, 24)
    for recipe in (None, cupynorm.CurrentScaling()):
        with cupynorm.fp8_autocast(recipe is not None, recipe):
            normalized = module(x)[1]
        normalized.square().sum().backward()
        module.backward_dw()
        assert module.weight.grad is None and not module._delayed


class Named(torch.Tensor):
    """A subclass of which torch asks nothing."""


@pytest.mark.parametrize("option", ("fuse_wgrad_accumulation", "delay_wgrad_compute"))
def test_nothing_is_lost_of_an_input_of_a_subclass(option):
    module, plain = LayerNormLinear(24, 16, **{option: True}, **CPU), LayerNormLinear(24, 16, **CPU)
    plain.load_state_dict(module.state_dict())
    main_grads(module, module.weight.dtype)
    x = torch.randn(3, 24)
    for each in (module, plain):
        each(x.as_subclass(Named) if each is module else x).square().sum().backward()
    module.backward_dw()
    made = module.weight.grad if option == "delay_wgrad_compute" else module.weight.main_grad
    assert torch.equal(made, plain.weight.grad)


def test_what_is_no_tensor_with_memory_is_refused():
    module, x = LayerNormLinear(24, 16, **CPU), torch.ones(3, 24)
    with pytest.raises(
        TypeError,
        match="input is a torch tensor on meta; expected one on the CPU or on a CUDA device",
    ):
        module(x.to("meta"))
    given = (module.layer_norm_weight, module.layer_norm_bias, module.weight)
    with pytest.raises(
        TypeError, match="residual is a ndarray; expected a torch tensor, as input is"
    ):
        cupynorm.layer_norm_linear(x, *given, residual=x.numpy())


def test_a_main_grad_of_another_shape_is_refused():
    module = LayerNormLinear(24, 16, fuse_wgrad_accumulation=True, **CPU)
    module.weight.main_grad = torch.zeros(24 * 16)
    with pytest.raises(
        ValueError, match=r"weight.main_grad has shape \(384,\); expected \(16, 24\)"
    ):
        module(torch.ones(3, 24))


@pytest.mark.parametrize("recipe", (None, cupynorm.CurrentScaling()), ids=str)
@pytest.mark.parametrize("return_bias", (False, True))
def test_splits_in_autocast_of_the_other_dtype_of_16_bits(return_bias, recipe):
    """torch has no cat of it there."""
    module = LayerNormLinear(
        32, 16, params_dtype=torch.float16, parameters_split=("a", "b"), return_bias=return_bias, **CPU
    )  # fmt: skip
    x = torch.randn(4, 32, dtype=torch.float16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), cupynorm.fp8_autocast(recipe is not None, recipe):
        made = module(x)
        results = made if return_bias else (made,)
        assert all(each.dtype == torch.bfloat16 for each in results)
        sum(each.float().square().sum() for each in results).backward()
    assert x.grad.abs().sum() > 0 and all(
        each.grad.dtype == torch.float16 for each in module._weights()
    )


def test_nothing_is_lost_where_torch_watches():
    from torch.utils.flop_counter import FlopCounterMode

    module, plain = (
        LayerNormLinear(24, 16, fuse_wgrad_accumulation=fuse, **CPU) for fuse in (True, False)
    )
    problem = problem_of(module)
    plain.load_state_dict(module.state_dict())
    main_grads(module)
    with FlopCounterMode(display=False):
        for each in (module, plain):
            step(each, problem)
    assert module.weight.grad is None
    torch.testing.assert_close(
        module.weight.main_grad, plain.weight.grad, rtol=2.0**-20, atol=2.0**-20
    )


def test_no_differentiable_gradient_of_what_goes_elsewhere():
    module = LayerNormLinear(24, 16, delay_wgrad_compute=True, **CPU)
    x = torch.randn(3, 24, requires_grad=True)
    with pytest.raises(RuntimeError, match="expected create_graph=False"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


def test_frozen_weights_hand_nothing_on():
    module = LayerNormLinear(24, 16, delay_wgrad_compute=True, **CPU)
    module.weight.requires_grad_(False)
    problem = problem_of(module)
    step(module, problem)
    module.backward_dw()
    assert module.weight.grad is None and module.bias.grad is not None
