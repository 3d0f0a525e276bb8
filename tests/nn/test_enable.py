"""enable(): torch's own norms by our kernels. On the CPU the kernels run behind the key "CPU"."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from functools import partial

import pytest

import cupynorm

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from cupynorm.nn import enable as module  # noqa: E402
from cupynorm.norm import prepared  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(torch.library, "get_kernel"), reason="enable() needs torch 2.9"
)


@pytest.fixture(autouse=True)
def torchs_own_norms():
    yield
    cupynorm.disable()
    prepared.forget()


@pytest.fixture
def place(device, monkeypatch) -> Iterator[str]:
    """The device of tensors whose norms enable() serves."""
    if device != "cpu":
        yield device
        return
    monkeypatch.setattr(module, "DEVICE", "CPU")
    library = torch.library.Library("aten", "IMPL")  # aten has this one on GPUs alone
    library.impl("_fused_rms_norm_backward", backward_by_torch, "CPU")
    yield device
    cupynorm.disable()
    library._destroy()


def backward_by_torch(dy, x, extents, rstd, weight, output_mask):
    with torch.enable_grad():
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = x * (x * x).mean(-1, keepdim=True).rsqrt() * weight
        return torch.autograd.grad(y, (x, weight), dy)


def tensors(place, dtype, *, of_weight=None, shape=(6, 64), grad=True):
    weight_dtype = of_weight or dtype
    x = torch.randn(shape, device=place).to(dtype).requires_grad_(grad)
    weight = (torch.rand(shape[-1:], device=place) + 0.5).to(weight_dtype).requires_grad_(grad)
    bias = torch.randn(shape[-1:], device=place).to(weight_dtype).requires_grad_(grad)
    return x, weight, bias


def norm(centered, x, weight, bias):
    if centered:
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def gradients(centered, x, weight, bias):
    """y, and the gradients of what requires one, by an upstream gradient of 2."""
    given = [each for each in (x, weight, bias if centered else None) if each is not None]
    y = norm(centered, x, weight, bias)
    return [y, *torch.autograd.grad(y, given, torch.ones_like(y) * 2)]


def wide(values):
    return [None if each is None else each.detach().double().requires_grad_() for each in values]


def assert_near(made, expected, dtype):
    bound = 16 * torch.finfo(dtype).eps
    for at, (one, other) in enumerate(zip(made, expected, strict=True)):
        largest = other.abs().max().clamp(min=1)
        assert (one.double() - other).abs().max() <= bound * largest, at


CASES = {
    "bfloat16": (torch.bfloat16, "weight and bias"),
    "float32": (torch.float32, "weight"),
    "float16": (torch.float16, "none"),
    "float64": (torch.float64, "weight and bias"),
}


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(place, centered, case):
    dtype, affine = CASES[case]
    x, weight, bias = tensors(place, dtype)
    given = x, weight if "weight" in affine else None, bias if "bias" in affine else None
    expected = gradients(centered, *wide(given))
    with cupynorm.enabled() as calls:
        for _ in range(2):  # prepared, then repeated
            made = gradients(centered, *given)
            assert_near(made, expected, dtype)
            assert [each.dtype for each in made] == [dtype] * len(made)
            with torch.no_grad():
                assert_near([norm(centered, *given)], expected[:1], dtype)
            with torch.inference_mode():
                assert_near([norm(centered, *given)], expected[:1], dtype)
    assert calls.left == {}
    assert sum(calls.served.values()) == 8


LAYOUTS = {
    "other rows": lambda x: x[:5],
    "gaps": lambda x: x[:, :32],
    "transposed": lambda x: x[:, :6].T.contiguous().T,
    "misaligned": lambda x: x.flatten()[1:-63].view(5, 64),
    "three dimensions": lambda x: x.view(2, 3, 64),
    "one row": lambda x: x[0],
}


@pytest.mark.parametrize("centered", [True, False])
def test_layouts_in_any_order(place, centered):
    x, weight, bias = tensors(place, torch.float32, grad=False)
    with cupynorm.enabled() as calls:
        for _ in range(2):
            for of_x in LAYOUTS.values():
                part = of_x(x)
                given = [each[: part.shape[-1]] for each in (weight, bias)]
                given = [each.detach().requires_grad_() for each in (part, *given)]
                assert_near(gradients(centered, *given), gradients(centered, *wide(given)), x.dtype)
    assert calls.left == {}


@pytest.mark.parametrize("grad", [True, False])
def test_rms_norm_of_two_dtypes_has_the_dtype_of_x(place, grad):
    given = tensors(place, torch.bfloat16, of_weight=torch.float32, grad=grad)
    expected = gradients(False, *wide(given))
    with cupynorm.enabled() as calls:
        made = gradients(False, *given) if grad else [norm(False, *given)]
    assert_near(made, expected[: len(made)], torch.bfloat16)
    assert [each.dtype for each in made] == [torch.bfloat16, torch.bfloat16, torch.float32][
        : len(made)
    ]
    assert [*calls.served] == ["rms_norm"]


@pytest.mark.parametrize("centered", [True, False])
def test_gradients_of_gradients(place, centered):
    x, weight, bias = tensors(place, torch.float64, shape=(2, 8))
    with cupynorm.enabled() as calls:
        assert torch.autograd.gradgradcheck(
            lambda *given: norm(centered, *given), (x, weight, bias)
        )
    assert calls.served


def test_autocast(place):
    x, weight, bias = tensors(place, torch.bfloat16)
    with torch.autocast(place, torch.bfloat16):
        expected = [norm(centered, x, weight, bias) for centered in (True, False)]
        with cupynorm.enabled() as calls:
            made = [norm(centered, x, weight, bias) for centered in (True, False)]
    assert [each.dtype for each in made] == [each.dtype for each in expected]
    assert_near(made, [each.double() for each in expected], torch.bfloat16)
    assert sum(calls.served.values()) == 2


class Block(torch.nn.Module):
    """Two norms of each kind around products."""

    def __init__(self, width=32):
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.RMSNorm(width)
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return x + self.second(torch.tanh(self.linear(self.first(x))))


EACH_STEP = {
    "layer_norm": 1,
    "rms_norm": 1,
    "layer_norm backward": 1,
    "rms_norm backward": 1,
}


def step(model, x, run=lambda model, x: model(x)):
    """The loss and the gradients of parameters."""
    loss = run(model, x).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]


@pytest.fixture
def model(place):
    torch.manual_seed(0)
    return Block().to(place)


@pytest.fixture
def x(place):
    return torch.randn(4, 32, device=place)


@pytest.mark.parametrize("autocast", [False, True])
def test_every_norm_of_a_model_is_served(model, x, place, autocast):
    with torch.autocast(place, torch.bfloat16, enabled=autocast):
        expected = [each.double() for each in step(model, x)]
        with cupynorm.enabled() as calls:
            made = step(model, x)
            with torch.no_grad():
                model(x)
    assert_near(made, expected, torch.bfloat16 if autocast else torch.float32)
    assert calls.served["layer_norm"] == calls.served["rms_norm"] == 2
    assert calls.served["layer_norm backward"] == 1 and calls.left == {}


@pytest.mark.slow  # the import takes seconds
def test_a_model_of_hugging_face(place):
    """BERT from its config: 2 norms in each layer, 1 after the embeddings, 1 before the scores."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2
    )
    config.num_attention_heads = 2
    model = transformers.BertForMaskedLM(config).to(place).eval()
    tokens = torch.randint(50, (2, 8), device=place)

    def run():
        made = model(input_ids=tokens, labels=tokens)
        return [made.logits, *torch.autograd.grad(made.loss, [*model.parameters()])]

    expected = run()
    with cupynorm.enabled() as calls:
        assert_near(run(), expected, torch.float32)
    assert calls.served == {"layer_norm": 6, "layer_norm backward": 6} and not calls.left


def test_checkpoints(model, x):
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    seen = []

    def policy(_, operator, *operands, **options):
        seen.append(operator)
        return (
            CheckpointPolicy.MUST_SAVE
            if "norm" in str(operator)
            else CheckpointPolicy.MUST_RECOMPUTE
        )

    def selective(model, x):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(model, x, use_reentrant=False, context_fn=contexts)

    expected = step(model, x)
    with cupynorm.enabled():
        plain = step(model, x, partial(checkpoint, use_reentrant=False))
        saving = step(model, x, selective)
    assert_near(plain, [each.double() for each in expected], torch.float32)
    assert_near(saving, [each.double() for each in expected], torch.float32)
    assert {torch.ops.aten.native_layer_norm.default, torch.ops.aten._fused_rms_norm.default} <= {
        *seen
    }


@pytest.mark.slow  # 40 s on two cores
@pytest.mark.parametrize("first", ["compiled", "enabled"])
def test_compiled_models_run_torchs_norms(model, x, first):
    expected = [each.double() for each in step(model, x)]
    compiled = torch.compile(model, fullgraph=True)
    if first == "compiled":
        step(compiled, x)
    with cupynorm.enabled() as calls:
        assert_near(step(compiled, x), expected, torch.float32)
        assert calls.served == {}
        assert_near(step(model, x), expected, torch.float32)
        assert calls.served == EACH_STEP
    assert_near(step(compiled, x), expected, torch.float32)
    torch._dynamo.reset()


def test_after_a_graph_break_no_kernel_is_traced(place):
    from torch._dynamo.testing import CompileCounterWithBackend

    x, weight, bias = tensors(place, torch.float32)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compiler.disable(recursive=False)  # torch.compile traces what is called here
    def norms(x):
        return F.rms_norm(F.layer_norm(x, (64,), weight, bias), (64,), weight)

    with cupynorm.enabled() as calls:
        torch.compile(lambda x: norms(x) * 2, backend=counter)(x).sum().backward()
    assert len(counter.graphs) == 1  # that of * 2
    assert calls.served == EACH_STEP
    torch._dynamo.reset()


def test_jagged_rows(place):
    x, weight, bias = tensors(place, torch.float32, grad=False)
    rows = torch.nested.as_nested_tensor([x[:4], x[4:]], layout=torch.jagged)
    with cupynorm.enabled() as calls:
        made = F.layer_norm(rows, (64,), weight, bias)
    assert_near([made.values()], [norm(True, *wide([x, weight, bias]))], torch.float32)
    assert sum(calls.served.values()) == 1


def test_dtensors_by_their_shards(place, tmp_path):
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor

    given = tensors(place, torch.float32)
    expected = [gradients(centered, *wide(given)) for centered in (True, False)]
    address = f"file://{tmp_path}/group"
    distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh(place, (1,))
        x = distribute_tensor(given[0].detach(), mesh, [Shard(0)]).requires_grad_()
        parameters = [distribute_tensor(each.detach(), mesh).requires_grad_() for each in given[1:]]
        with cupynorm.enabled() as calls:
            made = [gradients(centered, x, *parameters) for centered in (True, False)]
        for one, other in zip(made, expected):
            assert_near([each.full_tensor() for each in one], other, torch.float32)
    finally:
        distributed.destroy_process_group()
    assert calls.served == EACH_STEP


def test_functorch_transforms(place):
    x, weight, _ = tensors(place, torch.float32, grad=False)
    with cupynorm.enabled():
        by_row = torch.vmap(lambda row: F.rms_norm(row, (64,), weight, 1e-5))(x)
        gradient = torch.func.grad(lambda x: F.rms_norm(x, (64,), weight, 1e-5).sum())(x)
        _, tangent = torch.func.jvp(lambda x: F.layer_norm(x, (64,)), (x,), (x,))
    assert_near([by_row], [norm(False, *wide([x, weight]), None)], torch.float32)
    ours = gradients(False, *wide([x, weight]), None)[1] / 2
    assert_near([gradient], [ours], torch.float32)
    assert tangent.abs().max() < 1e-3  # the norm of a row does not change with its size


def test_threads(model, x):
    expected = [each.double() for each in step(model, x)]
    found, failed = [], []

    def run():
        try:
            for _ in range(5):
                found.append(step(model, x))
        except Exception as error:
            failed.append(error)

    with cupynorm.enabled() as calls:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert not failed and len(found) == 20
    for each in found:
        assert_near(each, expected, torch.float32)
    assert calls.served == {name: 20 for name in EACH_STEP}


# What does not fit.


def test_what_is_left_goes_to_the_kernel_that_was_there(place):
    """Another library's override, which is also what remains after disable()."""
    x, weight, bias = tensors(place, torch.float32, grad=False)
    theirs, key = [], "CPU" if place == "cpu" else "CUDA"
    own = torch.library.get_kernel("aten::native_layer_norm", key)

    def of_others(keys, x, *rest):
        theirs.append(x.shape)
        return own.call_boxed(keys, x, *rest)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("native_layer_norm", of_others, key, with_keyset=True, allow_override=True)
    try:
        with cupynorm.enabled() as calls:
            y = norm(True, x, weight, bias)
            assert not theirs
            assert norm(True, x[:0], weight, bias).shape == (0, 64)
            assert theirs == [(0, 64)]
            with pytest.raises(RuntimeError, match="normalized_shape"):  # torch's own sentence
                F.layer_norm(x, (32,), None, None)
            assert len(theirs) == 2
        ((name, why), count), no_elements = sorted(calls.left.items(), reverse=True)
        assert no_elements == (("layer_norm", "no elements"), 1)
        assert (name, count) == ("layer_norm", 1) and "normalized_shape is (32,)" in why
        assert_near([norm(True, x, weight, bias)], [y.double()], torch.float32)
        assert len(theirs) == 3
    finally:
        library._destroy()


def test_norms_that_torch_splits_stay_torchs(place):
    """Complex ones, and rows of channels_last, whose result keeps its strides."""
    x = torch.randn(4, 8, dtype=torch.complex64, device=place, requires_grad=True)
    pixels = torch.randn(2, 5, 3, 4, device=place).to(memory_format=torch.channels_last)

    def run():
        y = F.rms_norm(x, (8,))
        (gradient,) = torch.autograd.grad(y.abs().sum(), x)
        return y, gradient, F.rms_norm(pixels, (4,))

    expected = run()
    with cupynorm.enabled():
        made = run()
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()


def test_a_tensor_that_is_given_twice(place):
    x, weight, _ = tensors(place, torch.float32, grad=False)
    expected = F.layer_norm(x, (64,), weight, weight)
    with cupynorm.enabled() as calls:
        for _ in range(3):
            assert_near([F.layer_norm(x, (64,), weight, weight)], [expected], torch.float32)
    assert calls.served == {"layer_norm": 3}
    assert not any(prepared.of_aten["native_layer_norm"].values())


def test_nested_blocks_and_switches(place):
    x = torch.randn(2, 8, device=place)

    def is_served():
        before = sum(calls.served.values())
        F.layer_norm(x, (8,))
        return sum(calls.served.values()) > before

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's about overrides
        calls = cupynorm.enable()
    assert is_served()
    cupynorm.enable()
    with cupynorm.enabled(), cupynorm.enabled():
        cupynorm.disable()
        assert is_served()  # until the blocks end
    assert not is_served()
    with pytest.raises(ZeroDivisionError), cupynorm.enabled():
        raise ZeroDivisionError
    assert not is_served()
    cupynorm.enable()
    with cupynorm.enabled():
        pass
    assert is_served()
    cupynorm.disable()
    cupynorm.disable()
    assert not is_served()


def test_its_table(place, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    x = torch.randn(2, 8, device=place)
    with cupynorm.enabled() as calls:
        for rows in (x, x, x[:0]):
            F.layer_norm(rows, (8,))
        assert str(calls).splitlines() == [
            "norm        calls  computed by",
            "layer_norm  2      cupynorm",
            "layer_norm  1      torch: no elements",
            "2 calls by cupynorm, 1 left to torch",
        ]
        assert calls._repr_html_().count("<tr>") == 3
    assert str(calls).endswith("disabled: torch computes every norm")


def test_an_old_torch_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(cupynorm.MissingLibraryError, match="needs 2.9 or later"):
        cupynorm.enable()
    assert not module._is_on
    with pytest.raises(cupynorm.MissingLibraryError), cupynorm.enabled():
        pass
    assert not module._num_blocks


@pytest.mark.gpu
def test_a_cuda_graph(monkeypatch):
    x, weight, bias = tensors("cuda", torch.bfloat16, grad=False)
    with cupynorm.enabled(), torch.no_grad():
        for centered in (True, False):
            norm(centered, x, weight, bias)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = norm(centered, x, weight, bias)
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert_near([y], [norm(centered, *wide([x, weight, bias]))], torch.bfloat16)
