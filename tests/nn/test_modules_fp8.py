"""LayerNorm and RMSNorm with 8-bit outputs inside fp8_autocast."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import numpy as np
import pytest
from cupynorm.reference import fp8 as reference
from delayed_scaling import Machine

import cupynorm
from cupynorm.norm import kept

torch = pytest.importorskip("torch")

from cupynorm import (  # noqa: E402
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
    MXFP8BlockScaling,
    fp8_autocast,
)
from cupynorm.nn import fp8, recipes  # noqa: E402

BOTH = pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
E4M3 = "float8_e4m3fn"


def random(*shape, seed=0, dtype=torch.float32, device="cpu", grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_(grad)


def make(kind, num_cols=200, device="cpu", **options):
    """A module with random parameters."""
    module = getattr(cupynorm, kind)(num_cols, device=device, **options)
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(random(num_cols, seed=seed + 1))
    return module


def raw(tensor):
    return (
        (tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor).detach().cpu().numpy()
    )


def exact_y(module, x):
    """y before it is quantised.

    By the tile of the last 8-bit call in the arithmetic's dtype, or by the reference in float64.
    """
    options = {"out_dtype": "float64"}
    if kept.forwards:
        plan = next(reversed(kept.forwards.values())).plan
        options = {
            "out_dtype": "float32",
            "strategy": plan.strategy,
            "tile": plan.tile,
            "statistics": plan.statistics,
        }
    call = cupynorm.layer_norm if isinstance(module, cupynorm.LayerNorm) else cupynorm.rms_norm
    bias = {} if getattr(module, "bias", None) is None else {"bias": module.bias}
    with torch.no_grad():
        return call(x, x.shape[-1], module.weight, eps=module.eps, **bias, **options).cpu().numpy()


def of_recipe(y, recipe, scale):
    if isinstance(recipe, DelayedScaling):
        return reference.quantize(y, E4M3, scale)
    if isinstance(recipe, CurrentScaling):
        options = {"power_of_two": recipe.power_of_two, "smallest_amax": recipe.amax_epsilon}
        return reference.quantize(y, E4M3, reference.scale_of(reference.amax(y), E4M3, **options))
    if isinstance(recipe, MXFP8BlockScaling):
        return reference.quantize_mxfp8(y, E4M3)
    return reference.quantize_blocks(y, E4M3, power_of_two=recipe.power_of_two)


RECIPES = (
    DelayedScaling(amax_history_len=3),
    CurrentScaling(),
    CurrentScaling(Format.E4M3, power_of_two=True),
    CurrentScaling(amax_epsilon=100.0),
    CurrentScaling(amax_epsilon=-0.0),
    BlockScaling(),
    BlockScaling(power_of_two=False),
    MXFP8BlockScaling(),
)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_bytes_and_scales_of_two_steps(recipe, kind, anywhere):
    kept.forget()
    module = make(kind, device=anywhere)
    scale = np.float32(1)
    for step in range(2):
        x = random(5, 200, seed=step, dtype=torch.bfloat16, device=anywhere)
        with fp8_autocast(recipe=recipe):
            made = module(x, fp8_output=True)
        y = exact_y(module, x)
        truth = of_recipe(y, recipe, scale)
        assert (
            isinstance(made, cupynorm.QuantizedTensor)
            and made.format == E4M3
            and made.dtype == torch.bfloat16
        )
        np.testing.assert_array_equal(raw(made.data), truth.data)
        np.testing.assert_array_equal(
            raw(made.scale_inv), truth.scale_inv.reshape(made.scale_inv.shape)
        )
        assert len(np.unique(truth.data)) > 20
        if isinstance(recipe, BlockScaling):
            assert made.transposed is None and made.scale_inv.shape == (5, 2)
        elif isinstance(recipe, MXFP8BlockScaling):
            assert made.transposed is None and made.scale_inv.shape == (5, 7)
        else:
            np.testing.assert_array_equal(raw(made.transposed), truth.data.T)
        scale = np.float32(448) / reference.amax(y)
    assert (module._fp8_scales is not None) == isinstance(recipe, DelayedScaling)


@BOTH
def test_a_call_without_fp8_output_is_the_same_inside_a_region(kind):
    module, x = make(kind), random(5, 200)
    y = module(x)
    with fp8_autocast():
        assert torch.equal(module(x), y) and torch.equal(module(x, fp8_output=False), y)
    assert module._fp8_scales is None


@pytest.mark.parametrize("rule", ("max", "most_recent"))
@pytest.mark.parametrize("length, margin", ((1, 0), (4, 1), (16, 3)))
def test_fifty_steps_give_the_scales_of_the_second_implementation(length, margin, rule, anywhere):
    """RMSNorm of elements of 1 and -1 is its weight, which sets the amax, also to inf and NaN."""
    generator = np.random.default_rng([length, margin])
    recipe = DelayedScaling(margin, amax_history_len=length, amax_compute_algo=rule)
    machine, module = (
        Machine(448, length, margin, rule),
        cupynorm.RMSNorm(40, eps=0.0, device=anywhere),
    )
    x = torch.ones(3, 40, device=anywhere)
    x[:, 1::2] = -1
    changed = 0
    for step in range(50):
        amax = np.float32(abs(generator.standard_normal()) * 10.0 ** generator.integers(-4, 5))
        amax = {0: np.float32(0), 1: np.float32(np.inf), 2: np.float32(np.nan)}.get(
            int(generator.integers(12)), amax
        )
        weight = torch.full((40,), float(amax / 4) if np.isfinite(amax) else 1.0)
        weight[7], weight[8] = float(amax), float(-amax / 2)
        with torch.no_grad():
            module.weight.copy_(weight)
        before = machine.scale
        if step % 7 == 3:  # a call in eval mode records no amax
            with torch.no_grad(), fp8_autocast(recipe=recipe):
                made = module(x, fp8_output=True)
            assert made.transposed is None
        else:
            with fp8_autocast(recipe=recipe):
                made = module(x, fp8_output=True)
                assert (
                    module._fp8_scales.scale.item() == before
                )  # the scale changes at the end of the region
            machine.step(amax)
        with np.errstate(all="ignore"):
            truth = reference.quantize(
                (x.cpu() * weight).numpy() + np.float32(0), E4M3, before
            )  # no zero has a sign
        np.testing.assert_array_equal(raw(made.data), truth.data)
        assert made.scale_inv.item() == truth.scale_inv
        changed += machine.scale != before
        assert module._fp8_scales.scale.item() == machine.scale
        np.testing.assert_array_equal(
            module._fp8_scales.amax_history.flatten().cpu().numpy(),
            np.array(machine.history(), np.float32),
        )
    assert changed > 0


def test_nested_regions_and_their_calls_are_one_step():
    module, recipe = make("RMSNorm"), DelayedScaling(amax_history_len=2)
    x = random(5, 200)
    with fp8_autocast(recipe=recipe):
        with fp8_autocast(recipe=recipe):
            module(x, fp8_output=True)
        with torch.no_grad():
            module.weight.mul_(2)
        larger = module(x, fp8_output=True)
        assert module._fp8_scales.scale.item() == 1
    y = exact_y(module, x)
    assert (
        module._fp8_scales.scale.item() == np.float32(448) / reference.amax(y)
        and larger.scale_inv.item() == 1
    )
    with (
        fp8_autocast(recipe=recipe),
        fp8_autocast(enabled=False),
        pytest.raises(ValueError, match="outside of fp8_autocast"),
    ):
        module(x, fp8_output=True)


@BOTH
@pytest.mark.parametrize(
    "recipe", (DelayedScaling(amax_history_len=3), CurrentScaling(), BlockScaling()), ids=str
)
def test_gradients_are_those_of_the_plain_call(recipe, kind, anywhere):
    """With a residual and dropout. dequantize() passes gradients on unrounded.

    With one scale the tile is that of the plain call, so gradients are equal to the bit. Blocks
    have another tile, whose statistics may differ in the last place of float32.
    """
    module = make(kind, 48, device=anywhere)
    dy, dsum = (random(6, 48, seed=seed, device=anywhere) for seed in (3, 4))
    made = []
    for fp8_output in (True, False):
        x, residual = (random(6, 48, seed=seed, device=anywhere, grad=True) for seed in (1, 2))
        module.zero_grad()
        with fp8_autocast(recipe=recipe):
            y, added = module(
                x,
                residual,
                return_residual=True,
                dropout_p=0.25,
                dropout_seed=5,
                fp8_output=fp8_output,
            )
        if fp8_output:
            y = y.dequantize()
        torch.autograd.backward((y, added), (dy, dsum))
        made.append(
            (added, x.grad, residual.grad, *(parameter.grad for parameter in module.parameters()))
        )
    for one, other in zip(*made):
        allowed = 2.0**-20 * other.abs().max() if isinstance(recipe, BlockScaling) else 0
        assert ((one - other).abs() <= allowed).all() and one.abs().max() > 0


def test_a_module_in_eval_mode_has_no_dropout():
    module, x = make("LayerNorm").eval(), random(5, 200)
    with fp8_autocast(recipe=CurrentScaling()):
        plain, other = module(x, fp8_output=True), module(x, dropout_p=0.5, fp8_output=True)
    np.testing.assert_array_equal(raw(plain.data), raw(other.data))


def test_a_frozen_norm_returns_a_transposed_copy_where_gradients_are_enabled():
    module, x = make("RMSNorm").requires_grad_(False), random(5, 200)
    with fp8_autocast(recipe=CurrentScaling()):
        made = module(x, fp8_output=True)
        with torch.no_grad():
            assert module(x, fp8_output=True).transposed is None
    np.testing.assert_array_equal(raw(made.transposed), raw(made.data).T)


def stepped(kind="LayerNorm", length=4, **options):
    """A module with scales, and their recipe."""
    module, recipe = make(kind, **options), DelayedScaling(amax_history_len=length)
    for seed in range(3):
        with fp8_autocast(recipe=recipe):
            module(random(5, 200, seed=seed) * 2.0**seed, fp8_output=True)
    return module, recipe


def assert_same_scales(one, other):
    assert torch.equal(one.scale, other.scale) and torch.equal(one.amax_history, other.amax_history)
    assert one.scale.item() != 1 and one.amax_history[1:].abs().max() > 0


@BOTH
def test_state_dicts_carry_the_scales(kind):
    torchs = getattr(torch.nn, kind)(200)
    fresh = make(kind)
    assert list(fresh.state_dict()) == list(torchs.state_dict())
    torchs.load_state_dict(fresh.state_dict(), strict=True)
    module, _ = stepped(kind)
    state = copy.deepcopy(torch.nn.Sequential(torch.nn.Identity(), module).state_dict())
    assert state["1._extra_state"].dtype == torch.uint8 and bytes(
        state["1._extra_state"]
    ).startswith(b"cupynorm fp8 state 1\n")
    buffer = io.BytesIO()
    torch.save(state, buffer)
    state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    model = torch.nn.Sequential(torch.nn.Identity(), fresh)
    model.load_state_dict(state, strict=True)
    assert_same_scales(fresh._fp8_scales, module._fp8_scales)
    # Loaded in place, as parameters are, because a CUDA graph may hold the addresses.
    places = fresh._fp8_scales.scale.data_ptr(), fresh._fp8_scales.amax_history.data_ptr()
    fresh._fp8_scales.scale.fill_(3)
    model.load_state_dict(state, strict=True)
    assert_same_scales(fresh._fp8_scales, module._fp8_scales)
    assert places == (fresh._fp8_scales.scale.data_ptr(), fresh._fp8_scales.amax_history.data_ptr())
    longer, _ = stepped(kind, length=6)
    longer.load_state_dict(module.state_dict(), strict=True)
    assert_same_scales(longer._fp8_scales, module._fp8_scales)
    # torch.nn's states have none. torch.nn's modules load ours with strict=False.
    module.load_state_dict(torchs.state_dict(), strict=True)
    assert module._fp8_scales is None and list(module.state_dict()) == list(torchs.state_dict())
    torchs.load_state_dict(longer.state_dict(), strict=False)


def test_states_of_other_modules():
    """TransformerEngine's state is ignored without a warning. A linear layer's is refused."""
    module, _ = stepped()
    plain = {name: value for name, value in module.state_dict().items() if name != "_extra_state"}
    for foreign in (
        None,
        torch.empty(0, dtype=torch.uint8),
        torch.tensor([128, 4, 149], dtype=torch.uint8),
        io.BytesIO(b"x"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module.load_state_dict(plain | {"_extra_state": foreign}, strict=True)
        assert module._fp8_scales is None
    of_linear = fp8.pack({"forward": fp8.Scales((recipes.E4M3,) * 3, 2, torch.device("cpu"))})
    with pytest.raises(
        ValueError,
        match="the fp8 state is of forward of 3 tensors; expected that of a norm, y of 1",
    ):
        module.load_state_dict(plain | {"_extra_state": of_linear})


def test_copies_have_their_own_scales():
    module, recipe = stepped()
    before = copy.deepcopy(module._fp8_scales)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    copies = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=False),
    ]
    for each in copies:
        assert_same_scales(each._fp8_scales, before)
        with fp8_autocast(recipe=recipe):
            each(random(5, 200) * 100, fp8_output=True)
        assert not torch.equal(each._fp8_scales.amax_history, before.amax_history)
    assert_same_scales(module._fp8_scales, before)
    with fp8_autocast(recipe=recipe):
        module(random(5, 200) * 100, fp8_output=True)
    assert_same_scales(module._fp8_scales, copies[0]._fp8_scales)


def test_scales_stay_float32_and_follow_the_parameters_to_a_device():
    module, recipe = stepped()
    before = copy.deepcopy(module._fp8_scales)
    module.bfloat16()
    assert module.weight.dtype == torch.bfloat16 and module._fp8_scales.scale.dtype == torch.float32
    assert_same_scales(module._fp8_scales, before)
    module.to("meta")
    assert module._fp8_scales is None and "_extra_state" not in module.state_dict()


@pytest.mark.gpu
def test_scales_go_to_a_gpu_and_back():
    module, recipe = stepped()
    before = copy.deepcopy(module._fp8_scales)
    module.cuda()
    assert module._fp8_scales.scale.is_cuda and module._fp8_scales.largest.is_cuda
    with fp8_autocast(recipe=recipe):
        module(random(5, 200, device="cuda"), fp8_output=True)
    assert module._fp8_scales.amax_history.is_cuda
    module.load_state_dict(module.state_dict(), strict=True)
    assert module.cpu()._fp8_scales.scale.device.type == "cpu"
    other, _ = stepped()
    other.load_state_dict(module.state_dict(), strict=True)
    assert_same_scales(other._fp8_scales, module._fp8_scales)
    assert not torch.equal(before.amax_history, other._fp8_scales.amax_history)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "LayerNormLinear"])
def test_training_after_a_first_call_in_inference_mode(kind):
    linear = kind == "LayerNormLinear"
    module = cupynorm.LayerNormLinear(200, 16, device="cpu") if linear else make(kind)
    x, options = random(5, 200), {} if linear else {"fp8_output": True}
    with torch.inference_mode(), fp8_autocast(recipe=DelayedScaling(amax_history_len=3)):
        module(x, **options)
    for length, fp8_format in ((3, Format.HYBRID), (5, Format.E4M3)):
        with fp8_autocast(recipe=DelayedScaling(amax_history_len=length, fp8_format=fp8_format)):
            module(x, **options)
    scales = module._fp8_states["forward"] if linear else module._fp8_scales
    assert scales.scale[0] != 1 and len(scales.amax_history) == 5


def test_wrong_calls_are_refused():
    module, x = make("LayerNorm"), random(5, 200)
    with pytest.raises(
        ValueError,
        match="fp8_output is True outside of fp8_autocast; "
        "expected False, or the call inside of it",
    ):
        module(x, fp8_output=True)
    with fp8_autocast():
        for options, error, sentence in (
            (
                {"weight1": torch.ones(200)},
                ValueError,
                "a second weight or bias was given with out_dtype float8_e4m3fn",
            ),
            ({"dropout_p": 2.0}, ValueError, "dropout_p is 2.0; expected a probability"),
            ({"residual_dtype": "int8"}, TypeError, "residual_dtype is 'int8'; expected one of"),
        ):
            with pytest.raises(error, match=sentence):
                module(x, fp8_output=True, **options)
        with pytest.raises(
            ValueError, match="memory_efficient was given with out_dtype float8_e4m3fn"
        ):
            make("RMSNorm", memory_efficient=True)(x, fp8_output=True)
        with pytest.raises(TypeError, match="input is a ndarray; expected a torch tensor"):
            module(x.numpy(), fp8_output=True)
        with pytest.raises(ValueError, match="normalized_shape is"):
            module(x[:, :100], fp8_output=True)


@pytest.mark.parametrize(
    "recipe", (DelayedScaling(amax_history_len=3), CurrentScaling(), BlockScaling()), ids=str
)
def test_compiled_with_a_graph_break(recipe):
    module = make("LayerNorm")
    twin = copy.deepcopy(module)

    def run(module, x):
        return module(x * 2, fp8_output=True).dequantize() + 1

    compiled = torch.compile(run, backend="eager")
    for step in range(3):
        x = random(5, 200, seed=step)
        with fp8_autocast(recipe=recipe):
            assert torch.equal(compiled(module, x), run(twin, x))
    if isinstance(recipe, DelayedScaling):
        assert_same_scales(module._fp8_scales, twin._fp8_scales)


def scales_of(module):
    kept = (
        module._fp8_states["forward"]
        if isinstance(module, cupynorm.LayerNormLinear)
        else module._fp8_scales
    )
    return kept.scale, kept.amax_history, kept.largest


@pytest.fixture(params=("RMSNorm", "LayerNormLinear"))
def of_four_steps(request):
    """A layer after four steps of delayed scaling, and a function that calls it."""
    if request.param == "RMSNorm":
        module, options = make("RMSNorm"), {"fp8_output": True}
    else:
        module, options = cupynorm.LayerNormLinear(200, 48, device="cpu"), {}
    for seed in range(4):
        with fp8_autocast(recipe=DelayedScaling(amax_history_len=4)):
            module(random(5, 200, seed=seed), **options)
    return module, options


@pytest.mark.parametrize("length", (1, 4, 1024))
def test_calls_without_gradients_do_not_change_the_history(of_four_steps, length):
    """Its values, length and addresses, which a CUDA graph may hold."""
    module, options = of_four_steps
    kept, values = scales_of(module), [each.clone() for each in scales_of(module)]
    assert values[1].count_nonzero() >= 3
    with (
        torch.no_grad(),
        fp8_autocast(recipe=DelayedScaling(amax_history_len=length, fp8_format=Format.E4M3)),
    ):
        module(random(5, 200), **options)
    assert all(after is before for after, before in zip(scales_of(module), kept))
    assert all(torch.equal(after, before) for after, before in zip(kept, values))


def test_tensors_without_memory_are_refused_before_scales_move(of_four_steps):
    module, options = of_four_steps
    values = [each.clone() for each in scales_of(module)]
    fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, for reading the address of a fake tensor
        for x in (torch.empty(5, 200, device="meta"), fake.from_tensor(random(5, 200)))[
            : 1 if not options else 2
        ]:
            with pytest.raises(
                TypeError, match="input is a (.*Tensor, which has no address|torch tensor on meta)"
            ):
                with fp8_autocast(recipe=DelayedScaling(amax_history_len=2)):
                    module(x, **options)
    assert all(torch.equal(*pair) for pair in zip(scales_of(module), values))


def test_a_history_of_another_length_is_loaded_in_inference_mode():
    modules = []
    for length in (3, 5):
        modules.append(make("RMSNorm"))
        with fp8_autocast(recipe=DelayedScaling(amax_history_len=length)):
            modules[-1](random(5, 200, seed=length), fp8_output=True)
    short, module = modules
    with torch.inference_mode():
        module.load_state_dict(short.state_dict())
    for each in modules:
        with fp8_autocast(recipe=DelayedScaling(amax_history_len=3)):
            each(random(5, 200), fp8_output=True)
    assert_same_scales(short._fp8_scales, module._fp8_scales)


def test_scales_cannot_be_made_in_a_capture(monkeypatch):
    """Each replay would reset them. Scales made before the capture may be used in it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError,
        match="scales of DelayedScaling were to be made while a CUDA graph is captured",
    ):
        fp8.scales_for(
            None, (recipes.E4M3,), DelayedScaling(), torch.device("cuda:0"), records=True
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe", (DelayedScaling(amax_history_len=3), CurrentScaling(), BlockScaling()), ids=str
)
def test_steps_in_a_cuda_graph_are_the_eager_ones(recipe):
    module = make("LayerNorm", 768, device="cuda")
    twin, first = copy.deepcopy(module), copy.deepcopy(module)
    x, dy = random(64, 768, device="cuda", grad=True), random(64, 768, seed=1, device="cuda")

    def run(module):
        module.zero_grad(set_to_none=False)
        with fp8_autocast(recipe=recipe):
            made = module(x, fp8_output=True)
        made.dequantize().backward(dy)
        return made

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(module), run(twin)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run(module)
    for size in (1.0, 20.0, 0.1):
        with torch.no_grad():
            x.copy_(random(64, 768, seed=2, device="cuda") * size)
            for each in (module, twin):
                each.bias.fill_(size)
        graph.replay()
        expected = run(twin)
        np.testing.assert_array_equal(raw(made.data), raw(expected.data))
        assert torch.equal(made.scale_inv, expected.scale_inv) and torch.equal(
            module.weight.grad, twin.weight.grad
        )
        if isinstance(recipe, DelayedScaling):
            assert_same_scales(module._fp8_scales, twin._fp8_scales)
            np.testing.assert_array_equal(raw(made.transposed), raw(expected.transposed))
    if isinstance(recipe, DelayedScaling):
        with (
            pytest.raises(RuntimeError, match="expected one call with this recipe"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            run(first)
