"""The modules beside torch.nn's: arguments, parameters, state dicts, values; and swapping them into models of any origin."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import numpy as np
import numpy_as_cupy
import pytest

import cupynorm
from cupynorm.check.cases import Case, Problem, random_problem
from cupynorm.check.results import CheckResult, judge_all
from cupynorm.gpu import arrays, launch, nvrtc
from cupynorm.norm import api, arguments, kept
from cupynorm.norm.options import launch_options
from cupynorm.norm.prepared import FOR_STATISTICS, FOR_Y, PreparedBackward, PreparedForward
from cupynorm.norm.request import (
    DEFAULTS,
    BackwardOperands,
    BackwardRequest,
    ForwardOperands,
    ForwardOptions,
    ForwardRequest,
    Margins,
)
from cupynorm.plan.devices import DEVICES

torch = pytest.importorskip("torch")
from cupynorm.nn import modules  # noqa: E402  (imports torch)

PAIRS = [(cupynorm.LayerNorm, torch.nn.LayerNorm), (cupynorm.RMSNorm, torch.nn.RMSNorm)]
BOTH = pytest.mark.parametrize("ours, theirs", PAIRS, ids=["LayerNorm", "RMSNorm"])
DEVICES_HERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensor(values: np.ndarray, dtype: str, device: str = "cpu") -> torch.Tensor:
    return arrays.from_float64(values, dtype, torch.empty(0)).to(device)


def random_input(*shape: int, dtype: str = "float32", seed: int = 0) -> torch.Tensor:
    return tensor(np.random.default_rng(seed).standard_normal(shape) + 0.5, dtype)


def results(
    module: torch.nn.Module, problem: Problem, device: str = "cpu"
) -> dict[str, np.ndarray]:
    """y and its gradients, as float64, of a module that takes the problem's values into its parameters."""
    case = problem.case
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensor(getattr(problem, name), case.dtype(name)))
            parameter.grad = None
    x = tensor(problem.x, case.x, device).requires_grad_()
    y = module(x)
    y.backward(tensor(problem.dy, case.dtype("y"), device))
    found = {
        "y": y,
        "dx": x.grad,
        **{f"d{name}": parameter.grad for name, parameter in parameters.items()},
    }
    return {name: value.detach().double().cpu().numpy() for name, value in found.items()}


def assert_right(module: torch.nn.Module, problem: Problem, device: str = "cpu", **options) -> None:
    """All that a module gives is within what its dtypes allow."""
    findings = judge_all(problem, results(module, problem, device), **options)
    assert len(findings) == 2 + len(dict(module.named_parameters()))
    assert all(finding.ok for finding in findings), f"\n{CheckResult(findings)}"


def case_of(module: torch.nn.Module, num_rows: int, num_cols: int, dtype: str, **options) -> Case:
    names = dict(module.named_parameters())
    kind = "layer_norm" if isinstance(module, torch.nn.LayerNorm) else "rms_norm"
    given = {name: "same" if name in names else None for name in ("weight", "bias")}
    return Case(kind, num_rows, num_cols, dtype, **given, eps=module.eps, **options)


# -- what is torch.nn's ----------------------------------------------------------------------------------


@BOTH
def test_the_constructors_are_those_of_torch(ours, theirs):
    mine, torchs = (list(inspect.signature(each).parameters.values()) for each in (ours, theirs))
    positional = [each for each in mine if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert [each.name for each in positional] == [each.name for each in torchs]
    assert [each.default for each in positional[1:]] == [each.default for each in torchs[1:]]
    assert {each.name for each in mine[len(positional) :]} == {
        "zero_centered_gamma", "sm_margin", "sequence_parallel", "round_x_hat", "memory_efficient", "hidden_size",
        "params_dtype",
    }  # fmt: skip
    assert all(each.kind is each.KEYWORD_ONLY for each in mine[len(positional) :])
    assert issubclass(ours, theirs)


ARGUMENTS = [
    ((8,), {}),
    (([2, 4], 0.1), {}),
    ((8,), {"elementwise_affine": False}),
    ((8,), {"dtype": torch.bfloat16}),
]


@pytest.mark.parametrize("arguments, options", [*ARGUMENTS, ((8,), {"bias": False})])
@BOTH
def test_parameters_repr_and_state_dict_are_those_of_torch(ours, theirs, arguments, options):
    if "bias" in options and ours is cupynorm.RMSNorm:
        pytest.skip("RMSNorm has no bias")
    mine, torchs = ours(*arguments, **options), theirs(*arguments, **options)
    assert repr(mine) == repr(torchs)
    assert [name for name, _ in mine.named_parameters()] == [
        name for name, _ in torchs.named_parameters()
    ]
    for mine_to, torchs_to in ((mine, torchs), (torchs, mine)):
        with torch.no_grad():
            for parameter in mine_to.parameters():
                parameter.normal_()
        state = mine_to.state_dict()
        torchs_to.load_state_dict(state, strict=True)
        assert list(torchs_to.state_dict()) == list(state)
        for name, value in torchs_to.state_dict().items():
            assert torch.equal(value, state[name]) and value.dtype == state[name].dtype


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("device", DEVICES_HERE)
@BOTH
def test_values_and_gradients(ours, theirs, device, dtype):
    """Against float64; torch's module is held to the same bounds where it keeps them, so that both mean the same."""
    for make in (ours, theirs) if device == "cpu" and dtype in ("float32", "float64") else (ours,):
        module = make(40, 0.01, device=device, dtype=getattr(torch, dtype))
        assert_right(
            module,
            random_problem(case_of(module, 7, 40, dtype)),
            device,
            rounded_mean=make is theirs,
        )


@pytest.mark.parametrize("device", DEVICES_HERE)
@BOTH
def test_a_residual(ours, theirs, device):
    module = ours((2, 4), device=device)
    x, residual = (random_input(3, 2, 4, seed=seed).to(device) for seed in (0, 1))
    y, added = module(x, residual, return_residual=True)
    assert (
        torch.equal(added, x + residual)
        and torch.equal(y, module(x + residual))
        and torch.equal(module(x, residual), y)
    )
    y, same = module(x, return_residual=True)
    assert same is x and torch.equal(y, module(x))


@BOTH
def test_other_dtypes_and_copies(ours, theirs):
    module = ours(8)
    assert (
        module.half().weight.dtype == torch.float16
        and module.bfloat16().weight.dtype == torch.bfloat16
    )
    assert module.to(torch.float64)(random_input(3, 8, dtype="float64")).dtype == torch.float64
    marked = ours(
        8, 0.1, zero_centered_gamma=True, sm_margin={"backward": 4}, sequence_parallel=True
    )
    with torch.no_grad():
        marked.weight.normal_()
    x = random_input(3, 8)
    file = io.BytesIO()
    torch.save(marked, file)
    file.seek(0)
    for twin in (
        copy.deepcopy(marked),
        pickle.loads(pickle.dumps(marked)),
        torch.load(file, weights_only=False),
    ):
        assert (
            repr(twin) == repr(marked)
            and torch.equal(twin(x), marked(x))
            and twin.weight is not marked.weight
        )
        assert all(parameter.sequence_parallel is True for parameter in twin.parameters())


class Twice(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@BOTH
def test_weights_that_are_no_parameters(ours, theirs):
    """As torch's own tools leave them: swapped for one call, parametrized, or plain attributes."""
    module, x = ours(8), random_input(3, 8)
    weight = random_input(8, seed=1)
    with torch.no_grad():
        module.weight.copy_(weight)
    y = module(x)
    assert torch.equal(
        torch.func.functional_call(module, {"weight": 2 * weight}, (x,)), 2 * y
    ) and torch.equal(module(x), y)
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Twice())
    assert torch.equal(module(x), 2 * y)
    plain = ours(8)
    del plain.weight
    plain.weight = weight
    assert torch.equal(plain(x), y)


@BOTH
def test_compiled(ours, theirs):
    torch.compiler.reset()
    module, x = ours(8), random_input(3, 8).requires_grad_()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = [
        (y := each(x), *torch.autograd.grad(y.square().sum(), (x, *module.parameters())))
        for each in (module, compiled)
    ]
    assert all(map(torch.equal, *results)) and len(results[0]) == 2 + len([*module.parameters()])
    with torch.no_grad():
        module.weight.mul_(2)
    assert torch.equal(compiled(x), module(x)) and not torch.equal(module(x), results[0][0])


# -- what is TransformerEngine's -------------------------------------------------------------------------


@BOTH
def test_zero_centered_gamma(ours, theirs):
    module, plain = ours(40, 0.01, zero_centered_gamma=True), theirs(40, 0.01)
    assert (module.weight == 0).all()
    x = random_input(5, 40, dtype="float64")
    torch.testing.assert_close(module(x.float()), plain(x.float()))
    assert_right(
        module, random_problem(case_of(module, 5, 40, "float32", zero_centered_weight=True))
    )
    assert not ours(8, elementwise_affine=False, zero_centered_gamma=True).state_dict()


@BOTH
def test_the_other_names(ours, theirs):
    module = ours(hidden_size=8, params_dtype=torch.float16)
    assert module.normalized_shape == (8,) and module.weight.dtype == torch.float16
    for options, names in (
        ({"normalized_shape": 8, "hidden_size": 8}, "normalized_shape and hidden_size are given"),
        (
            {"normalized_shape": 8, "dtype": torch.float16, "params_dtype": torch.float16},
            "dtype and params_dtype are given",
        ),
        ({}, "normalized_shape is None; expected an int"),
    ):
        with pytest.raises(TypeError, match=names):
            ours(**options)


@BOTH
def test_repr_shows_what_is_not_default(ours, theirs):
    extras = {"zero_centered_gamma": True, "sm_margin": 4, "sequence_parallel": False}
    for name, value in extras.items():
        assert repr(ours(8, **{name: value})) == repr(theirs(8))[:-1] + f", {name}={value})"


@BOTH
def test_sequence_parallel_is_an_attribute_of_the_parameters(ours, theirs):
    assert not any(hasattr(parameter, "sequence_parallel") for parameter in ours(8).parameters())
    for value in (True, False):
        module = ours(8, device="meta", sequence_parallel=value).to_empty(device="cpu")
        module.reset_parameters()
        for _ in range(2):
            assert all(parameter.sequence_parallel is value for parameter in module.parameters())
            module.load_state_dict(theirs(8).state_dict(), assign=True)


@BOTH
def test_meta(ours, theirs):
    for zero_centered in (False, True):
        module = ours(8, device="meta", zero_centered_gamma=zero_centered)
        assert module.weight.is_meta
        module.to_empty(device="cpu").reset_parameters()
        x = random_input(3, 8)
        torch.testing.assert_close(module(x), theirs(8)(x))


@BOTH
def test_state_dicts_of_transformer_engine(ours, theirs):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), ours(8))
    state = model.state_dict() | {"1._extra_state": torch.empty(0, dtype=torch.uint8)}
    state["1.weight"] = torch.full((8,), 3.0)
    model.load_state_dict(state, strict=True)
    assert (model[1].weight == 3).all() and "1._extra_state" in state
    model[1].load_state_dict(model[1].state_dict() | {"_extra_state": None}, strict=True)
    for wrong in ({"0._extra_state": None}, {"1.scale": torch.ones(8)}):
        with pytest.raises(RuntimeError, match="Unexpected key"):
            model.load_state_dict(model.state_dict() | wrong, strict=True)
    with pytest.raises(RuntimeError, match="Missing key.*1.weight"):
        model.load_state_dict(
            {key: value for key, value in state.items() if key != "1.weight"}, strict=True
        )


# -- sm_margin -------------------------------------------------------------------------------------------

MARGINS = {"forward": 32, "backward": 64, "inference": 96}


@BOTH
def test_margins_that_are_refused(ours, theirs):
    for wrong, sentence in (
        (-1, "sm_margin is -1; expected a number of multiprocessors"),
        ({"forward": True}, "sm_margin is True; expected a number"),
        ({"backward": 1.0}, r"sm_margin is 1\.0; expected a number"),
        ({"forward": {"forward": 1}}, r"sm_margin is \{'forward': 1\}; expected a number"),
        ({"fwd": 1}, "sm_margin has fwd; expected some of forward, backward, inference"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ours(8, sm_margin=wrong)
        with pytest.raises(ValueError, match=sentence):
            cupynorm.layer_norm(np.ones((2, 8), "float32"), 8, sm_margin=wrong)


def test_each_kind_of_call_takes_its_own_margin():
    options = launch_options(None, None, None, {"backward": 2, "inference": 3})
    assert hash(options) and options.sm_margin == (0, 2, 3)
    assert [options.of(kind).sm_margin for kind in Margins._fields] == [0, 2, 3]
    one = launch_options("warp", None, None, 5)
    assert all(one.of(kind) is one for kind in Margins._fields)


def test_a_margin_of_its_own_shrinks_the_grid_of_each_plan(monkeypatch):
    """As many rows as fill an H200 many times over: the blocks that a margin leaves are what is launched."""
    monkeypatch.setattr(nvrtc, "cupy", lambda: numpy_as_cupy)
    monkeypatch.setattr(launch, "device", lambda index: DEVICES["H200"])
    monkeypatch.setattr(launch, "load", lambda each, index: each)
    x = numpy_as_cupy.ndarray((20000, 1024), np.float32)
    rstd = numpy_as_cupy.ndarray((20000,), np.float32)

    def forward(sm_margin, wants_statistics):
        options = launch_options(None, None, None, sm_margin)
        asked = ForwardOptions(False, (1024,), 1e-5, False, "float32", "float32", launch=options)
        purpose = FOR_STATISTICS if wants_statistics else FOR_Y
        prepared = PreparedForward(ForwardRequest(ForwardOperands(x), asked), purpose)
        return prepared, prepared.steps[0][0].grid_size

    def backward(options):
        asked = options._replace(dx_dtype="float32", dweight_dtype=None, dbias_dtype=None)
        request = BackwardRequest(BackwardOperands(x, x, None, rstd), asked)
        return PreparedBackward(request).steps[0][0].grid_size

    prepared, recorded = forward(MARGINS, True)
    assert recorded == forward(32, True)[1]
    assert forward(MARGINS, False)[1] == forward(96, False)[1]
    assert backward(prepared.backward) == backward(forward(64, True)[0].backward)
    assert forward(96, True)[1] < forward(64, True)[1] < recorded < forward(0, True)[1]


@BOTH
def test_margins_are_handed_on(ours, theirs, monkeypatch):
    seen = []
    monkeypatch.setattr(api, "launch_options", lambda *given: seen.append(given) or DEFAULTS)
    ours(8, sm_margin=MARGINS)(random_input(3, 8))
    assert seen == [(None, None, None, MARGINS)]


@pytest.mark.gpu
@BOTH
def test_margins_reach_the_plans(ours, theirs, monkeypatch):
    plain, seen = arguments.make_plan, []

    def make_plan(problem, device, num_rows, **options):
        seen.append(("forward" if problem.forward else "backward", options["sm_margin"]))
        return plain(problem, device, num_rows, **options)

    monkeypatch.setattr(arguments, "make_plan", make_plan)
    kept.forget()
    module = ours(1024, device="cuda", sm_margin={"forward": 1, "backward": 2, "inference": 3})
    x = random_input(600, 1024).cuda().requires_grad_()
    y = module(x)
    y.backward(torch.ones_like(y))
    with torch.no_grad():
        assert torch.equal(module(x), y)  # the grid changes, no bit of the result
    assert seen == [("forward", 1), ("backward", 2), ("forward", 3)]
    kept.forget()


# -- CUDA graphs -----------------------------------------------------------------------------------------


class Normed(torch.nn.Module):
    """Of norms alone, one with a residual: whatever torch computes between them gives the same bits each time."""

    def __init__(self, num_cols: int) -> None:
        super().__init__()
        self.first, self.last = torch.nn.LayerNorm(num_cols), torch.nn.RMSNorm(num_cols)

    def forward(self, x):
        return self.last(x + 2 * self.first(x))


def normed(num_cols: int, dtype: torch.dtype) -> torch.nn.Module:
    model = Normed(num_cols)
    assert len(cupynorm.swap_norms(model).swapped) == 2
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = random_input(num_cols, seed=seed)
    return model.to("cuda", dtype)


def eager_step(model: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """y, dx and the gradients of the parameters; the model's own are left alone."""
    model = copy.deepcopy(model)
    x = x.detach().clone().requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y, (x, *model.parameters()), dy)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_cols", [768, 20_000])
def test_a_training_step_in_a_graph(num_cols, dtype):
    """Forward and backward() of modules, replayed on other data, to the bit;
    all its memory is the graph's, which replays into it."""
    model = normed(num_cols, dtype)
    x, dy = (torch.randn(64, num_cols, device="cuda", dtype=dtype) for _ in range(2))
    x.requires_grad_()

    def step():
        y = model(x)
        y.backward(dy)
        return y

    def forget():
        x.grad = None
        model.zero_grad(set_to_none=True)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            forget()
            step()
    torch.cuda.current_stream().wait_stream(side)
    forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    made = [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]
    of_the_graph = [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == tuple(graph.pool())
    ]
    for tensor in made:
        assert any(low <= tensor.data_ptr() < high for low, high in of_the_graph)
    # Were a temporary of the capture not the graph's, one of these would now be where it was.
    others = [torch.full((64, num_cols), 7.0, device="cuda", dtype=dtype) for _ in range(8)]
    others += [
        torch.full((num_rows, num_cols), 7.0, device="cuda") for num_rows in (1, 2, 132, 264, 528)
    ]
    for seed in range(3):
        with torch.no_grad():
            x.copy_(random_input(64, num_cols, seed=seed))
            dy.copy_(random_input(64, num_cols, seed=seed + 10))
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
        right = eager_step(model, x, dy)
        assert len(right) == len(made) == 5
        for got, expected in zip(made, right):
            assert (
                torch.equal(got, expected)
                and expected.isfinite().all()
                and expected.abs().max() > 1
            )
    assert all((other == 7).all() for other in others)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_make_graphed_callables(dtype):
    """torch's own way to put a module's forward and backward into graphs, inside a step that is otherwise eager."""
    plain = normed(1024, dtype)
    sample = torch.randn(64, 1024, device="cuda", dtype=dtype, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(plain), (sample,))
    for seed in range(3):
        x, dy = (random_input(64, 1024, seed=seed + add).to("cuda", dtype) for add in (0, 10))
        right = eager_step(plain, x, dy)
        x.requires_grad_()
        graphed.zero_grad(set_to_none=True)
        y = graphed(x)
        y.backward(dy)
        got = [y, x.grad, *(parameter.grad for parameter in graphed.parameters())]
        assert len(got) == len(right) == 5
        for one, expected in zip(got, right):
            assert torch.equal(one, expected) and expected.abs().max() > 1


# -- swapping: what is swapped ---------------------------------------------------------------------------


class LlamaRMSNorm(torch.nn.Module):
    """As Hugging Face's models write it: x_hat is rounded before the weight multiplies it."""

    def __init__(self, num_cols: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(num_cols))
        self.variance_epsilon = eps
        self.num_steps = 0  # no eps, whatever it ends in

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        return self.weight * self.normalized(hidden_states.float()).to(hidden_states.dtype)


class T5LayerNorm(LlamaRMSNorm):
    """No mean in spite of its name."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class GemmaRMSNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.normalized(x.float()) * (1.0 + self.weight.float())).type_as(x)


class CohereLayerNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (self.weight.float() * self.normalized(wide - wide.mean(-1, keepdim=True))).to(
            x.dtype
        )


class InBfloat16(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.normalized(x)


class ClipLayerNorm(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).type(x.dtype)


class InitialisedLayerNorm(torch.nn.LayerNorm):
    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight)


TWICE = "x_hat was rounded before the weight, now y alone is"
WIDENED = "y of bfloat16 with float32 weight was float32, now bfloat16"
RECOGNISED = {
    "torch.nn.LayerNorm": (lambda: torch.nn.LayerNorm(64, 0.1), "LayerNorm", False, ""),
    "torch.nn.LayerNorm without bias": (lambda: torch.nn.LayerNorm(64, bias=False), "LayerNorm", False, ""),
    "torch.nn.LayerNorm without weight": (lambda: torch.nn.LayerNorm(64, elementwise_affine=False), "LayerNorm", False, ""),
    "torch.nn.LayerNorm of two dimensions": (lambda: torch.nn.LayerNorm((4, 64)), "LayerNorm", False, ""),
    "torch.nn.RMSNorm": (lambda: torch.nn.RMSNorm(64), "RMSNorm", False, ""),
    "Llama": (lambda: LlamaRMSNorm(64), "RMSNorm", False, f"{TWICE}; {WIDENED}"),
    "T5": (lambda: T5LayerNorm(64), "RMSNorm", False, f"{TWICE}; {WIDENED}"),
    "Gemma": (lambda: GemmaRMSNorm(64), "RMSNorm", True, ""),
    "Cohere": (lambda: CohereLayerNorm(64), "LayerNorm", False, ""),
    "in bfloat16": (lambda: InBfloat16(64), "RMSNorm", False, f"more than y was rounded, now y alone is; {WIDENED}"),
    "Clip": (lambda: ClipLayerNorm(64), "LayerNorm", False, ""),
    "a subclass that only initialises": (lambda: InitialisedLayerNorm(64), "LayerNorm", False, ""),
    "one column": (lambda: LlamaRMSNorm(1), "RMSNorm", False, WIDENED),
    "wide": (lambda: GemmaRMSNorm(16384, 1e-5), "RMSNorm", True, ""),
}  # fmt: skip


@pytest.mark.parametrize("what", RECOGNISED)
def test_what_is_swapped(what):
    make, kind, zero_centered, remark = RECOGNISED[what]
    module = make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    model = torch.nn.Sequential(module).eval()
    before, state, rng = (
        dict(model.named_parameters()),
        copy.deepcopy(model.state_dict()),
        torch.get_rng_state(),
    )
    x = random_input(3, 2, 4, *(getattr(module, "normalized_shape", None) or module.weight.shape))
    expected = model(x)
    steps = getattr(module, "num_steps", None)
    report = cupynorm.swap_norms(model)
    assert [(swap.name, swap.now, swap.remark) for swap in report.swapped] == [
        ("0", f"cupynorm.{kind}", remark)
    ]
    assert not report.left
    assert (
        type(model[0]) is getattr(cupynorm, kind) and model[0].zero_centered_gamma is zero_centered
    )
    assert model[0].training is False
    # The model is as it was: the very parameters, their values, the random numbers, what the module counts.
    assert list(before) == list(dict(model.named_parameters()))
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng) and getattr(module, "num_steps", None) == steps
    # Two results in float32, each within the bounds of gradient_check for rows of this width.
    magnitude = float((1 + expected.detach().abs()).max()) * 4
    allowed = 2 * 2.0**-24 * (4 + np.sqrt(model[0].normalized_shape).max()) * magnitude
    torch.testing.assert_close(model(x), expected, rtol=0, atol=allowed)
    report.undo()
    assert model[0] is module and torch.equal(model(x), expected)


@pytest.mark.parametrize("what", ["Llama", "T5", "Gemma", "in bfloat16", "torch.nn.RMSNorm"])
@pytest.mark.parametrize("device", DEVICES_HERE)
def test_a_rounding_that_is_kept(what, device):
    """With keep_rounding, what rounds x_hat before its weight is reproduced in bfloat16; nothing else changes."""
    make, _, _, remark = RECOGNISED[what]
    module = make().to(device).bfloat16()
    with torch.no_grad():
        module.weight.normal_()
    x = random_input(50, 64, dtype="bfloat16").to(device)
    expected, rounds = module(x), what in ("Llama", "T5")
    if what == "torch.nn.RMSNorm":  # old torch rounds at every step of it
        expected = copy.deepcopy(module).double()(x.double()).bfloat16()
    for keep_rounding in (False, True):
        model = torch.nn.Sequential(module)
        report = cupynorm.swap_norms(model, keep_rounding=keep_rounding)
        kept = rounds and keep_rounding
        assert model[0].round_x_hat is kept and ("round_x_hat=True" in repr(model)) is kept
        assert report.swapped[0].remark == (remark.replace(f"{TWICE}; ", "") if kept else remark)
        off = (model(x) != expected).double().mean()
        # float32 and float64 round to another bfloat16 about once in 10,000.
        assert off < 2e-3 if kept or what in ("Gemma", "torch.nn.RMSNorm") else off > 0.1


@pytest.mark.parametrize(
    "make", [LlamaRMSNorm, GemmaRMSNorm, torch.nn.LayerNorm, torch.nn.RMSNorm, ClipLayerNorm]
)
@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_modules_elsewhere_are_asked_on_the_cpu(make, device):
    model = torch.nn.Sequential(make(64)).to(device).bfloat16()
    before = list(model.parameters())
    report = cupynorm.swap_norms(model)
    assert len(report.swapped) == 1 and not report.left
    assert (
        all(got is parameter for got, parameter in zip(model.parameters(), before))
        and before[0].device.type == device
    )


def foreign(name: str, module: str, **attributes) -> torch.nn.Module:
    """A module that looks like another library's, and that nobody may call."""

    def forward(self, x):
        raise AssertionError("only CUDA")

    made = type(
        name, (torch.nn.Module,), {"__module__": module, "__qualname__": name, "forward": forward}
    )()
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape))


APEX = "apex.normalization.fused_layer_norm"
TE = "transformer_engine.pytorch.module"
BOTH_PARAMETERS = {"weight": (64,), "bias": (64,)}
FOREIGN = {
    "apex FusedLayerNorm": ("FusedLayerNorm", APEX, BOTH_PARAMETERS, {"eps": 0.1}, "LayerNorm", {}),
    "apex MixedFusedLayerNorm": (
        "MixedFusedLayerNorm", APEX, BOTH_PARAMETERS, {"eps": 0.1, "memory_efficient": True}, "LayerNorm",
        {"memory_efficient": True},
    ),
    "apex FusedRMSNorm": ("FusedRMSNorm", APEX, {"weight": (4, 64)}, {"eps": 0.1}, "RMSNorm", {}),
    "apex MixedFusedRMSNorm": ("MixedFusedRMSNorm", APEX, {"weight": (64,)}, {"eps": 0.1}, "RMSNorm", {}),
    "apex FusedRMSNorm without weight": (
        "FusedRMSNorm", APEX, {}, {"eps": 0.1, "normalized_shape": torch.Size([64])}, "RMSNorm", {},
    ),
    "apex FastLayerNorm": (
        "FastLayerNorm", "apex.contrib.layer_norm.layer_norm", BOTH_PARAMETERS, {"epsilon": 0.1}, "LayerNorm", {},
    ),
    "TransformerEngine LayerNorm": (
        "LayerNorm", f"{TE}.layernorm", BOTH_PARAMETERS,
        {"eps": 0.1, "zero_centered_gamma": True, "_sm_margins": MARGINS, "sequence_parallel": True}, "LayerNorm",
        {"zero_centered_gamma": True, "sm_margin": MARGINS, "sequence_parallel": True},
    ),
    "TransformerEngine RMSNorm": (
        "RMSNorm", f"{TE}.rmsnorm", {"weight": (64,)},
        {"eps": 0.1, "zero_centered_gamma": False, "_sm_margins": {"fwd": 32, "bwd": 64, "inf": 96}, "sequence_parallel": None},
        "RMSNorm", {"sm_margin": MARGINS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FOREIGN)
def test_known_classes_are_taken_at_their_name(what):
    name, module, shapes, attributes, kind, extras = FOREIGN[what]
    parameters = {key: parameter(*shape) for key, shape in shapes.items()}
    model = torch.nn.ModuleDict({"norm": foreign(name, module, **parameters, **attributes)})
    report = cupynorm.swap_norms(model)
    (swap,) = report.swapped
    assert (
        swap[:3] == ("norm", f"{module.partition('.')[0]}.{name}", f"cupynorm.{kind}")
        and not report.left
    )
    assert ("weight's dtype" in swap.remark) is (module.startswith(TE) or name.startswith("Mixed"))
    made = model["norm"]
    assert type(made) is getattr(cupynorm, kind) and made.eps == 0.1
    assert all(getattr(made, key) is value for key, value in parameters.items())
    assert {key: getattr(made, key) for key in modules.EXTRAS} == modules.EXTRAS | extras
    assert made(random_input(3, 4, 64)).shape == (3, 4, 64)


# -- swapping: what is left ------------------------------------------------------------------------------


class Gated(LlamaRMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if gate is None else x * torch.nn.functional.silu(gate))


class WithBuffer(LlamaRMSNorm):
    def __init__(self, num_cols: int) -> None:
        super().__init__(num_cols)
        self.register_buffer("scale", torch.ones(()))


class EpsOutside(LlamaRMSNorm):
    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class AnotherEps(LlamaRMSNorm):
    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Unbiased(LlamaRMSNorm):
    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(
            x.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1) + self.variance_epsilon
        )


class DroppingRMSNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(super().forward(x), training=self.training)


class ScaleOnly(LlamaRMSNorm):
    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return x


class LayerNorm2d(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim == 4:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(x)


class NoTensor(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


class Raising(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Triton kernels\nrun on CUDA")


class OtherParameter(torch.nn.Parameter):
    pass


def hooked(register: str) -> torch.nn.Module:
    module = LlamaRMSNorm(64)
    getattr(module, register)(lambda *given: None)
    return module


def parametrized() -> torch.nn.Module:
    return torch.nn.utils.parametrize.register_parametrization(
        torch.nn.LayerNorm(64), "weight", torch.nn.Softplus()
    )


def with_(module: torch.nn.Module, **attributes) -> torch.nn.Module:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


NEITHER = "it computes neither layer_norm nor rms_norm of its weight"
LEFT = {
    "forward hook": (lambda: hooked("register_forward_hook"), "it has forward_hooks"),
    "forward pre-hook": (lambda: hooked("register_forward_pre_hook"), "it has forward_pre_hooks"),
    "backward hook": (lambda: hooked("register_full_backward_hook"), "it has backward_hooks"),
    "state dict hook": (lambda: hooked("register_state_dict_pre_hook"), "it has state_dict_pre_hooks"),
    "parametrized": (parametrized, "its weight is parametrized"),
    "forward of the object": (lambda: with_(LlamaRMSNorm(64), forward=lambda x: x), "its forward was replaced on this object"),
    "gate": (lambda: Gated(64), "its forward takes x, gate; expected one input"),
    "buffer": (lambda: WithBuffer(64), "it holds scale, weight; expected a weight and perhaps a bias"),
    "eps outside": (lambda: EpsOutside(64), NEITHER),
    "another eps": (lambda: AnotherEps(64), NEITHER),
    "num_cols - 1": (lambda: Unbiased(4096), NEITHER),
    "dropout": (lambda: DroppingRMSNorm(64).eval(), NEITHER),
    "no norm": (lambda: ScaleOnly(64), NEITHER),
    "channels first": (lambda: LayerNorm2d(64), "its forward raised RuntimeError on the CPU: Given normalized_shape=[64]"),
    "no tensor": (lambda: NoTensor(64), "its forward raised AttributeError on the CPU: "),
    "raises": (lambda: Raising(64), "its forward raised RuntimeError on the CPU: Triton kernels"),
    "no eps": (lambda: with_(foreign("OlmoLayerNorm", "olmo"), normalized_shape=(64,)), "it has no eps"),
    "no weight": (lambda: with_(foreign("L2RMSNorm", "other"), eps=0.1), "nothing says what it normalises over"),
    "empty weight": (lambda: torch.nn.LayerNorm(0), "nothing says what it normalises over"),
    "other shapes": (lambda: with_(torch.nn.LayerNorm(64), bias=parameter(1)), "its weight has shape (64,), its bias (1,)"),
    "other parameter": (
        lambda: with_(torch.nn.RMSNorm(64), weight=OtherParameter(torch.ones(64))),
        "its weight is a OtherParameter; expected a plain",
    ),
    "TransformerEngine's operation": (
        lambda: foreign("RMSNorm", "transformer_engine.pytorch.ops.basic.rmsnorm", weight=parameter(64), eps=0.1),
        "TransformerEngine fuses it with what follows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left(what):
    make, reason = LEFT[what]
    module = make()
    model = torch.nn.Sequential(module, torch.nn.LayerNorm(64))
    rng = torch.get_rng_state()
    report = cupynorm.swap_norms(model)
    assert torch.equal(torch.get_rng_state(), rng)  # though some drop out
    ((name, was, now, remark),) = report.left
    assert (
        (name, now) == ("0", "")
        and was.endswith(type(module).__qualname__)
        and remark.startswith(reason)
    )
    assert model[0] is module and [swap.name for swap in report.swapped] == ["1"]


def test_what_is_no_layer_norm_is_not_mentioned():
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.GroupNorm(2, 8), torch.nn.PReLU(8), cupynorm.LayerNorm(8),
        cupynorm.RMSNorm(8), torch.nn.LocalResponseNorm(2),
    )  # fmt: skip
    before = list(model)
    report = cupynorm.swap_norms(model)
    assert (
        not report.swapped
        and not report.left
        and all(now is then for now, then in zip(model, before))
    )
    assert str(report).splitlines()[-1] == "0 swapped, 0 left"


def test_the_model_itself_is_left():
    for model in (torch.nn.LayerNorm(8), LlamaRMSNorm(8)):
        report = cupynorm.swap_norms(model)
        assert [swap.name for swap in report.left] == ["(model)"] and not report.swapped
        assert (
            "it is the model itself" in report.left[0].remark
            and "torch.nn.Sequential(model)" in report.left[0].remark
        )
    assert not cupynorm.swap_norms(cupynorm.LayerNorm(8)).left
    with pytest.raises(TypeError, match="model is a list; expected a torch.nn.Module"):
        cupynorm.swap_norms([torch.nn.LayerNorm(8)])


# -- swapping: whole models ------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, num_cols: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(num_cols), LlamaRMSNorm(num_cols)])
        self.linear = torch.nn.Linear(num_cols, num_cols)
        self.last = self.norms[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(self.norms[0](x))
        return self.last(x + self.linear(self.norms[1](x)))


def test_a_shared_module_stays_shared():
    model = Block(8)
    shared, order = model.last, [name for name, _ in model.named_parameters()]
    report = cupynorm.swap_norms(model)
    assert model.last is model.norms[1] and type(model.last) is cupynorm.RMSNorm
    assert [swap.name for swap in report.swapped] == ["last", "norms.0", "norms.1"]
    assert report.swapped[2].remark == "the module of last"
    assert [name for name, _ in model.named_parameters()] == order
    assert not cupynorm.swap_norms(model).swapped
    report.undo()
    assert model.last is model.norms[1] is shared


def test_undo_keeps_what_became_of_the_parameters():
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), GemmaRMSNorm(8))
    originals = list(model)
    report = cupynorm.swap_norms(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(random_input(3, 8)).square().sum().backward()
    optimizer.step()
    model.half().eval()
    state = {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    current = list(model.parameters())
    report.undo()
    report.undo()
    assert all(now is original for now, original in zip(model, originals)) and not model[1].training
    assert (
        all(now is then for now, then in zip(model.parameters(), current))
        and model[0].weight.dtype == torch.float16
    )


def test_the_report_is_a_table():
    model = torch.nn.ModuleDict({"first": torch.nn.LayerNorm(8), "second": Gated(8)})
    assert str(cupynorm.swap_norms(model)).splitlines() == [
        "name    was                 now",
        "first   torch.LayerNorm     cupynorm.LayerNorm",
        "second  test_modules.Gated                      its forward takes x, gate; expected one input",
        "1 swapped, 1 left",
    ]


@pytest.mark.parametrize("device", DEVICES_HERE)
def test_a_transformer_computes_the_same(device):
    """float64: nothing but the order of additions differs. Training mode,
    for in eval torch fuses the whole layer and asks no norm."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        64, 4, 128, dropout=0.0, batch_first=True, norm_first=True, dtype=torch.float64
    )
    model = torch.nn.TransformerEncoder(
        layer, 2, torch.nn.RMSNorm(64, dtype=torch.float64), enable_nested_tensor=False
    ).to(device)
    x = random_input(2, 5, 64, dtype="float64").to(device)

    def outcome():
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        return [y.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    expected = outcome()
    report = cupynorm.swap_norms(model)
    assert len(report.swapped) == 5 and not report.left
    # 64 columns and ten rows through twelve products: some hundred roundings in a row, of values up to their largest.
    for got, right in zip(outcome(), expected):
        torch.testing.assert_close(
            got, right, rtol=0, atol=2.0**-53 * 1000 * float(1 + right.abs().max())
        )
