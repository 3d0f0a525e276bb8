"""Norms and linear layers where autograd is used in ways of its own, against plain calls."""

from __future__ import annotations

import contextlib
from types import FunctionType

import pytest

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm import LayerNorm, LayerNormLinear, Linear, RMSNorm, fp8_autocast  # noqa: E402
from cupynorm.nn.modes import learns_shapes  # noqa: E402

WIDTH = 32
DELAYED = cupynorm.recipes.DelayedScaling()


class ResidualNorm(LayerNorm):
    def forward(self, x):
        return sum(super().forward(x, 2 * x, return_residual=True))


class GatedNorm(RMSNorm):
    def forward(self, x):
        return super().forward(x, fuse=cupynorm.functors.silu_gate(gate=x))


class EightBits(torch.nn.Sequential):
    """A norm whose 8-bit y a linear layer multiplies."""

    def forward(self, x):
        norm, linear = self
        return linear(norm(x, fp8_output=True))


def layer(**options):
    return LayerNormLinear(WIDTH, WIDTH, device="cpu", **options)


MODULES = {
    "norm": lambda: LayerNorm(WIDTH),
    "options": lambda: ResidualNorm(WIDTH, memory_efficient=True),
    "functors": lambda: GatedNorm(WIDTH),
    "layer": layer,
    "delayed": lambda: layer(delay_wgrad_compute=True),
    "main_grad": lambda: Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True),
    "8-bit norm": lambda: EightBits(RMSNorm(WIDTH), Linear(WIDTH, WIDTH)),
}
IN_8_BITS = ["8-bit norm", "layer"]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(*names):
    module = torch.nn.Sequential(*(MODULES[name]() for name in names))
    for seed, parameter in enumerate(module.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=seed) / parameter.ndim**3)
    return module


def region(recipe):
    return fp8_autocast(recipe=recipe) if recipe else contextlib.nullcontext()


def step(module, recipe, backward=torch.Tensor.backward):
    """y, dx and all gradients. backward: of y and its gradient."""
    x = random(6, WIDTH, seed=7).requires_grad_()
    with region(recipe):
        y = module(x)
    backward(y, random(6, WIDTH, seed=8))
    for each in module.modules():
        if getattr(each, "delay_wgrad_compute", False):
            each.backward_dw()
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names, recipe",
    ((["norm", "options", "functors", "layer", "delayed"], None), (IN_8_BITS, DELAYED)),
)
@pytest.mark.filterwarnings("error:Dynamo does not know:UserWarning")
def test_compiled_autograd_of_eager_calls(names, recipe):
    """torch.compile then traces the backward of calls that it has not compiled."""
    from torch._dynamo import compiled_autograd

    torch._dynamo.reset()

    def compiled(y, dy):
        with compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward(dy)

    ones, others = step(make(*names), recipe, compiled), step(make(*names), recipe)
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", IN_8_BITS)
def test_8_bits_refuse_tangents_and_batches(name):
    """In a layer that records no gradients a tangent would be lost."""
    module, x = make(name), random(6, WIDTH)
    transforms = "torch.func or forward mode|torch traces or transforms"
    with forward_ad.dual_level(), torch.no_grad(), region(DELAYED):
        with pytest.raises(NotImplementedError, match=transforms):
            module(forward_ad.make_dual(x, x))
    with region(DELAYED), pytest.raises(NotImplementedError, match=transforms):
        torch.func.grad(lambda x: module(x).sum())(x)
    with region(DELAYED):
        y = module(x)
    with pytest.raises(NotImplementedError, match="expected one gradient at a time"):
        torch.autograd.grad(y, module.parameters(), torch.stack([y, y]), is_grads_batched=True)


def replica_of(module):
    """As torch.nn.parallel.replicate makes it for a GPU: its parameters are results of others."""
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = replica_of(child)
    for name, parameter in module._parameters.items():
        setattr(replica, name, parameter * 1)
    return replica


def test_replicas_of_data_parallel():
    x = random(6, WIDTH)
    for recipe in (None, cupynorm.recipes.BlockScaling()):
        made = []
        for copies in (lambda module: [module], lambda module: [replica_of(module)] * 2):
            module = make("norm", "layer")
            replicas = copies(module)
            with region(recipe):
                parts = x.chunk(len(replicas))
                y = torch.cat([replica(part) for replica, part in zip(replicas, parts)])
            y.backward(random(6, WIDTH, seed=8))
            made.append([y.detach(), *(each.grad for each in module.parameters())])
        for one, other in zip(*made):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    with pytest.raises(RuntimeError, match="backward_dw.. cannot reach"):
        replica_of(make("delayed"))(x)
    for name in IN_8_BITS:
        with region(DELAYED), pytest.raises(NotImplementedError, match="DataParallel"):
            replica_of(make(name))(x)


def _forward_metadata_inference(module, x):
    """As torch.distributed.pipelining runs a stage to learn its shapes."""
    return module(x)


def test_a_function_of_the_same_name_is_no_pipeline():
    pipelining = pytest.importorskip("torch.distributed.pipelining.stage")
    learn = FunctionType(_forward_metadata_inference.__code__, vars(pipelining))
    functions = (learn, _forward_metadata_inference)
    answers = [function(lambda _: learns_shapes(), None) for function in functions]
    assert answers == [True, False]


@pytest.mark.parametrize("recipe", (None, DELAYED), ids=("plain", "8-bit"))
@pytest.mark.parametrize("name", ("8-bit norm", "layer", "delayed", "main_grad"))
def test_a_pipeline_that_learns_shapes(name, recipe):
    """Its input is memory without values. No module keeps what it computes."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.stage")
    if recipe is None and name == "8-bit norm":
        pytest.skip("the norm has an 8-bit y inside of fp8_autocast alone")
    if not hasattr(pipelining.PipelineStage, "_forward_metadata_inference"):
        pytest.skip("this torch learns shapes by another function")
    learn = FunctionType(_forward_metadata_inference.__code__, vars(pipelining))
    made = []
    for learns in (False, True):
        module = make(name)
        if name == "main_grad":
            module[0].weight.main_grad = torch.zeros(WIDTH, WIDTH)
        for _ in range(3):
            if learns:
                x = torch.full((6, WIDTH), 1e4, requires_grad=True)
                with region(recipe):
                    y = learn(module, x * x)
                torch.autograd.grad(y, x, 1e4 * y)
                learns = False
            results = step(module, recipe)
        if name == "main_grad":
            results.append(module[0].weight.main_grad)
        made.append([each for each in results if each is not None])
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)
