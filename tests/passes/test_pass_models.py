"""The passes on the norms of real models: the graphs as text, and results beside float64.

graphs.txt has the graphs before and after. A pattern that is no longer found changes them.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", "2.11")

from pass_graphs import Passes  # noqa: E402
from pass_models import MODELS, model_and_input  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm.passes import before_autograd  # noqa: E402

GRAPHS = Path(__file__).parent / "graphs.txt"
CASES = [*MODELS, "gpt2 swapped"]


def gradients(model, x, autocast: bool, forward=None) -> list[torch.Tensor]:
    """y, dx and the gradients of all parameters. forward: the compiled model."""
    x = x.detach().clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        y = (model if forward is None else forward)(x)
    factors = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device)
    loss = (y.double() * factors.view(y.shape)).sum()
    return [y, *torch.autograd.grad(loss, [x, *model.parameters()])]


def compiled(case: str, passes: Passes) -> tuple:
    """Results of a model eagerly, compiled with the passes, and in float64."""
    model, x, autocast = model_and_input(case.split()[0])
    if case.endswith("swapped"):
        cupynorm.swap_norms(model)
    torch.compiler.reset()
    forward = torch.compile(model, backend=passes, fullgraph=True)
    got = gradients(model, x, autocast, forward)
    exact = gradients(copy.deepcopy(model).double(), x.double(), False)
    return gradients(model, x, autocast), got, exact


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def check_near(eager: list, got: list, exact: list, dtype: torch.dtype) -> None:
    """Checks that results are as near to float64 as those of eager calls.

    The rounding errors of both are sums of many, so their root mean squares differ little. Twice
    that of eager calls is allowed, and half a unit in the last place.
    """
    for at, (one, other, true) in enumerate(zip(eager, got, exact, strict=True)):
        assert one.dtype == other.dtype and one.shape == other.shape
        unit = torch.finfo(dtype).eps / 2
        allowed = 2 * rms(one.double() - true) + unit * rms(true)
        assert rms(other.double() - true) <= allowed, f"result {at}"


def dtype_of(case: str) -> torch.dtype:
    _, dtype, autocast = MODELS[case.split()[0]]
    return torch.bfloat16 if autocast else dtype


def graphs_of(passes: Passes) -> str:
    report = "\n".join("  ".join(each[1:]).strip() for each in passes.report.changes)
    parts = {"before": passes.before, "after": passes.after, "joint": passes.joint}
    parts["report"] = re.sub(" +\n", "\n", report)
    return "\n".join(f"{name}:\n{part}" for name, part in parts.items())


def expected_graphs() -> dict[str, str]:
    _, *parts = re.split(r"^# (.*)\n", GRAPHS.read_text(), flags=re.MULTILINE)
    return {name: part.strip() for name, part in zip(parts[::2], parts[1::2])}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_graphs_and_results(case):
    """The graphs are the expected ones, and results are as near to float64 as eager ones."""
    passes = Passes()
    results = compiled(case, passes)
    assert graphs_of(passes) == expected_graphs()[case]
    check_near(*results, dtype_of(case))


def test_every_model_has_its_graphs():
    assert list(expected_graphs()) == CASES


def test_a_wrong_rewriting_is_found(monkeypatch):
    """Without the 1 that Gemma adds to its weight."""

    def find_wrong(graph):
        for norm in find(graph):
            norm.zero_centered = False
            yield norm

    find = before_autograd.find
    monkeypatch.setattr(before_autograd, "find", find_wrong)
    with pytest.raises(AssertionError, match="result 0"):
        check_near(*compiled("gemma", Passes()), torch.bfloat16)


def any_number_of_rows(x):
    torch._dynamo.mark_dynamic(x, 1)
    return x


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "bert_autocast"])
def test_a_graph_for_any_number_of_rows(case):
    passes = Passes()
    model, x, autocast = model_and_input(case)
    torch.compiler.reset()
    forward = torch.compile(model, backend=passes, fullgraph=True)
    for num_rows in (5, 7, 3):
        rows = torch.randn(2, num_rows, x.shape[-1]).to(x.dtype)
        got = gradients(model, rows, autocast, lambda x: forward(any_number_of_rows(x)))
        exact = gradients(copy.deepcopy(model).double(), rows.double(), False)
        check_near(gradients(model, rows, autocast), got, exact, dtype_of(case))
    assert passes.report.num_graphs == 1
    assert [change.done for change in passes.report.changes[:2]] == ["replaced"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2", "bert_autocast", "llama"])
def test_activation_checkpoints(case):
    """A block is computed again in backward."""
    from torch.utils.checkpoint import checkpoint

    passes = Passes()
    model, x, autocast = model_and_input(case)
    torch.compiler.reset()
    forward = torch.compile(
        lambda x: checkpoint(model, x, use_reentrant=False), backend=passes, fullgraph=True
    )
    exact = gradients(copy.deepcopy(model).double(), x.double(), False)
    got = gradients(model, x, autocast, forward)
    check_near(gradients(model, x, autocast), got, exact, dtype_of(case))
    done = [change.done for change in passes.report.changes]
    assert done.count("replaced") == 2
    assert passes.joint.count("norm_forward_in_graph(") == 2


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2", "bert_autocast"])
def test_inductor_gives_the_results(case):
    """A block under autocast, with inductor's code for the CPU around the norms."""
    model, x, autocast = model_and_input(case)
    torch.compiler.reset()
    with cupynorm.compile_passes(replace="all"):
        got = gradients(model, x, autocast, torch.compile(model, fullgraph=True))
    exact = gradients(copy.deepcopy(model).double(), x.double(), False)
    check_near(gradients(model, x, autocast), got, exact, torch.bfloat16)


# GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("case", ["gpt2", "bert_autocast", "llama", "dit", "mamba"])
def test_compiled_models_on_a_gpu(case, mode):
    """With inductor's code, also captured in CUDA graphs: three steps on fresh inputs."""
    model, x, autocast = model_and_input(case)
    model = model.cuda()
    exact_model = copy.deepcopy(model).double()
    torch.compiler.reset()
    with cupynorm.compile_passes(replace="all") as passes:
        forward = torch.compile(model, fullgraph=True, mode=mode)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            rows = torch.randn(x.shape, generator=generator).to("cuda", x.dtype)
            torch.compiler.cudagraph_mark_step_begin()
            got = [each.clone() for each in gradients(model, rows, autocast, forward)]
            exact = gradients(exact_model, rows.double(), False)
            check_near(gradients(model, rows, autocast), got, exact, dtype_of(case))
    # Nothing is listed where the compiled code comes from torch's cache on disk.
    assert {change.done for change in passes.changes} <= {"replaced", "cast"}
