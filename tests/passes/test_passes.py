"""What the passes leave as it is, the rule that decides, and how they are installed."""

from __future__ import annotations

import operator
import pickle

import pytest

torch = pytest.importorskip("torch", "2.11")

import torch._inductor.config as inductor  # noqa: E402
from pass_graphs import Passes, text  # noqa: E402
from torch._inductor.custom_graph_pass import CustomGraphPass  # noqa: E402
from torch._inductor.utils import run_and_get_code  # noqa: E402
from torch._inductor.virtualized import V  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn import functional  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm.passes import before_autograd, rule  # noqa: E402
from cupynorm.passes.report import Change, Report  # noqa: E402

WIDTH = 8


def after(function, *tensors, replace: str = "all") -> tuple[str, Report]:
    """The graph of a function after the pass before autograd; its results are the eager ones."""
    passes = Passes(replace)
    torch.compiler.reset()
    got = torch.compile(function, backend=passes, fullgraph=True)(
        *(each.clone() for each in tensors)
    )
    torch.testing.assert_close(got, function(*(each.clone() for each in tensors)))
    return passes.after, passes.report


def x(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (3, 4, WIDTH), generator=generator).to(dtype)


def rms(x, dim=-1, keepdim=True, eps=1e-5):
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=keepdim) + eps)


# What is not found.

SQUARE = x(8, 8, 8)
LEFT = {
    "the mean of another dimension": lambda x: rms(x, 0),
    "the mean of all dimensions": lambda x: rms(x, (0, 1, 2)),
    "a mean without its dimension": lambda x: rms(x, -1, False),
    "eps inside the mean": lambda x: x * torch.rsqrt((x.pow(2) + 1e-5).mean(-1, True)),
    "eps as a tensor": lambda x: rms(x, eps=x[0, 0, 0].abs()),
    "a cube": lambda x: x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + 1e-5),
    "another power": lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-5) ** -1,
    "a variance that is returned": lambda x: (
        x * torch.rsqrt((variance := x.pow(2).mean(-1, keepdim=True)) + 1e-5),
        variance,
    ),
    "another numerator": lambda x: 2 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "a variance of other differences": lambda x: (
        x * torch.rsqrt((x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-5)
    ),
    "statistics that are returned": lambda x: (
        x * (rstd := torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        rstd,
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_norm_stays(name):
    graph, report = after(LEFT[name], SQUARE)
    assert "norm_forward" not in graph and not report.changes


def test_statistics_in_16_bits_stay():
    graph, report = after(rms, x(dtype=torch.bfloat16))
    assert "norm_forward" not in graph and not report.changes
    graph, _ = after(lambda x: rms(x.float() - x.mean(-1, True)), x(dtype=torch.bfloat16))
    assert "centered" not in graph and " mean" in graph


FOUND = {
    "square": lambda x: x * torch.rsqrt(torch.square(x).mean(dim=[2], keepdim=True) + 1e-5),
    "x * x": lambda x: torch.rsqrt(1e-5 + torch.mean(x * x, -1, keepdim=True)) * x,
    "a square root": lambda x: torch.div(x, (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()),
    "a power of -0.5": lambda x: x.mul((x**2).mean(-1, keepdim=True).add(1e-5) ** -0.5),
    "F.rms_norm": lambda x: functional.rms_norm(x, (WIDTH,), eps=1e-5),
}


@pytest.mark.parametrize("name", FOUND)
def test_spellings_of_one_norm(name):
    graph, _ = after(FOUND[name], x())
    assert graph == "norm_forward(input=given)"


def test_a_norm_of_a_norm():
    graph, _ = after(lambda x: norm(norm(x)), x())
    assert graph == "norm_forward(input=given)\nnorm_forward(input=norm_forward[0])"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_the_operators_are_given_no_other_numbers_than_floats(dtype):
    mask, counts = (x(WIDTH) > 0).to(dtype), (x() > 0).to(dtype)
    for function, other, expected in (
        (lambda x, m: rms(x) * m, mask, "norm_forward(input=given)\nmul"),
        (lambda x, m: rms(x) * m.float(), mask, "float\nnorm_forward(input=given, weight=float)"),
        (lambda x, m: norm(x + m.float()) + x, counts, "(input=float, residual=given)\nadd"),
        (lambda x, m: norm(x) * functional.silu(m.float()), counts, "store=silu_gate)"),
        (lambda x, m: norm(m.float()) + x, counts, "float\nnorm_forward(input=float)\nadd"),
    ):
        graph, _ = after(function, x(), other)
        assert graph.endswith(expected) and "arrays=[given]" not in graph


# What stays around a norm.


def norm(x):
    return functional.layer_norm(x, (WIDTH,))


def written_between(x, r):
    added = x + r
    y = norm(added)
    return y, added.mul_(2)


def written_before(x, r):
    added = x + r
    added.mul_(2)
    return norm(added)


def through_silu(x):
    y = x.pow(2)
    functional.silu(x, inplace=True)
    return x * torch.rsqrt(y.mean(-1, keepdim=True) + 1e-5)


AROUND = {
    "an addition of alpha": lambda x, r: norm(torch.add(x, r, alpha=2)),
    "a broadcast addition": lambda x, r: norm(x + r[0, 0]),
    "an addition in place": lambda x, r: norm(x.add_(r)),
    "+=": lambda x, r: norm(x.__iadd__(r)),
    "twice the same": lambda x, r: norm(x + x) + r,
    "a write before": written_before,
}


@pytest.mark.parametrize("name", AROUND)
def test_additions_that_stay(name):
    graph, report = after(AROUND[name], x(), x(seed=1))
    assert "residual" not in graph and "norm_forward(" in graph
    assert [change.done for change in report.changes] == ["replaced"]


def test_a_write_after_does_not_matter():
    graph, _ = after(written_between, x(), x(seed=1))
    assert "residual=given" in graph


def test_a_norm_whose_input_is_written_stays():
    graph, report = after(through_silu, x())
    assert "norm_forward" not in graph
    assert report.changes[0].done == "left" and "in place" in report.changes[0].remark


def test_a_weight_that_is_made_late():
    """The operator goes where everything that it reads is there."""

    def late(x, r):
        added = x + r
        weight = (2 * added)[0, 0]
        return functional.layer_norm(added, (WIDTH,), weight)

    assert "residual" not in after(late, x(), x(seed=1))[0]

    def own(x, r, w):
        added = x + r
        return functional.layer_norm(added, (WIDTH,), w * 2)

    graph, _ = after(own, x(), x(seed=1), x(WIDTH))
    assert graph == "mul\nnorm_forward(input=given, weight=mul, residual=given)"


@pytest.mark.parametrize("swapped", [False, True])
def test_a_float32_stream_beside_16_bits(swapped):
    """The addition's dtype is float32, in either order; y has that of F.layer_norm."""

    def stream(x, branch):
        added = branch + x if swapped else x + branch
        return norm(added), added

    graph, _ = after(stream, x(), x(seed=1, dtype=torch.bfloat16))
    assert "residual_dtype=float32" in graph and "out_dtype=float32" in graph


def test_a_layer_scale_and_a_gate():
    graph, report = after(lambda x, r, s: norm(r + s * x), x(), x(seed=1), x(WIDTH))
    assert "load=layer_scale" in graph and "mul" not in graph
    assert "the scale and the addition" in report.changes[0].remark
    graph, _ = after(lambda x, g: norm(x) * functional.silu(g), x(), x(seed=1))
    assert "store=silu_gate" in graph and "silu\n" not in graph


def test_what_is_made_from_the_sum_stays():
    """A scale that is computed from the sum can be read after it, the sum's operands cannot."""

    def modulated(x, r):
        added = x + r
        scale = 2 * added
        return norm(added) * (1 + scale) + r

    graph, report = after(modulated, x(), x(seed=1))
    assert "store=ada_ln" in graph and "residual" not in graph
    assert "without more" in report.changes[0].remark


def test_dropout_has_one_mask_in_forward_and_backward():
    """What is dropped passes no gradient, and what is kept passes 1 / (1 - p)."""

    def dropped(x, r):
        added = r + functional.dropout(x, 0.25, True)
        return norm(added), added

    passes, given = Passes(), [x(64, WIDTH).requires_grad_(), x(64, WIDTH, seed=1)]
    torch.compiler.reset()
    _, added = torch.compile(dropped, backend=passes, fullgraph=True)(*given)
    assert "dropout_p=0.25" in passes.after
    kept = (added - given[1]) / given[0]
    mask = kept.abs() > 0.5
    torch.testing.assert_close(kept, mask / 0.75, rtol=1e-4, atol=1e-4)
    assert 0.5 < mask.double().mean() < 0.95
    (gradient,) = torch.autograd.grad(added.sum(), given[:1])
    torch.testing.assert_close(gradient, mask / 0.75)
    graph, _ = after(lambda x, r: norm(r + functional.dropout(x, 0.25, False)), *given)
    assert "dropout_p" not in graph


# The rule.


def values_of(node: torch.fx.Node, values: dict) -> torch.Tensor:
    arguments = torch.fx.map_arg((node.args, node.kwargs), values.get)
    if node.op == "call_method":
        return getattr(torch.Tensor, node.target)(*arguments[0], **arguments[1])
    return node.target(*arguments[0], **arguments[1])


def traced(function, *shapes, dtype=torch.bfloat16, device="cuda") -> torch.fx.Graph:
    """torch's graph of fake tensors of a GPU, as Dynamo hands it to a backend."""
    with FakeTensorMode():
        given = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        graph = torch.fx.symbolic_trace(function).graph
        values: dict = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = given[len(values)]
            elif node.op != "output":
                values[node] = values_of(node, values)
            if node in values:
                node.meta["example_value"] = values[node]
    return graph


def product(x, w):
    return torch.matmul(functional.layer_norm(x, (1024,)), w)


def scaled(x, w):
    return functional.layer_norm(x, (1024,)) * w


def modulated(x, scale):
    return functional.layer_norm(x, (1024,)) * (1 + scale) + scale


def decided(graph: torch.fx.Graph, replace: str = "faster") -> tuple[str, str]:
    report = Report()
    before_autograd.rewrite(graph, replace, report)
    (change,) = report.changes
    assert (change.done == "replaced") == ("norm_forward" in text(graph))
    return change.done, change.remark


def test_the_rule():
    large, small, w = (4096, 1024), (rule.FEWEST_ELEMENTS // 1024 - 1, 1024), (1024, 1024)
    assert decided(traced(product, large, w)) == ("replaced", "")
    done, remark = decided(traced(product, small, w))
    assert done == "left" and "elements" in remark and f"{rule.FEWEST_ELEMENTS:,}" in remark
    assert decided(traced(product, small, w), "all")[0] == "replaced"
    done, remark = decided(traced(scaled, large, (1024,)))
    assert done == "left" and "torch fuses it with what reads y: mul" in remark
    done, remark = decided(traced(modulated, large, (1, 1024)))
    assert done == "left" and "what reads y: mul" in remark
    assert "scale and shift" in decided(traced(modulated, large, (1, 1024)), "all")[1]
    done, remark = decided(traced(product, large, w), "none")
    assert done == "left" and "none" in remark
    done, remark = decided(traced(product, large, w, device="cpu"))
    assert done == "left" and "cpu" in remark


def test_the_rule_for_sums_and_dtypes():
    def post_norm(x, r, w):
        return torch.matmul(functional.layer_norm(x + r, (1024,)), w)

    def pre_norm(x, r, w):
        added = x + r
        return torch.matmul(functional.layer_norm(added, (1024,)), w), added

    large, w = (4096, 1024), (1024, 1024)

    def scaled_branch(x, r, w):
        added = x + 2 * r
        return torch.matmul(functional.layer_norm(added, (1024,)), w), added

    def two_products(x, w):
        y = functional.layer_norm(x, (1024,))
        return torch.matmul(y, w), torch.matmul(y.view(-1, 1024), w)

    done, remark = decided(traced(post_norm, large, large, w))
    assert done == "left" and "nothing else reads the sum" in remark
    assert decided(traced(pre_norm, large, large, w))[0] == "replaced"
    graph = traced(post_norm, large, large, w)
    for node in graph.nodes:
        if node.target is operator.add:  # as where gradients are wanted
            node.meta["example_value"].requires_grad_()
    assert decided(graph)[0] == "replaced"
    done, remark = decided(traced(scaled_branch, large, large, w))
    assert done == "left" and "what is added: mul" in remark
    assert decided(traced(two_products, large, w))[0] == "replaced"
    graph = traced(two_products, large, w)
    for node in graph.nodes:
        if node.target is functional.layer_norm:
            node.meta["example_value"].requires_grad_()
    done, remark = decided(graph)
    assert done == "left" and "2 operations read y; torch adds their gradients" in remark


def test_the_rule_for_a_y_that_is_read_in_several_dtypes():
    """As BERT's under autocast, whose products have results of 16 bits."""

    def bert(x, w):
        y = functional.layer_norm(x, (1024,))
        return torch.matmul(y, w), y + x

    def two_products(x, w):
        y = functional.layer_norm(x, (1024,))
        return torch.matmul(y, w), torch.matmul(y, w.T), y + x

    def graph_of(function, dtypes, requires_grad=True):
        graph = traced(function, (4096, 1024), (1024, 1024), dtype=torch.float32)
        dtypes = iter(dtypes)
        for node in graph.nodes:
            if node.target is torch.matmul:
                node.meta["example_value"] = node.meta["example_value"].to(next(dtypes))
            if node.target is functional.layer_norm and requires_grad:
                node.meta["example_value"].requires_grad_()
        return graph

    half, other = torch.bfloat16, torch.float16
    assert decided(graph_of(bert, [half]))[0] == "replaced"
    assert decided(graph_of(bert, [half], False))[0] == "replaced"
    assert decided(graph_of(two_products, [half, half], False))[0] == "replaced"
    done, remark = decided(graph_of(two_products, [half, half]))
    assert done == "left" and "3 operations read y; torch adds their gradients" in remark
    done, remark = decided(graph_of(two_products, [half, other]))
    assert done == "left" and "y is read in bfloat16 and float16 and float32" in remark
    graph = graph_of(bert, [half], False)
    for node in graph.nodes:
        if node.target is functional.layer_norm:
            node.meta["example_value"] = node.meta["example_value"].to(other)
    done, remark = decided(graph)
    assert done == "left" and "y is read in bfloat16 and float16" in remark


def test_wrapped_tensors_are_left():
    """As DTensors, which the operators with fused options refuse."""
    from torch.testing._internal.two_tensor import TwoTensor

    graph = traced(product, (4096, 1024), (1024, 1024))
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["example_value"] = TwoTensor(*(node.meta["example_value"],) * 2)
    done, remark = decided(graph, "all")
    assert done == "left" and "TwoTensor" in remark


def test_cpu_tensors_are_left():
    graph, report = after(norm, x(), replace="faster")
    assert graph == "layer_norm" and report.changes[0].done == "left"
    assert str(report.changes[0].remark) in report.as_text() and "1 left" in report.as_html()


def test_the_report_counts_equal_casts():
    report = Report([Change(1, "", "norm_forward", "cast", "writes y")] * 3, 1)
    report.changes.append(Change(1, "n", "layer_norm", "left", "small"))
    lines = report.as_text().splitlines()
    assert lines[1].endswith("cast  writes y (3 times)") and lines[2].endswith("left  small")
    assert lines[3] == "1 graph: 0 replaced, 0 fused, 0 kept, 1 left"


# Installing.

PLACES = ("pre_grad_custom_pass", "joint_custom_post_pass")


def installed() -> list:
    return [getattr(inductor, place) for place in PLACES]


def test_passes_are_put_in_and_taken_out():
    before = installed()
    with cupynorm.compile_passes() as passes:
        assert all(isinstance(each, CustomGraphPass) for each in installed())
        assert "0 graphs" in str(passes) and passes.changes == []
    assert installed() == before
    with pytest.raises(ValueError, match="replace is 'some'; expected one of faster, all, none"):
        cupynorm.compile_passes(replace="some")


def test_passes_of_others_stay():
    seen = []

    class Other(CustomGraphPass):
        def __call__(self, graph):
            seen.append(graph)

        def uuid(self):
            return "other"

    other = Other()
    with inductor.patch({PLACES[1]: other}), cupynorm.compile_passes(replace="all") as first:
        with cupynorm.compile_passes(replace="none"):
            chain = getattr(inductor, PLACES[1])
            assert "other" in str(chain.uuid()) and str(chain.uuid()).count("passes") == 1
            graph = torch.fx.symbolic_trace(lambda x: x + 1).graph
            chain(graph)
            assert seen == [graph]
            with pytest.raises(RuntimeError, match="was set again after compile_passes"):
                first.undo()
        first.undo()
        assert getattr(inductor, PLACES[1]) is other


def test_the_key_of_the_cache_has_the_options():
    """Compiled code is found again on the disk only by passes that would do the same."""
    keys = []
    for replace in ("all", "none", "all"):
        with cupynorm.compile_passes(replace=replace):
            keys.append([(each.uuid(), pickle.dumps(each)) for each in installed()])
    assert keys[0] == keys[2] != keys[1]
    assert keys[0][0] != keys[0][1]


def block(x, r):
    added = x + r
    return functional.layer_norm(added, (WIDTH,)), added


@pytest.mark.parametrize("mode", [None, "max-autotune"])
def test_inductor_applies_the_passes(mode):
    given = [x().requires_grad_(), x(seed=1).requires_grad_()]
    results = []
    uncached = inductor.patch(force_disable_caches=True)  # or nothing may be left to report
    with uncached, cupynorm.compile_passes(replace="all") as passes:
        torch.compiler.reset()
        for function in (block, torch.compile(block, mode=mode)):

            def run(function=function):
                y, added = function(*given)
                gradients = torch.autograd.grad((y * y * y).sum() + added.sum(), given)
                return y, added, *gradients

            made, codes = run_and_get_code(run)
            results.append(made)
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)
    assert [change.done for change in passes.changes] == ["replaced"]
    assert "with the addition before it" in str(passes)
    # Forward and backward call their norm directly, not by its operator.
    assert [code.count(" = known_call(") for code in codes] == [1, 1]
    assert not any("in_graph.default(" in code for code in codes)


def test_nothing_changes_in_a_package_for_other_programs():
    """AOTInductor's packages run where Python's operators are not."""
    graph = traced(product, (4096, 1024), (1024, 1024))
    with cupynorm.compile_passes() as passes:
        with V.set_aot_compilation(True):
            inductor.pre_grad_custom_pass(graph)
        assert not passes.changes
        inductor.pre_grad_custom_pass(graph)
        assert [change.done for change in passes.changes] == ["replaced"]
