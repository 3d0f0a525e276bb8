"""What torch traces, transforms or fakes is torch's own norm: same graphs, kernels and formats."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from models_nets import Bert, Decoder, Gpt2  # noqa: E402
from norm_calls import assert_few_roundings, random  # noqa: E402
from swap_classes import LlamaRMSNorm  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch._functorch.aot_autograd import make_boxed_func  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.func import functionalize, jvp, vmap  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm.nn import by_torch  # noqa: E402

WIDTH = 32


class Scaled(torch.Tensor):
    """A subclass that knows no kernel of ours."""


def llama(norm=torch.nn.RMSNorm) -> torch.nn.Module:
    of_heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "with_norms": False}
    model = Decoder(1, WIDTH, 16, base=1e4, eps=1e-6, mlp_width=64, **of_heads)
    if norm is not torch.nn.RMSNorm:
        model.norm = norm(WIDTH)
        for block in model.blocks:
            block.attention_norm, block.mlp_norm = norm(WIDTH), norm(WIDTH)
    return model


MODELS = {
    "GPT-2": lambda: Gpt2(2, 64, 16, 97),
    "BERT": lambda: Bert(2, 64, 2, context=16, num_tokens=97),
    "Llama": llama,
    "Llama of Hugging Face": lambda: llama(LlamaRMSNorm),
}


def two_of(name: str) -> tuple[torch.nn.Module, torch.nn.Module, tuple, torch.Tensor]:
    """A model, its copy with swapped norms, inputs and a target."""
    torch.manual_seed(0)
    model = MODELS[name]()
    swapped = copy.deepcopy(model)
    report = cupynorm.swap_norms(swapped)
    assert len(report.swapped) >= 3 and not report.left
    inputs, target = model.batch(2, torch.Generator().manual_seed(0))
    return model, swapped, inputs, target


def graphs_of(model: torch.nn.Module, inputs: tuple, target: torch.Tensor, training: bool) -> list:
    """The text of each graph that a backend is given, forward and backward."""
    texts = []

    def record(graph, _):
        texts.append(str(graph.graph))
        return make_boxed_func(graph)

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=record))
    with torch.set_grad_enabled(training):
        y = compiled(*(each.detach() for each in inputs))
    if training:
        model.loss(y, target).backward()
    return texts


@pytest.fixture(autouse=True)
def forgets_graphs():
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", ["GPT-2", "BERT"])
def test_a_compiled_model_has_the_graphs_of_the_model_before(name, training):
    model, swapped, *batch = two_of(name)
    expected = graphs_of(model, *batch, training)
    assert graphs_of(swapped, *batch, training) == expected
    assert len(expected) == 1 + training and "native_layer_norm" in expected[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Llama of Hugging Face"])
def test_inductor_makes_no_more_kernels(monkeypatch, name):
    """In bfloat16, which has more casts to fuse. Kernels are counted, not compiled."""
    from torch._inductor import async_compile, config, metrics

    kernels = async_compile.AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None
    monkeypatch.setattr(*kernels)
    model, swapped, inputs, target = two_of(name)
    nums = []
    for each in (model.bfloat16(), swapped.bfloat16()):
        torch.compiler.reset()
        metrics.reset()
        with config.patch(force_disable_caches=True):
            y = torch.compile(each, fullgraph=True)(*(x.detach().bfloat16() for x in inputs))
            each.loss(y, target).backward()
        nums.append(metrics.generated_kernel_count)
    assert 0 < nums[1] <= nums[0], nums


@pytest.mark.slow
def test_an_ahead_of_time_compiled_module_takes_any_rows(tmp_path):
    module = torch.nn.Sequential(cupynorm.LayerNorm(WIDTH), cupynorm.RMSNorm(WIDTH)).eval()
    rows = {"input": {0: torch.export.Dim("num_rows", min=2)}}
    x = random(4, WIDTH, dtype=torch.float32)
    exported = torch.export.export(module, (x,), dynamic_shapes=rows)
    path = torch._inductor.aoti_compile_and_package(exported, package_path=f"{tmp_path}/n.pt2")
    loaded = torch._inductor.aoti_load_package(path)
    for num_rows in (4, 9):
        x = random(num_rows, WIDTH, dtype=torch.float32)
        assert_few_roundings([loaded(x)], [module(x)])


@pytest.mark.parametrize("norm", [cupynorm.LayerNorm, cupynorm.RMSNorm])
def test_marked_rows_compile_once(norm):
    torch.compiler.reset()
    counters.clear()
    module = norm(WIDTH)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for num_rows in (4, 9, 5):
        x = random(num_rows, WIDTH, dtype=torch.float32)
        torch._dynamo.mark_dynamic(x, 0)
        assert_few_roundings([compiled(x)], [module(x)])
    assert counters["stats"]["unique_graphs"] == 1


# One call for each condition of by_torch.takes: without the condition a kernel would run.
TAKEN = {
    "compiled": lambda call, x: torch.compile(call, backend="eager", fullgraph=True)(x),
    "exported": lambda call, x: torch.export.export(Module(call), (x,)),
    "traced by jit": lambda call, x: torch.jit.trace(call, x, check_trace=False),
    "mapped": lambda call, x: vmap(call)(x[None]),
    "with a tangent": lambda call, x: jvp(call, (x,), (x,)),
    "with a tangent of autograd": lambda call, x: dual(call, x),
    "fake": lambda call, x: fake(call, x),
    "traced by make_fx": lambda call, x: make_fx(call)(x),
    "made functional": lambda call, x: functionalize(call)(x),
    "of a subclass": lambda call, x: call(x.as_subclass(Scaled)),
    "without memory": lambda call, x: call(x.to("meta")),
}
# Modes that look at calls from outside, and plain calls, keep the kernels.
OURS = {
    "plain": lambda call, x: call(x),
    "of a parameter": lambda call, x: call(torch.nn.Parameter(x)),
    "counted": lambda call, x: counted(call, x),
    "without gradients": lambda call, x: torch.no_grad()(call)(x),
    "in inference mode": lambda call, x: torch.inference_mode()(call)(x),
}


class Module(torch.nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


def dual(call, x):
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x, x))


def fake(call, x):
    with FakeTensorMode() as mode:
        return call(mode.from_tensor(x))


def counted(call, x):
    with FlopCounterMode(display=False):
        return call(x)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("how", [*TAKEN, *OURS])
def test_which_calls_torch_computes(monkeypatch, how, norm):
    calls = []

    def record(request):
        calls.append(request)
        return by_torch_normalize(request)

    by_torch_normalize = by_torch.normalize
    monkeypatch.setattr(by_torch, "normalize", record)
    (TAKEN | OURS)[how](lambda x: getattr(cupynorm, norm)(x, 8), random(3, 8, dtype=torch.float32))
    assert bool(calls) == (how in TAKEN)
