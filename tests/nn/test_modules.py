"""The modules against those of torch.nn and TransformerEngine: arguments, parameters and values."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

import cupynorm

torch = pytest.importorskip("torch")
from module_inputs import BOTH, DEVICES_HERE, random_input  # noqa: E402

# The interface of torch.nn.


@BOTH
def test_the_constructors_are_those_of_torch(ours, theirs):
    mine, torchs = (list(inspect.signature(each).parameters.values()) for each in (ours, theirs))
    positional = [each for each in mine if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert [each.name for each in positional] == [each.name for each in torchs]
    assert [each.default for each in positional[1:]] == [each.default for each in torchs[1:]]
    assert {each.name for each in mine[len(positional) :]} == {
        "zero_centered_gamma",
        "launch",
        "sequence_parallel",
        "round_x_hat",
        "memory_efficient",
        "fp8_state",
        "hidden_size",
        "params_dtype",
    }
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
    assert repr(mine) == f"cupynorm.{torchs}"
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


def outcome(call, x, parameters) -> list[torch.Tensor]:
    """y and the gradients of x and parameters."""
    x = x.clone().requires_grad_()
    y = call(x)
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).reshape(y.shape).to(y.dtype)
    return [y, *torch.autograd.grad(y, (x, *parameters), dy)]


@pytest.mark.parametrize("zero_centered", (False, True))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("device", DEVICES_HERE)
@BOTH
def test_results_and_gradients_are_those_of_the_function(
    ours, theirs, device, dtype, zero_centered
):
    module = ours(40, 0.01, device=device, dtype=dtype, zero_centered_gamma=zero_centered)
    for seed, parameter in enumerate(module.parameters()):
        parameter.data.copy_(random_input(40, seed=seed))
    call = cupynorm.layer_norm if theirs is torch.nn.LayerNorm else cupynorm.rms_norm
    parameters, x = [*module.parameters()], random_input(7, 40).to(device, dtype)

    def function(x):
        return call(x, 40, *parameters, eps=0.01, zero_centered_weight=zero_centered)

    found = outcome(module, x, parameters)
    assert all(map(torch.equal, found, outcome(function, x, parameters)))
    if device == "cpu" and dtype == torch.float64:
        plain = theirs(40, 0.01, dtype=dtype)
        plain.load_state_dict(module.state_dict())
        with torch.no_grad():
            plain.weight += zero_centered
        for got, right in zip(found, outcome(plain, x, plain.parameters()), strict=True):
            torch.testing.assert_close(got, right, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("device", DEVICES_HERE)
@BOTH
def test_a_residual_is_added_and_returned(ours, theirs, device):
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
    assert module.half().weight.dtype == torch.float16
    assert module.to(torch.float64)(random_input(3, 8, dtype="float64")).dtype == torch.float64
    margin = cupynorm.Launch(sm_margin={"backward": 4})
    marked = ours(8, 0.1, zero_centered_gamma=True, launch=margin, sequence_parallel=True)
    with torch.no_grad():
        marked.weight.normal_()
    x = random_input(3, 8)
    for twin in (copy.deepcopy(marked), pickle.loads(pickle.dumps(marked))):
        assert repr(twin) == repr(marked) and twin.weight is not marked.weight
        assert torch.equal(twin(x), marked(x))
        assert all(parameter.sequence_parallel is True for parameter in twin.parameters())


class Twice(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@BOTH
def test_weights_may_be_plain_tensors(ours, theirs):
    """Swapped for one call by torch, parametrized, or plain attributes."""
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


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_in_eval_mode_calls_norms_with_zero_centered_gamma(norm_first):
    """torch's fused layer would read weight and eps alone."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        8, 2, 16, batch_first=True, norm_first=norm_first, dtype=torch.float64
    ).eval()
    twin, x = copy.deepcopy(layer), random_input(2, 3, 8, dtype="float64")
    for name in ("norm1", "norm2"):
        norm = cupynorm.LayerNorm(8, dtype=torch.float64, zero_centered_gamma=True)
        with torch.no_grad():
            getattr(layer, name).weight.copy_(random_input(8))
            norm.weight.copy_(getattr(layer, name).weight - 1)
        setattr(twin, name, norm)
    with torch.no_grad():
        expected = layer(x)
        for each in (twin, copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
            torch.testing.assert_close(each(x), expected, rtol=0, atol=1e-6)


# The interface of TransformerEngine.


@BOTH
def test_zero_centered_gamma_starts_at_zero(ours, theirs):
    module, plain = ours(40, 0.01, zero_centered_gamma=True), theirs(40, 0.01)
    assert (module.weight == 0).all()
    x = random_input(5, 40)
    torch.testing.assert_close(module(x), plain(x))
    assert not ours(8, elementwise_affine=False, zero_centered_gamma=True).state_dict()


@BOTH
def test_hidden_size_and_params_dtype(ours, theirs):
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
def test_repr_shows_options_that_are_not_default(ours, theirs):
    extras = {"zero_centered_gamma": True, "sequence_parallel": False}
    extras["launch"] = cupynorm.Launch(sm_margin=4)
    for name, value in extras.items():
        assert repr(ours(8, **{name: value})) == f"cupynorm.{theirs(8)}"[:-1] + f", {name}={value})"


@BOTH
def test_sequence_parallel_is_an_attribute_of_the_parameters(ours, theirs):
    assert not any(hasattr(parameter, "sequence_parallel") for parameter in ours(8).parameters())
    for value in (True, False):
        module = ours(8, device="meta", sequence_parallel=value).to_empty(device="cpu")
        for change in (
            module.reset_parameters,
            lambda module=module: module.load_state_dict(theirs(8).state_dict(), assign=True),
            module.double,
        ):
            assert all(parameter.sequence_parallel is value for parameter in module.parameters())
            torch.__future__.set_overwrite_module_params_on_conversion(True)
            try:
                change()
            finally:
                torch.__future__.set_overwrite_module_params_on_conversion(False)
        assert all(parameter.sequence_parallel is value for parameter in module.parameters())


@pytest.mark.parametrize("ours", [cupynorm.LayerNorm, cupynorm.RMSNorm])
def test_meta_tensors_give_meta_tensors(ours):
    module = ours(8, device="meta", dtype=torch.bfloat16)
    x = torch.empty(3, 5, 8, device="meta", dtype=torch.bfloat16)
    y, added = module(x, x.float(), return_residual=True, fuse=cupynorm.functors.dropout(0.5))
    assert y.is_meta and y.shape == x.shape and y.dtype == x.dtype
    assert added.is_meta and added.shape == x.shape and added.dtype == torch.float32
    (dweight,) = torch.autograd.grad(module(x), module.weight, x)
    assert dweight.is_meta and dweight.shape == (8,)
    with pytest.raises(ValueError, match=r"input has shape \(3, 9\)"):
        module(torch.empty(3, 9, device="meta"))


def test_explicit_forwards_and_linear_layers_of_meta_tensors():
    x = torch.ones(3, 8, dtype=torch.bfloat16)
    for forward in (cupynorm.layer_norm_forward, cupynorm.rms_norm_forward):
        made, expected = (
            forward(each, 8, residual=each, out_dtype="float32") for each in (x.to("meta"), x)
        )
        for one, other in zip(made, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (one.is_meta and one.shape == other.shape)
            assert one is None or one.dtype == other.dtype
    x = x.to("meta")
    layer = cupynorm.LayerNormLinear(8, 5, device="meta", params_dtype=torch.bfloat16)
    y = layer(x)
    assert y.is_meta and y.shape == (3, 5) and y.dtype == torch.bfloat16
    gradients = torch.autograd.grad(y, list(layer.parameters()), y)
    assert [each.shape for each in gradients] == [each.shape for each in layer.parameters()]
    with pytest.raises(TypeError, match="input is a torch tensor on meta, which has no memory"):
        with cupynorm.fp8_autocast():
            layer(x)
    y = cupynorm.layer_norm(x, 8, out_dtype=cupynorm.Quantize("float8_e4m3fn", "row"))
    assert y.data.is_meta and y.data.shape == (3, 8) and y.scale_inv.shape == (3, 1)


@pytest.mark.parametrize("ours", [cupynorm.LayerNorm, cupynorm.RMSNorm])
def test_arguments_in_the_order_of_transformer_engine_are_refused(ours):
    """Its third and fourth, sequence_parallel and dtype, made a norm without parameters."""
    with pytest.raises(TypeError, match="is torch.bfloat16; expected"):
        ours(768, 1e-5, False, torch.bfloat16)
    with pytest.raises(TypeError, match="elementwise_affine is None; expected True or False"):
        ours(768, 1e-5, None)


@BOTH
def test_modules_on_meta_can_be_filled_later(ours, theirs):
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
