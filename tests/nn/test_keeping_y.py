"""Modules with memory_efficient=True: autograd keeps y and rstd, and backward computes x_hat."""

from __future__ import annotations

import numpy as np
import pytest
from cupynorm.reference.layer_norm import scale

import cupynorm
from cupynorm import functors, reference
from cupynorm.dtypes import DTYPES, compute_dtype, decode, encode
from cupynorm.gpu import arrays
from cupynorm.verify.bounds import expect
from cupynorm.verify.cases import Case, random_problem, shipped
from cupynorm.verify.results import CheckResult, judge_against

torch = pytest.importorskip("torch")
from cupynorm.nn import autograd  # noqa: E402

CLASSES = {"layer_norm": cupynorm.LayerNorm, "rms_norm": cupynorm.RMSNorm}
CASES = {
    "plain": Case("layer_norm", 6, 40, "bfloat16"),
    "RMSNorm": Case("rms_norm", 6, 300, "float16", bias=None),
    "float32": Case("layer_norm", 6, 33, "float32", zero_centered_weight=True),
    "float64": Case("rms_norm", 6, 40, "float64", bias=None),
    "a residual": Case("layer_norm", 6, 40, "float32", residual=True, dsum=True),
    "x_hat rounded": Case("rms_norm", 6, 40, "bfloat16", bias=None, round_x_hat=True),
    "wide weights": Case("layer_norm", 6, 1000, "float16", weight="float32", bias="float32"),
    "a stream": Case("rms_norm", 6, 40, "float16", bias=None, residual="float32", dsum=True),
    "a sum of float64": Case("layer_norm", 6, 40, "float32", residual="float64"),
}


def expected_of(problem, added: np.ndarray) -> dict:
    """Of each result the float64 values and what is allowed: x_hat is as far off as y allows.

    With t half a unit in the last place of 1 in y's dtype, x_hat is off by what is allowed of y
    over max(|weight|, t), and by |x_hat| * max(0, 1 - |weight| / t); and by the roundings of a
    difference and a quotient. dx is rounded before it is multiplied by rstd and dsum is added.
    """
    case, least = problem.case, DTYPES[problem.case.dtype("y")].half_ulp
    u = compute_dtype(case.sum).half_ulp
    plain = expect(problem, added=added)
    weight = np.abs(scale(problem.weight, case.zero_centered_weight))
    bias = 0.0 if problem.bias is None else problem.bias
    norm = getattr(reference, case.norm)
    x = added if case.has_own_sum or problem.residual is not None else problem.x
    x_hat = np.abs(norm(x, None, None, case.eps).y)
    of_y = plain["y"][1] + 2 * u * (x_hat * weight + np.abs(bias))
    e = of_y / np.maximum(weight, least)
    e = e + x_hat * (np.maximum(0.0, 1 - weight / least) + 2 * u)
    expected = expect(problem, added=added, e_backward=e)
    dsum = 0.0 if problem.dsum is None else np.abs(problem.dsum)
    for name in {"dx", "dresidual"} & set(expected):
        values, allowed = expected[name]
        expected[name] = values, allowed + 3 * u * (np.abs(values) + dsum)
    return expected


def assert_right(problem, device: str) -> None:
    """Outputs and gradients of the module are within the bounds."""
    case = problem.case

    def put(name: str, dtype: str | None = None):
        values = getattr(problem, name)
        dtype = dtype or case.dtype(name)
        if values is None:
            return None
        return arrays.from_float64(values, dtype, torch.empty(0)).to(device)

    module = CLASSES[case.norm](
        case.num_cols,
        case.eps,
        zero_centered_gamma=case.zero_centered_weight,
        round_x_hat=case.round_x_hat,
        memory_efficient=True,
    )
    leaves = {"dx": put("x").requires_grad_(), "dresidual": put("residual", case.added)}
    for name in ("weight", "bias"):
        if getattr(problem, name) is not None:
            setattr(module, name, torch.nn.Parameter(put(name)))
            leaves[f"d{name}"] = getattr(module, name)
    leaves = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    y, added = module(
        leaves["dx"],
        leaves.get("dresidual", torch.empty(0)).requires_grad_() if case.residual else None,
        return_residual=True,
    )
    outputs, upstream = [y], [put("dy")]
    if case.dsum:
        outputs, upstream = [y, added], [*upstream, put("dsum", case.sum)]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    made = {"y": y, "sum": added, **dict(zip(leaves, gradients))}
    assert [each.dtype for each in gradients] == [each.dtype for each in leaves.values()]
    if not case.has_own_sum and case.residual:
        assert torch.equal(made.pop("dresidual"), made["dx"])
    elif not case.has_own_sum:
        del made["sum"]
    results = {name: each.detach().double().cpu().numpy() for name, each in made.items()}
    expected = expected_of(problem, results.get("sum", problem.x))
    result = CheckResult(judge_against(case, expected, results))
    assert len(result.findings) == len(results) and result.ok, f"\n{result}"


@pytest.mark.parametrize("what", CASES)
def test_gradients_are_within_bounds(what, anywhere):
    """Also where weights are 0 or so small that y holds nothing of x_hat."""
    problem = random_problem(CASES[what])
    assert_right(problem, anywhere)
    dtype, center = problem.case.dtype("weight"), problem.case.zero_centered_weight
    for col, weight in ((3, -1.5e-9), (7, 0.0), (11, 1e-4)):
        problem.weight[col] = decode(encode(np.array(weight - center), dtype), dtype)
    assert_right(problem, anywhere)


def test_gradients_of_real_activations_with_a_tiny_weight_are_within_bounds(anywhere):
    """Gradients of a sentence encoder's LayerNorms, one of whose weights is -1.5e-9."""
    smallest = 1.0
    for layer in shipped():
        for dtype in ("float32", "bfloat16"):
            problem = layer.problem("layer_norm", dtype)
            smallest = min(smallest, np.abs(problem.weight).min())
            assert_right(problem, anywhere)
    assert smallest < 2e-9


@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
def test_neither_the_input_nor_the_sum_is_kept(make, anywhere):
    """Autograd saves y, which the next layer saves anyway."""
    x, residual = (torch.ones(4, 40, device=anywhere, requires_grad=True) for _ in range(2))
    kept = []

    def pack(tensor):
        kept.append(tensor.data_ptr())
        return tensor

    for memory_efficient in (False, True):
        module = make(40, memory_efficient=memory_efficient, device=anywhere)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y, added = module(x, residual, return_residual=True)
        assert (y.data_ptr() in kept) is memory_efficient
        assert (added.data_ptr() in kept) is not memory_efficient
        assert x.data_ptr() not in kept and residual.data_ptr() not in kept


def test_only_wanted_gradients_are_computed():
    """Of a frozen norm, and of an input without a gradient."""
    x = torch.randn(3, 8)
    module = cupynorm.LayerNorm(8, memory_efficient=True)
    module(x).square().sum().backward()
    expected = torch.nn.LayerNorm(8)
    expected(x).square().sum().backward()
    torch.testing.assert_close(module.weight.grad, expected.weight.grad)
    module.requires_grad_(False)
    x.requires_grad_()
    y, added = module(x, x, return_residual=True)
    (dx,) = torch.autograd.grad(added.sum(), x)  # the gradient of the sum alone
    assert torch.equal(dx, torch.full_like(x, 2.0))


def test_refusals():
    module, x = cupynorm.LayerNorm(8, memory_efficient=True), torch.ones(3, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="memory_efficient was asked for with create_gr"):
        torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    gate = functors.silu_gate(gate=torch.ones(3, 8))
    with pytest.raises(ValueError, match="memory_efficient was given with fuse"):
        module(x, fuse=gate)
    with pytest.raises(TypeError, match=r"residual is of dtype int8; expected one of float16"):
        module(x, x.detach().to(torch.int8))


def test_traced_modules_give_the_results_of_torch_s_norm():
    module = cupynorm.RMSNorm(8, memory_efficient=True)
    x = torch.randn(3, 8)
    expected = torch.nn.RMSNorm(8)(x)
    for traced in (
        torch.fx.symbolic_trace(torch.nn.Sequential(module)),
        torch.compile(module, backend="eager", fullgraph=True),
        torch.func.vmap(module),
    ):
        torch.testing.assert_close(traced(x), expected)


@pytest.mark.parametrize("what", ["plain", "float64"])
def test_a_wrong_gradient_is_found(what, monkeypatch):
    plain, u = autograd._gradients_from_y, DTYPES[CASES[what].x].half_ulp

    def wrong(*given):
        dx, *others = plain(*given)
        return dx * (1 + 400 * u), *others

    monkeypatch.setattr(autograd, "_gradients_from_y", wrong)
    with pytest.raises(AssertionError, match="dx"):
        assert_right(random_problem(CASES[what]), "cpu")
