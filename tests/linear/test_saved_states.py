"""Layers with delayed scales saved and loaded by torch.distributed.checkpoint and safetensors."""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler

import pytest
from turns import by_turns

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.distributed.checkpoint")
state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict")
from fp8_linear_cases import make, step  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from cupynorm import LayerNorm, LayerNormLinear, Linear, fp8_autocast  # noqa: E402
from cupynorm.recipes import DelayedScaling  # noqa: E402

FULL = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
# Steps, and the length of the history.
TRAINED = ((0, 1), (2, 4), (3, 6))


def trained(num_steps, length, **options) -> torch.nn.Module:
    module, problem = make(**options)
    for _ in range(num_steps):
        step(module, problem, DelayedScaling(amax_history_len=length))
    return torch.nn.Sequential(module)


def by_checkpoint(saver, loader, path):
    checkpoint.save({"model": saver.state_dict()}, checkpoint_id=path)
    state = {"model": loader.state_dict()}
    checkpoint.load(state, checkpoint_id=path)
    loader.load_state_dict(state["model"])


def by_model_state_dict(saver, loader, path, options=None):
    checkpoint.save(state_dict.get_model_state_dict(saver, options=options), checkpoint_id=path)
    state = state_dict.get_model_state_dict(loader, options=options)
    checkpoint.load(state, checkpoint_id=path)
    state_dict.set_model_state_dict(loader, state, options=options)


def by_full_state_dict(saver, loader, path):
    by_model_state_dict(saver, loader, path, FULL)


def by_torch(saver, loader, path):
    file = io.BytesIO()
    torch.save(saver.state_dict(), file)
    file.seek(0)
    loader.load_state_dict(torch.load(file, weights_only=True))


def by_safetensors(saver, loader, path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(saver, str(path / "model"))
    safetensors.load_model(loader, str(path / "model"))


WAYS = (by_checkpoint, by_model_state_dict, by_full_state_dict, by_torch, by_safetensors)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way, of_saver, of_loader", by_turns(WAYS, TRAINED, TRAINED))
def test_states_of_any_length_are_loaded(way, of_saver, of_loader, tmp_path):
    options = {"parameters_split": ("q", "k")}
    saver, loader = (trained(*each, **options) for each in (of_saver, of_loader))
    with torch.no_grad():
        for parameter in loader.parameters():
            parameter.zero_()
    way(saver, loader, tmp_path)
    saved, loaded = saver[0]._fp8.scales, loader[0]._fp8.scales
    assert saved.keys() == loaded.keys() and bool(saved) == (of_saver[0] > 0)
    for name, state in saved.items():
        assert torch.equal(state.scale, loaded[name].scale)
        assert torch.equal(state.amax_history, loaded[name].amax_history)
    for one, other in zip(saver.parameters(), loader.parameters()):
        assert torch.equal(one, other) and one.any()


def test_parts_in_a_state_dict_share_the_memory_of_the_parameters():
    module, _ = make(parameters_split=("q", "k"))
    for name, part in module.state_dict().items():
        if name != "_extra_state":
            assert part.data_ptr() == getattr(module, name).data_ptr()
            assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_a_state_dict_of_adapters_leaves_the_scales():
    """It has no parameters of the layers, and is loaded with strict=False."""
    model = trained_model()
    scales = model[0]._fp8_scales, model[1]._fp8.scales, model[2]._fp8.scales
    saved = [model[0].state_dict()["_extra_state"], *(each.get_extra_state() for each in model[1:])]
    found = model.load_state_dict({"3.adapter": torch.ones(1)}, strict=False)
    assert found.unexpected_keys == ["3.adapter"] and "2._extra_state" not in found.missing_keys
    now = [model[0].state_dict()["_extra_state"], *(each.get_extra_state() for each in model[1:])]
    assert all(map(torch.equal, saved, now)) and all(each.numel() for each in now)
    assert scales[0] is model[0]._fp8_scales
    # One that has a layer's parameters alone removes its scales.
    state = {f"{at}.{name}": p for at in range(3) for name, p in model[at].named_parameters()}
    model.load_state_dict(state, strict=False)
    assert model[0]._fp8_scales is None and not model[1]._fp8.scales and not model[2]._fp8.scales


def trained_model() -> torch.nn.Module:
    """A norm and both layers, each with scales."""
    model = torch.nn.Sequential(
        LayerNorm(16), Linear(16, 16), LayerNormLinear(16, 16, device="cpu")
    )
    with fp8_autocast():
        model[2](model[1](model[0](torch.randn(4, 16), fp8_output=True))).sum().backward()
    return model


def test_scales_without_values_are_none():
    """Of a model or a state dict that torch.load puts on "meta", and of FakeTensors."""
    model, files = trained_model(), [io.BytesIO(), io.BytesIO()]
    for file, saved in zip(files, (model, model.state_dict())):
        torch.save(saved, file)
        file.seek(0)
    of_file = torch.load(files[0], map_location="meta", weights_only=False)
    of_state, fake = trained_model(), trained_model()
    of_state.load_state_dict(torch.load(files[1], map_location="meta"), assign=True)
    files[1].seek(0)
    with FakeTensorMode():
        fake.load_state_dict(torch.load(files[1]), assign=True)
    for each in (of_file, of_state, fake):
        assert each[0]._fp8_scales is None and not each[1]._fp8.scales and not each[2]._fp8.scales
        assert not each[2].state_dict()["_extra_state"].numel()
    of_file.to_empty(device="cpu").load_state_dict(model.state_dict())
    states = [each.state_dict() for each in (of_file, model)]
    assert states[0].keys() == states[1].keys()
    assert all(map(torch.equal, *(each.values() for each in states)))


@pytest.mark.filterwarnings("ignore")
def test_a_state_dict_of_an_older_weight_norm_is_loaded():
    """torch's own pre-hook writes the keys of the parametrization into the state dict."""
    for make_layer in (lambda: Linear(8, 4), lambda: LayerNormLinear(8, 4, device="cpu")):
        older = torch.nn.utils.weight_norm(make_layer())
        layer = torch.nn.utils.parametrizations.weight_norm(make_layer())
        state = older.state_dict()
        keys = [*state]
        layer.load_state_dict(state)
        x = torch.randn(3, 8)
        assert torch.allclose(layer(x), older(x), atol=1e-6) and [*state] == keys


def test_a_state_stays_an_object_between_processes():
    """torch.distributed.checkpoint's async_save may save it in a process of its own."""
    for state in (trained_model()[0].get_extra_state(), LayerNorm(8).get_extra_state()):
        received = ForkingPickler.loads(ForkingPickler.dumps(state))
        assert torch.equal(received, state) and type(received) is type(state) is not torch.Tensor
