"""Fused options of the public calls: values and dtypes against float64, gradients, seeds, the operators,
and what is refused."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest

import cupynorm
from cupynorm import reference
from cupynorm.check.cases import NORMS, Case, Problem, random_problem
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.dtypes import DTYPES, compute_dtype
from cupynorm.gpu import arrays
from cupynorm.norm import kept

torch = pytest.importorskip("torch")
from torch.func import vmap  # noqa: E402
from torch.library import opcheck  # noqa: E402

from cupynorm.nn import operators as torch_ops  # noqa: E402, F401  (its operators)

DEVICES_HERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=["reference", "kernels", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """Where tensors lie: three ways through the library."""
    if request.param == "kernels":
        request.getfixturevalue("kernels")
    return "cuda" if request.param == "gpu" else "cpu"


def tensor(values: np.ndarray, dtype: str, device: str = "cpu") -> torch.Tensor:
    return arrays.from_float64(values, dtype, torch.empty(0)).to(device)


def numbers(tensor) -> np.ndarray:
    return (
        tensor.detach().double().cpu().numpy()
        if arrays.is_torch(tensor)
        else arrays.to_float64(tensor)
    )


def random(*shape: int, dtype=torch.float64, seed=0) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
    ).to(dtype)


def options_of(problem: Problem, put) -> dict:
    """Keywords of the public calls."""
    case = problem.case
    given = {
        "residual": (problem.residual, case.added),
        "row_scale": (problem.row_scale, case.row_scale),
    }
    given |= {"weight1": (problem.weight1, case.weight1), "bias1": (problem.bias1, case.bias1)}
    options = {
        name: None if values is None else put(values, dtype)
        for name, (values, dtype) in given.items()
    }
    options |= {
        "residual_dtype": case.residual_dtype,
        "dropout_p": case.dropout_p,
        "dropout_seed": problem.dropout_seed,
    }
    options |= {"round_x_hat": case.round_x_hat, "memory_efficient": case.memory_efficient}
    return options | {"zero_centered_weight": case.zero_centered_weight, "out_dtype": case.y}


def assert_right(problem: Problem, results: dict) -> None:
    result = CheckResult(
        judge_all(problem, {name: numbers(value) for name, value in results.items()})
    )
    assert len(result.findings) == len(results)
    assert result.ok, f"\n{result}"


CASES = {
    "a stream of float32": Case("layer_norm", 6, 40, "bfloat16", residual=True, residual_dtype="float32", dsum=True),
    "a stream of float32 that begins": Case("rms_norm", 6, 40, "float16", residual_dtype="float32"),
    "a stream of the input's dtype": Case("layer_norm", 6, 40, "float32", residual=True, residual_dtype="float32", dsum=True),
    "nothing to add": Case("layer_norm", 6, 40, "float32", residual_dtype="float32"),
    "a residual of the input's dtype": Case("layer_norm", 6, 33, "float16", residual="float16", residual_dtype="float32"),
    "a stream of float64": Case("rms_norm", 6, 40, "float32", residual=True, residual_dtype="float64", dsum=True),
    "row_scale": Case("layer_norm", 6, 40, "bfloat16", row_scale="float32", residual=True),
    "dropout": Case("rms_norm", 6, 40, "float32", dropout_p=0.3),
    "two outputs": Case("layer_norm", 6, 40, "bfloat16", weight1="float32", bias1="bfloat16"),
    "two outputs of a stream": Case(
        "rms_norm", 6, 33, "float16", residual=True, residual_dtype="float32", weight1="float16", dsum=True,
    ),
    "x_hat rounded": Case("rms_norm", 6, 40, "bfloat16", weight="float32", round_x_hat=True),
    "nothing to round": Case("layer_norm", 6, 40, "float32", round_x_hat=True),
    "y alone": Case("layer_norm", 6, 40, "bfloat16", memory_efficient=True),
    "y alone of a stream": Case(
        "rms_norm", 6, 40, "float16", residual=True, residual_dtype="float32", row_scale="float32", weight="float32",
        weight1="float16", dsum=True, memory_efficient=True, zero_centered_weight=True,
    ),
    "y alone, x_hat rounded": Case("layer_norm", 6, 40, "bfloat16", bias=None, round_x_hat=True, memory_efficient=True),
    "all": Case(
        "layer_norm", 6, 40, "bfloat16", y="float32", weight="float32", residual=True, residual_dtype="float32",
        row_scale="float16", dropout_p=0.25, dsum=True, zero_centered_weight=True, weight1="bfloat16", bias1="float32",
        round_x_hat=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_values_and_gradients(what, device):
    """By autograd: every gradient in the dtype of its tensor."""
    problem = random_problem(CASES[what])
    case = problem.case

    def put(values, dtype):
        return tensor(values, dtype, device)

    given = ((getattr(problem, name), case.dtype(name)) for name in ("x", "weight", "bias"))
    x, weight, bias = (
        None if values is None else put(values, dtype).requires_grad_() for values, dtype in given
    )
    options = options_of(problem, put)
    leaves = {"dx": x, "dweight": weight} | ({} if bias is None else {"dbias": bias})
    given = {f"d{name}": options[name] for name in ("residual", "weight1", "bias1")}
    leaves |= {name: leaf.requires_grad_() for name, leaf in given.items() if leaf is not None}
    y, *y1, added = getattr(cupynorm, case.norm)(
        x, case.num_cols, weight, bias=bias, eps=1e-5, return_residual=True, **options
    )
    assert arrays.dtype_name(y) == case.dtype("y") and arrays.dtype_name(added) == case.sum
    assert [each.dtype for each in y1] == [y.dtype] * case.has_second
    outputs, gradients = (
        [y, *y1],
        [
            put(values, case.dtype("y"))
            for values in (problem.dy, problem.dy1)[: 1 + case.has_second]
        ],
    )
    if problem.dsum is not None:
        outputs, gradients = [*outputs, added], [*gradients, put(problem.dsum, case.sum)]
    made = dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), gradients)))
    assert [gradient.dtype for gradient in made.values()] == [
        leaf.dtype for leaf in leaves.values()
    ]
    results = {"y": y, "sum": added, **dict(zip(["y1"], y1)), **made}
    if not case.has_own_sum and case.residual:  # one gradient of both
        assert torch.equal(results.pop("dresidual"), made["dx"])
    elif not case.has_own_sum:
        assert results.pop("sum") is x
    assert_right(problem, results)


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("library", ["numpy", "torch", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_explicit_forward_and_backward(what, library):
    problem = random_problem(CASES[what])
    case = problem.case
    if library == "numpy" and "bfloat16" in (case.x, case.sum, case.added):
        pytest.importorskip("ml_dtypes")

    def put(values, dtype):
        if library == "torch":
            return tensor(values, dtype)
        made = arrays.from_float64(values, dtype, np.empty(0))
        return __import__("cupy").asarray(made) if library == "cupy" else made

    def get(array):
        return numbers(array.get() if library == "cupy" else array)

    weight, bias = put(problem.weight, case.dtype("weight")), None
    if problem.bias is not None:
        bias = put(problem.bias, case.dtype("bias"))
    options = options_of(problem, put)
    by_y = {"memory_efficient": True, "bias": bias} if options.pop("memory_efficient") else {}
    forward = getattr(cupynorm, f"{case.norm}_forward")(
        put(problem.x, case.x), weight, bias, 1e-5, **options
    )
    # memory_efficient alone is nothing to forward.
    assert isinstance(forward, cupynorm.Forward if what == "y alone" else cupynorm.FusedForward)
    seed = getattr(forward, "dropout_seed", None)
    assert seed == (problem.dropout_seed if case.dropout_p else None)
    backward = getattr(cupynorm, f"{case.norm}_backward")(
        put(problem.dy, case.dtype("y")), forward.y if by_y else forward.sum, *forward[1 + (case.norm == "rms_norm") : 3],
        weight, zero_centered_weight=case.zero_centered_weight,
        dsum=None if problem.dsum is None else put(problem.dsum, case.sum),
        gradients=cupynorm.FusedBackward._fields if case.has_second else cupynorm.FusedBackward._fields[:4],
        dbias_dtype=case.dtype("bias"), dx_dtype=case.x, dresidual_dtype=case.added, row_scale=options["row_scale"],
        dropout_p=case.dropout_p, dropout_seed=seed, dy1=put(problem.dy1, case.dtype("y")) if case.has_second else None,
        weight1=options["weight1"], dbias1_dtype=case.bias1, **by_y,
    )  # fmt: skip
    assert isinstance(backward, cupynorm.FusedBackward)
    results = forward._asdict() | backward._asdict()
    results = {
        name: get(value)
        for name, value in results.items()
        if value is not None and name != "dropout_seed"
    }
    assert arrays.dtype_name(forward.rstd) == compute_dtype(case.sum).name
    if not case.has_own_sum or not case.residual:
        del results["dresidual"]
    if not case.has_own_sum and not case.residual:
        del results["sum"]
    for name in ("bias", "weight1", "bias1"):
        if getattr(case, name) is None:
            results.pop(f"d{name}", None)
    assert_right(problem, results)


@pytest.mark.parametrize(
    "what, wanted",
    [
        (what, wanted)
        for what in ("a stream of float32", "all", "a stream of the input's dtype")
        for wanted in itertools.product((False, True), repeat=6 if CASES[what].has_second else 4)
    ],
)
def test_gradients_that_are_asked_for(what, wanted, kernels):
    problem = random_problem(CASES[what])
    case = problem.case
    fields = cupynorm.FusedBackward._fields[: len(wanted)]
    options = options_of(problem, tensor)
    del options["memory_efficient"]
    forward = cupynorm.layer_norm_forward(
        tensor(problem.x, case.x),
        tensor(problem.weight, case.dtype("weight")),
        tensor(problem.bias, case.dtype("bias")),
        **options,
    )

    def gradients(names):
        return cupynorm.layer_norm_backward(
            tensor(problem.dy, case.dtype("y")), forward.sum, forward.mean, forward.rstd,
            tensor(problem.weight, case.dtype("weight")), zero_centered_weight=case.zero_centered_weight,
            dsum=tensor(problem.dsum, case.sum), gradients=names, dx_dtype=case.x, dresidual_dtype=case.added,
            row_scale=options["row_scale"], dropout_p=case.dropout_p, dropout_seed=forward.dropout_seed,
            dy1=tensor(problem.dy1, case.dtype("y")) if case.has_second else None, weight1=options["weight1"],
            dbias1_dtype=case.bias1,
        )  # fmt: skip

    names = [name for name, is_wanted in zip(cupynorm.FusedBackward._fields, wanted) if is_wanted]
    made = gradients(names)._asdict()
    assert [name for name, gradient in made.items() if gradient is not None] == names
    judged = {name: made[name] for name in names if case.has_own_sum or name != "dresidual"}
    assert_right(problem, judged | {"sum": forward.sum})
    # What comes from one kernel is the same bits, whether the sums of weight and bias are asked for or not.
    if made["dx"] is not None and made["dresidual"] is not None:
        everything = gradients(fields)
        assert torch.equal(made["dx"], everything.dx) and torch.equal(
            made["dresidual"], everything.dresidual
        )
        assert made["dx"].dtype == getattr(torch, case.x) and made["dresidual"].dtype == getattr(
            torch, case.added
        )


def test_both_gradients_come_from_one_kernel(kernels):
    x, residual = (
        random(300, 64, dtype=torch.bfloat16).requires_grad_(),
        random(300, 64, dtype=torch.float32).requires_grad_(),
    )
    y, added = cupynorm.layer_norm(
        x, 64, residual=residual, residual_dtype=torch.float32, return_residual=True
    )
    assert [each.kernel.source for each in kernels] == ["forward_warp.cu"]
    (y.sum() + added.sum()).backward()
    assert [each.kernel.source for each in kernels[1:]] == ["backward_warp.cu"]
    assert x.grad.dtype == torch.bfloat16 and torch.equal(x.grad, residual.grad.bfloat16())


def test_x_hat_is_rounded_to_the_input_s_dtype(device):
    """As Hugging Face's Llama: weight * x_hat.to(input's dtype); one in about 10,000 differs, where x_hat lies on an edge."""
    x, weight = (random(*shape, dtype=torch.bfloat16).to(device) for shape in ((500, 40), (40,)))
    x_hat = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6)
    for given in (weight, weight.float()):
        for call in (
            cupynorm.rms_norm,
            torch.compile(cupynorm.rms_norm, backend="eager", fullgraph=True),
        ):
            y = call(x, 40, given, 1e-6, round_x_hat=True)
            assert y.dtype == torch.bfloat16
            assert (y != (given * x_hat.bfloat16()).bfloat16()).double().mean() < 1e-3
        assert (y != cupynorm.rms_norm(x, 40, given, 1e-6)).double().mean() > 0.1


def test_y_is_kept_and_not_the_input(device):
    """What autograd saves: neither the input nor the sum, but y, which the next layer keeps anyway."""
    x, residual = (torch.ones(4, 40, device=device, requires_grad=True) for _ in range(2))
    weight = torch.ones(40, device=device, requires_grad=True)
    kept = []

    def pack(tensor):
        kept.append(tensor.data_ptr())
        return tensor

    for memory_efficient in (False, True):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y, added = cupynorm.layer_norm(
                x, 40, weight, residual=residual, return_residual=True, residual_dtype="float64",
                memory_efficient=memory_efficient, out_dtype="float64",
            )  # fmt: skip
        assert (y.data_ptr() in kept) is memory_efficient and (
            added.data_ptr() in kept
        ) is not memory_efficient
        assert x.data_ptr() not in kept


@pytest.mark.parametrize("device", DEVICES_HERE)
def test_real_activations_with_a_weight_of_next_to_nothing(device):
    """LayerNorms of a sentence encoder, one of whose weights is -1.5e-9: every gradient within what is said of it."""
    from cupynorm.check import activations

    smallest = 1.0
    for layer in activations.shipped():
        for dtype in ("float32", "bfloat16"):
            problem = layer.problem("layer_norm", dtype)
            case = replace(problem.case, memory_efficient=True)
            problem = replace(problem, case=case)
            smallest = min(smallest, np.abs(problem.weight).min())
            leaves = [
                tensor(getattr(problem, name), case.dtype(name), device).requires_grad_()
                for name in ("x", "weight", "bias")
            ]
            y = cupynorm.layer_norm(
                leaves[0], case.num_cols, *leaves[1:], case.eps, memory_efficient=True
            )
            made = torch.autograd.grad(y, leaves, tensor(problem.dy, case.dtype("y"), device))
            assert_right(problem, {"y": y, **dict(zip(("dx", "dweight", "dbias"), made))})
    assert smallest < 2e-9


def test_a_second_output_without_the_first(kernels):
    """What is not used takes no part: the gradient of y1 alone is that of a call with weight1 in weight's place, to the bit."""
    x, weight1, bias1 = (
        random(*shape, dtype=torch.float32).requires_grad_() for shape in ((6, 40), (40,), (40,))
    )
    weight = random(40, dtype=torch.float32, seed=1).requires_grad_()
    y, y1 = cupynorm.layer_norm(x, 40, weight, weight1=weight1, bias1=bias1)
    alone = cupynorm.layer_norm(x, 40, weight1, bias1)
    assert torch.equal(y1, alone) and torch.equal(y, cupynorm.layer_norm(x, 40, weight))
    made = [
        torch.autograd.grad((each**2).sum(), (x, weight1, bias1), retain_graph=True)
        for each in (y1, alone)
    ]
    assert all(map(torch.equal, *made))
    assert torch.autograd.grad(y1.sum(), weight, allow_unused=True, retain_graph=True) == (None,)
    assert torch.autograd.grad(y.sum(), weight1, allow_unused=True, retain_graph=True) == (None,)
    # One kernel writes both.
    assert sum("TwoStores" in each.kernel.name_expression for each in kernels) == 1
    both = torch.autograd.grad((y.sum() + y1.sum()), (x, weight, weight1), retain_graph=True)
    assert torch.equal(
        both[1], torch.autograd.grad(cupynorm.layer_norm(x, 40, weight).sum(), weight)[0]
    )


def test_rows_that_only_a_copy_makes_contiguous(kernels):
    """Input, residual and row_scale with strides of their own."""
    x, residual, row_scale = (
        random(40, 6, dtype=torch.float32).T,
        random(40, 6, dtype=torch.float32, seed=1).T,
        random(12)[::2],
    )
    plain = [each.contiguous() for each in (x, residual, row_scale)]
    made = [
        cupynorm.rms_norm(
            x,
            40,
            residual=residual,
            row_scale=row_scale,
            dropout_p=0.5,
            dropout_seed=1,
            return_residual=True,
        )
        for x, residual, row_scale in ((x, residual, row_scale), plain)
    ]
    assert all(map(torch.equal, *made))
    expected = reference.scaled(numbers(x), numbers(row_scale), 0.5, 1) + numbers(residual)
    np.testing.assert_allclose(numbers(made[0][1]), expected, rtol=2.0**-22, atol=2.0**-22)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_empty_inputs(shape, device):
    x = torch.zeros(shape, dtype=torch.float16, device=device, requires_grad=True)
    y, added = cupynorm.layer_norm(
        x, shape[1], residual_dtype=torch.float32, dropout_p=0.5, return_residual=True
    )
    assert y.shape == added.shape == shape and added.dtype == torch.float32
    y.sum().backward()
    assert x.grad.shape == shape


# -- the plain calls stay what they are ------------------------------------------------------------------


def test_a_seed_without_dropout_changes_nothing():
    x = random(4, 8).requires_grad_()
    for options in ({}, {"dropout_p": 0.0, "dropout_seed": 3}):
        cupynorm.layer_norm(x, 8, **options).sum().backward()
        cupynorm.rms_norm(x.detach().numpy(), 8, **options)
        assert type(cupynorm.layer_norm_forward(x.detach(), **options)) is cupynorm.Forward
    module = cupynorm.LayerNorm(8).double().eval()
    module(x, dropout_p=0.5)


def test_forget_forgets_fused_calls(kernels):
    cupynorm.layer_norm(random(4, 8, dtype=torch.float32), 8, dropout_p=0.5)
    assert kept.forwards
    kept.forget()
    assert not kept.forwards and not kept.backwards


# -- seeds -----------------------------------------------------------------------------------------------


def dropped(x, **options):
    """What dropout leaves of x."""
    return cupynorm.layer_norm(x, x.shape[-1], dropout_p=0.5, return_residual=True, **options)[1]


def test_seeds_of_torch(device):
    x = torch.ones(8, 40, device=device)
    torch.manual_seed(5)
    first, second = dropped(x), dropped(x)
    torch.manual_seed(5)
    assert (
        torch.equal(dropped(x), first)
        and torch.equal(dropped(x), second)
        and not torch.equal(first, second)
    )
    # One number of torch's generator each, and none where the seed is given.
    torch.manual_seed(5)
    seed = torch.randint(0, 2**62, (1,), device=device)
    assert torch.equal(dropped(x, dropout_seed=seed), first)
    assert torch.equal(dropped(x, dropout_seed=int(seed)), first)
    assert torch.equal(dropped(x, dropout_seed=seed.reshape(())), first)
    assert torch.equal(dropped(x), second)
    assert set(first.unique().tolist()) == {0.0, 2.0}


def test_seeds_of_numpy():
    x = np.ones((8, 40), np.float32)
    np.random.seed(5)
    first, second = dropped(x), dropped(x)
    np.random.seed(5)
    assert (dropped(x) == first).all() and (dropped(x) == second).all() and (first != second).any()
    for seed in (7, np.int64(7), np.array([7]), 7 - 2**64 + 2**64):
        assert ((dropped(x, dropout_seed=seed) != 0) == reference.dropout_mask(8, 40, 0.5, 7)).all()
    assert (dropped(x, dropout_seed=2**64 - 1) == dropped(x, dropout_seed=-1)).all()


@pytest.mark.gpu
def test_seeds_of_cupy():
    cupy = pytest.importorskip("cupy")
    x = cupy.ones((8, 40), "float32")
    cupy.random.seed(5)
    first, second = dropped(x), dropped(x)
    cupy.random.seed(5)
    assert (dropped(x) == first).all() and (dropped(x) == second).all() and (first != second).any()
    for seed in (7, cupy.array([7])):
        assert (
            (dropped(x, dropout_seed=seed).get() != 0) == reference.dropout_mask(8, 40, 0.5, 7)
        ).all()


@pytest.mark.gpu
def test_a_graph_draws_anew_in_each_replay():
    """As torch's dropout does: forward and backward of one replay have one mask, two replays have two."""
    x = torch.ones(64, 256, device="cuda", requires_grad=True)

    def step():
        y, added = cupynorm.layer_norm(
            x, 256, residual=torch.zeros_like(x), dropout_p=0.5, return_residual=True
        )
        return added, torch.autograd.grad(added.sum() + 0 * y.sum(), x)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        added, dx = step()
    masks = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(added != 0, dx != 0)
        masks.append((added != 0).clone())
    assert 0.45 < masks[0].double().mean() < 0.55
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


def test_a_module_drops_while_it_trains(device):
    for make in (cupynorm.LayerNorm, cupynorm.RMSNorm):
        module = make(40, device=device)
        x, residual = (
            torch.ones(4, 40, dtype=torch.bfloat16, device=device),
            torch.zeros(4, 40, device=device),
        )
        options = {
            "return_residual": True,
            "residual_dtype": torch.float32,
            "dropout_p": 0.5,
            "dropout_seed": 3,
        }
        _, added = module(x, residual, **options, row_scale=torch.full((4,), 0.5, device=device))
        kept = torch.from_numpy(reference.dropout_mask(4, 40, 0.5, 3)).to(device)
        assert added.dtype == torch.float32 and torch.equal(added, kept.float())
        y, added = module.eval()(x, residual, **options)
        assert torch.equal(added, x.float()) and y.dtype == torch.bfloat16


@pytest.mark.parametrize("dropout_p", [3, -0.5, float("nan"), True, "half", None])
@pytest.mark.parametrize("make", [cupynorm.LayerNorm, cupynorm.RMSNorm])
def test_a_module_checks_dropout_p_whether_it_trains_or_not(make, dropout_p):
    for module in (make(40), make(40).eval()):
        with pytest.raises(
            ValueError, match=f"dropout_p is {dropout_p!r}; expected a probability, from 0 to 1"
        ):
            module(torch.ones(4, 40), dropout_p=dropout_p)


# -- autograd, operators, the compiler -------------------------------------------------------------------


@pytest.mark.parametrize("norm_name", NORMS)
def test_gradients_by_finite_differences(norm_name):
    """torch's own check, on the CPU in float64, with a fixed mask."""
    x, residual, weight, bias = (
        random(*shape, seed=seed).requires_grad_()
        for seed, shape in enumerate(((3, 5), (3, 5), (5,), (5,)))
    )
    row_scale = random(3, seed=9)

    def call(x, residual, weight, bias):
        return getattr(cupynorm, norm_name)(
            x,
            5,
            weight,
            bias=bias,
            eps=0.1,
            residual=residual,
            return_residual=True,
            row_scale=row_scale,
            dropout_p=0.4,
            dropout_seed=2,
        )

    assert torch.autograd.gradcheck(call, (x, residual, weight, bias))
    assert torch.autograd.gradcheck(lambda *given: call(*given)[1], (x, residual, weight, bias))
    both = {"weight1": bias, "bias1": weight}
    assert torch.autograd.gradcheck(
        lambda x, weight, bias: getattr(cupynorm, norm_name)(x, 5, weight, **both),
        (x, weight, bias),
    )
    assert torch.autograd.gradcheck(
        lambda x, weight: call(x, residual.detach(), weight, None)[0], (x, weight)
    )


def test_second_derivatives_are_refused_in_a_sentence():
    x = random(3, 5).requires_grad_()
    y = cupynorm.layer_norm(x, 5, dropout_p=0.5)
    (dx,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(
        (cupynorm.layer_norm(x, 5, row_scale=torch.ones(3, dtype=torch.float64)) ** 2).sum(), x
    )
    assert dx.shape == plain.shape
    with pytest.raises(
        NotImplementedError,
        match="the second derivative of a norm with residual_dtype, row_scale, dropout_p, weight1, bias1, round_x_hat or",
    ):
        torch.autograd.grad(dx.sum(), x)


def test_transforms_are_refused_in_a_sentence():
    x = random(2, 3, 5)
    with pytest.raises(
        NotImplementedError,
        match="residual_dtype, row_scale, dropout_p, weight1, bias1, round_x_hat or memory_efficient was given to a call that "
        "torch.func",
    ):
        vmap(lambda x: cupynorm.layer_norm(x, 5, dropout_p=0.5))(x)
    x.requires_grad_()
    y = cupynorm.layer_norm(x, 5, row_scale=torch.ones(2, 3))
    with pytest.raises(NotImplementedError, match="asked for in a batch or in forward mode"):
        torch.autograd.grad(y, x, torch.ones(4, *y.shape, dtype=y.dtype), is_grads_batched=True)


def compiled_call(x, residual, weight, row_scale, seed, memory_efficient):
    y, y1, added = cupynorm.rms_norm(
        2 * x, 40, weight, residual=residual, return_residual=True, residual_dtype=torch.float32, row_scale=row_scale,
        dropout_p=0.5, dropout_seed=seed, weight1=2 * weight, bias1=weight, round_x_hat=True, memory_efficient=memory_efficient,
    )  # fmt: skip
    return y + 1, y1, added


@pytest.fixture
def compile_anew():
    torch.compiler.reset()
    yield functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    torch.compiler.reset()


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("seed", [7, torch.tensor([7])], ids=["int", "tensor"])
def test_compiled_results_are_the_eager_ones(compile_anew, seed, memory_efficient, device):
    seed = seed if isinstance(seed, int) else seed.to(device)
    compiled = compile_anew(compiled_call, dynamic=True)
    for num_rows in (4, 9):
        x, residual = (
            random(num_rows, 40, dtype=torch.bfloat16).to(device),
            random(num_rows, 40, dtype=torch.float32).to(device),
        )
        weight, row_scale = (
            random(40, dtype=torch.float32).to(device),
            random(num_rows, dtype=torch.float32).to(device),
        )
        leaves = [each.requires_grad_() for each in (x, residual, weight)]
        made = []
        for call in (compiled_call, compiled):
            outputs = call(x, residual, weight, row_scale, seed, memory_efficient)
            gradients = [torch.ones_like(each) for each in outputs]
            made.append([*outputs, *torch.autograd.grad(outputs, leaves, gradients)])
        assert all(map(torch.equal, *made))


def test_a_compiled_call_without_fused_options_takes_the_short_way():
    """The plain operator, which can be differentiated any number of times."""
    seen = []

    def backend(graph, _):
        seen.extend(node.target for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    for make in (cupynorm.LayerNorm, cupynorm.RMSNorm):
        for module in (make(40), make(40).eval()):
            torch.compile(module, fullgraph=True, backend=backend)(torch.ones(4, 40))
    torch.compile(cupynorm.layer_norm, fullgraph=True, backend=backend)(torch.ones(4, 40), 40)
    torch.compiler.reset()
    assert seen.count(torch.ops.cupynorm.norm_forward.default) == 5
    assert torch.ops.cupynorm.fused_norm_forward.default not in seen


def test_a_compiled_call_draws_its_seed(compile_anew):
    compiled = compile_anew(
        lambda x: cupynorm.layer_norm(x, 40, dropout_p=0.5, return_residual=True)
    )
    x = torch.ones(8, 40, requires_grad=True)
    torch.manual_seed(5)
    first, second = (compiled(x)[1] for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(compiled(x)[1], first) and not torch.equal(first, second)
    (dx,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(dx, first)
    # Where nothing makes a sum, the input is it.
    same = compile_anew(
        lambda x: cupynorm.layer_norm(x, 40, residual_dtype=torch.float32, return_residual=True)
    )(x)
    assert torch.equal(same[1], x) and torch.equal(same[0], cupynorm.layer_norm(x, 40))


@pytest.mark.parametrize(
    "affine, residual, dropout_p", list(itertools.product((False, True), (False, True), (0.0, 0.5)))
)
@pytest.mark.parametrize("device", DEVICES_HERE)
def test_operators_keep_the_rules_of_operators(device, affine, residual, dropout_p):
    x = random(3, 4, 5, dtype=torch.bfloat16).to(device).requires_grad_()
    weight, bias = (
        random(5, dtype=torch.float32).to(device).requires_grad_() if affine else None
        for _ in range(2)
    )
    stream = random(3, 4, 5, dtype=torch.float32).to(device).requires_grad_() if residual else None
    row_scale = random(3, 4, dtype=torch.float32).to(device) if affine else None
    seed = torch.tensor([3], device=device) if dropout_p else None
    for centered in (False, True):
        forward = (
            x, weight, bias, stream, weight, bias, row_scale, seed, [5], 0.1, centered, affine, None,
            torch.float32 if residual else None, dropout_p, affine, residual, 0, None, None, None,
        )  # fmt: skip
        opcheck(torch.ops.cupynorm.fused_norm_forward.default, forward)
        y, mean, rstd, added, _ = (
            made.detach() for made in torch.ops.cupynorm.fused_norm_forward(*forward)
        )
        for wanted in ((True, affine, affine, residual, affine, affine), (True, *[False] * 5)):
            opcheck(
                torch.ops.cupynorm.fused_norm_backward.default,
                (torch.ones_like(y), torch.ones_like(y) if affine else None, added if added.numel() else x.detach(),
                 mean if centered else None, rstd, weight, weight, None, row_scale, seed, None, [5], wanted, centered, affine,
                 False, torch.float32,
                 torch.float32, torch.bfloat16, torch.float32, dropout_p, 0, None),
                test_utils=("test_schema", "test_faketensor"),
            )  # fmt: skip


def test_saved_tensors_may_be_packed():
    x, residual = random(4, 40).requires_grad_(), random(4, 40, seed=1).requires_grad_()

    def gradients():
        y = cupynorm.layer_norm(
            x,
            40,
            residual=residual,
            dropout_p=0.5,
            dropout_seed=torch.tensor([3]),
            row_scale=torch.ones(4),
        )
        return torch.autograd.grad(y.pow(2).sum(), (x, residual))

    expected = gradients()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.detach().numpy().copy(), torch.from_numpy
    ):
        assert all(map(torch.equal, gradients(), expected))


# -- what is refused -------------------------------------------------------------------------------------

X = np.ones((3, 8), np.float32)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"dropout_p": 1.5}, "dropout_p is 1.5; expected a probability, from 0 to 1"),
        ({"dropout_p": -0.1}, "dropout_p is -0.1; expected a probability"),
        ({"dropout_p": float("nan")}, "dropout_p is nan; expected a probability"),
        ({"dropout_p": True}, "dropout_p is True; expected a probability"),
        ({"dropout_p": "half"}, "dropout_p is 'half'; expected a probability"),
        ({"dropout_p": 0.5, "dropout_seed": 2**64}, "dropout_seed is 18446744073709551616; expected an int of 64 bits"),
        ({"dropout_p": 0.5, "dropout_seed": 1.5}, "dropout_seed is 1.5; expected an int or one element of int64"),
        ({"dropout_p": 0.5, "dropout_seed": "3"}, "dropout_seed is '3'; expected an int or one element of int64"),
        ({"dropout_p": 0.5, "dropout_seed": True}, "dropout_seed is True; expected an int or one element of int64"),
        (
            {"dropout_p": 0.5, "dropout_seed": np.float64(3)},
            r"dropout_seed is .*3\.0.*; expected an int or one element of int64",
        ),
        (
            {"dropout_p": 0.5, "dropout_seed": np.bool_(True)},
            "dropout_seed is .*True.*; expected an int or one element of int64",
        ),
        ({"dropout_p": 0.5, "dropout_seed": [3]}, "dropout_seed is a list; expected an int or one element of int64"),
        (
            {"dropout_p": 0.5, "dropout_seed": np.ones(1)},
            r"dropout_seed has shape \(1,\) and dtype float64; expected one element of int64",
        ),
        (
            {"dropout_p": 0.5, "dropout_seed": np.ones(2, int)},
            r"dropout_seed has shape \(2,\) and dtype int64; expected one element",
        ),
        (
            {"dropout_p": 0.5, "dropout_seed": torch.ones(1, dtype=torch.int64)},
            "dropout_seed is a torch tensor on cpu, input is a NumPy",
        ),
        ({"row_scale": np.ones(4)}, r"row_scale has shape \(4,\); expected \(3,\)"),
        ({"row_scale": np.ones(3, int)}, "row_scale is of dtype int64; expected one of float16"),
        ({"row_scale": 2.0}, "row_scale is a float; expected a CuPy, torch or NumPy array"),
        ({"residual_dtype": "int8"}, "residual_dtype is 'int8'; expected one of float16"),
        (
            {"residual_dtype": "float16", "residual": np.ones((3, 8))},
            "residual is of dtype float64; expected the input's or residual_dtype, float32 or float16",
        ),
        ({"dropout_p": 0.5, "residual": np.ones((3, 8))}, "residual is of dtype float64; expected the input.s, float32"),
        ({"dropout_p": 0.5, "residual": np.ones((3, 7))}, r"residual has shape \(3, 7\); expected \(3, 8\)"),
        ({"weight1": np.ones(7)}, r"weight1 has shape \(7,\); expected \(8,\)"),
        ({"bias1": np.ones(8, int)}, "bias1 is of dtype int64; expected one of float16"),
        ({"dropout_p": 0.5, "weight": np.ones(7)}, r"weight has shape \(7,\); expected \(8,\)"),
    ],
)  # fmt: skip
def test_wrong_arguments(options, sentence):
    for call in (cupynorm.layer_norm, cupynorm.rms_norm):
        with pytest.raises((TypeError, ValueError), match=sentence):
            call(X, 8, **options)


def test_a_true_seed_is_refused_after_a_seed_of_1_too():
    """True equals 1: no prepared call may be found by it. An int of NumPy is one."""
    for make in (np.ones, torch.ones):
        x = make((3, 8))
        y = cupynorm.layer_norm(x, 8, dropout_p=0.5, dropout_seed=1)
        assert (cupynorm.layer_norm(x, 8, dropout_p=0.5, dropout_seed=np.uint8(1)) == y).all()
        with pytest.raises(
            TypeError, match="dropout_seed is True; expected an int or one element of int64"
        ):
            cupynorm.layer_norm(x, 8, dropout_p=0.5, dropout_seed=True)


@pytest.mark.parametrize("seed", ["3", True, 1.5])
def test_the_compiler_refuses_the_seeds_that_eager_mode_does(compile_anew, seed):
    call = compile_anew(
        lambda x: cupynorm.layer_norm(x, 8, dropout_p=0.5, dropout_seed=seed), fullgraph=False
    )
    with pytest.raises(
        (TypeError, RuntimeError),
        match=f"dropout_seed is {seed!r}; expected an int or one element of int64",
    ):
        call(torch.ones(3, 8))


def test_other_wrong_arguments():
    x = torch.ones(3, 8)
    with pytest.raises(ValueError, match="row_scale requires a gradient; it is a constant here"):
        cupynorm.layer_norm(x, 8, row_scale=torch.ones(3, requires_grad=True))
    with pytest.raises(
        TypeError,
        match="memory_efficient was given for y of float64 and a sum of float32; expected both float64, or",
    ):
        cupynorm.layer_norm(x, 8, memory_efficient=True, out_dtype="float64")
    with pytest.raises(ValueError, match="out was given for tensors that require gradients"):
        cupynorm.layer_norm(x.clone().requires_grad_(), 8, dropout_p=0.5, out=torch.empty(3, 8))
    forward = cupynorm.layer_norm_forward(x, dropout_p=0.5, dropout_seed=1)
    given = (x, forward.sum, forward.mean, forward.rstd)
    with pytest.raises(
        TypeError, match="dropout_seed is None; expected the seed that the forward returned"
    ):
        cupynorm.layer_norm_backward(*given, dropout_p=0.5)
    with pytest.raises(
        ValueError,
        match=r"gradients is \('dinput',\); expected some of dx, dweight, dbias, dresidual, dweight1, dbias1",
    ):
        cupynorm.layer_norm_backward(*given, gradients=("dinput",), dx_dtype="float32")
    with pytest.raises(TypeError, match="dy1 is None; expected the gradient of y1"):
        cupynorm.layer_norm_backward(*given, gradients=("dx", "dweight1"))
    with pytest.raises(TypeError, match="dx_dtype is 'int8'"):
        cupynorm.layer_norm_backward(*given, dx_dtype="int8")
    with pytest.raises(ValueError, match="out shares memory with row_scale"):
        memory = torch.ones(3, 8)
        cupynorm.layer_norm(x, 8, row_scale=memory[:, 0], out=memory)


def test_a_strategy_that_does_not_fit_the_backward_is_refused_at_once(kernels):
    x = torch.ones(2, 2048, requires_grad=True)
    with pytest.raises(ValueError, match="strategy 'warp' is too narrow"):
        cupynorm.layer_norm(x, 2048, dropout_p=0.5, strategy="warp")


def test_out(device):
    x, out = torch.ones(4, 40, device=device), torch.empty(4, 40, device=device)
    y = cupynorm.layer_norm(x, 40, dropout_p=0.5, dropout_seed=1, out=out)
    assert y is out and torch.equal(y, cupynorm.layer_norm(x, 40, dropout_p=0.5, dropout_seed=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stream_of_the_input_s_dtype_is_a_residual(dtype, kernels):
    """residual_dtype that changes nothing changes no bit, and takes the kernels of a plain residual."""
    x, residual = (
        random(5, 48, dtype=getattr(torch, dtype)),
        random(5, 48, dtype=getattr(torch, dtype), seed=1),
    )
    plain, named = (
        cupynorm.layer_norm(x, 48, residual=residual, return_residual=True, residual_dtype=each)
        for each in (None, dtype)
    )
    assert all(map(torch.equal, plain, named)) and kernels[0].kernel == kernels[1].kernel
