"""Ways to save, load, copy and convert layers: values, scales, gradients and attributes stay."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.distributed.checkpoint")
state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from cupynorm import LayerNorm, LayerNormLinear, Linear, fp8_autocast  # noqa: E402
from cupynorm.recipes import DelayedScaling  # noqa: E402

FULL = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
ATTRIBUTES = ("sequence_parallel", "tensor_model_parallel", "partition_dim", "partition_stride")


def make(num_steps: int = 1, length: int = 3, seed: int = 0) -> torch.nn.Sequential:
    """A norm and both layers, with scales of that many steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        LayerNorm(16, sequence_parallel=True, fp8_state=True),
        LayerNormLinear(16, 32, device="cpu", parameters_split=("q", "k")),
        Linear(32, 8, fp8_state=True),
    )
    for _ in range(num_steps):
        with fp8_autocast(recipe=DelayedScaling(amax_history_len=length)):
            model(torch.randn(4, 16)).sum().backward()
            model[0](torch.randn(4, 16), fp8_output=True)
    model.zero_grad()
    return model


def scales_of(model) -> list:
    """Those of each layer, or None."""
    norm, *layers = model
    return [norm._fp8.scales.get("y"), *(each._fp8.scales or None for each in layers)]


@contextlib.contextmanager
def setting(name: str):
    change = getattr(torch.__future__, f"set_{name}")
    change(True)
    try:
        yield
    finally:
        change(False)


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


def by_safetensors(saver, loader, path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(saver, str(path / "model"))
    safetensors.load_model(loader, str(path / "model"))


def by_torch(saver, loader, path, mmap=False, assign=False):
    torch.save(saver.state_dict(), path / "state")
    state = torch.load(path / "state", mmap=mmap, weights_only=True)
    loader.load_state_dict(state, assign=assign)


def by_assigned_mmap(saver, loader, path):
    by_torch(saver, loader, path, mmap=True, assign=True)


def by_whole_mmap(saver, loader, path):
    torch.save(saver, path / "model")
    return torch.load(path / "model", mmap=True, weights_only=False)


def from_meta(saver, loader, path):
    loader.to("meta").to_empty(device="cpu").load_state_dict(saver.state_dict())


def by_swapped_tensors(saver, loader, path):
    parameters = [*loader.parameters()]
    with setting("swap_module_params_on_conversion"):
        loader.double().float().load_state_dict(saver.state_dict())
    assert all(one is other for one, other in zip(parameters, loader.parameters()))


def by_pickle(saver, loader, path):
    return pickle.loads(pickle.dumps(saver, protocol=2))


def by_copy(saver, loader, path):
    return copy.deepcopy(saver)


WAYS = (
    by_checkpoint,
    by_model_state_dict,
    by_full_state_dict,
    by_safetensors,
    by_torch,
    by_assigned_mmap,
    by_whole_mmap,
    from_meta,
    by_swapped_tensors,
    by_pickle,
    by_copy,
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "of_saver, of_loader", (((2, 4), (1, 6)), ((2, 4), (0, 1)), ((0, 1), (1, 4)))
)
@pytest.mark.parametrize("way", WAYS)
def test_a_loaded_model_is_the_saved_one(way, of_saver, of_loader, tmp_path):
    """Its scales too, whatever the lengths of the histories."""
    saver = make(*of_saver)
    saved, loader = copy.deepcopy(saver.state_dict()), make(*of_loader, seed=1)
    loaded = way(saver, loader, tmp_path) or loader
    state = loaded.state_dict()
    assert state.keys() == saved.keys() and sum("_extra" in name for name in state) == 3
    for name, value in saved.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    assert [each is None for each in scales_of(loaded)] == [of_saver[0] == 0] * 3
    for (name, one), (_, other) in zip(loaded.named_parameters(), saver.named_parameters()):
        assert type(one) is type(other) and one.requires_grad, name
        assert all(getattr(one, each, None) == getattr(other, each, None) for each in ATTRIBUTES)
    x = torch.randn(4, 16)
    for model in (loaded, saver):
        with fp8_autocast(recipe=DelayedScaling(amax_history_len=of_saver[1])):
            model(x).square().sum().backward()
            model[0](x, fp8_output=True)
    for one, other in zip(loaded.parameters(), saver.parameters()):
        assert torch.equal(one.grad, other.grad)
    states = (model.state_dict().items() for model in (loaded, saver))
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(*states))
    torch.optim.SGD(loaded.parameters(), 0.1).step()  # the saved values are not written to
    named = dict(saver.named_parameters())
    assert all(torch.equal(each, saved[name]) for name, each in named.items())


def test_modules_without_scales_have_torchs_state_dict():
    for ours, theirs in (
        (LayerNorm(16), torch.nn.LayerNorm(16)),
        (Linear(4, 2), torch.nn.Linear(4, 2)),
    ):
        assert [*ours.state_dict()] == [*theirs.state_dict()]
    model = make()
    for layer, theirs in ((model[0], torch.nn.LayerNorm(16)), (model[2], torch.nn.Linear(32, 8))):
        theirs.load_state_dict(layer.state_dict(), strict=False)
        layer.load_state_dict(theirs.state_dict())
        assert not layer.get_extra_state().numel()


def test_parts_in_a_state_dict_share_the_memory_of_the_parameters():
    module = make()[1]
    for name, part in module.state_dict().items():
        if name != "_extra_state":
            assert part.data_ptr() == getattr(module, name).data_ptr()
            assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_a_state_dict_of_adapters_leaves_the_scales():
    """It has no parameters of the layers, and is loaded with strict=False."""
    model = make()
    scales = model[0]._fp8.scales["y"], model[1]._fp8.scales, model[2]._fp8.scales
    saved = [model[0].state_dict()["_extra_state"], *(each.get_extra_state() for each in model[1:])]
    found = model.load_state_dict({"3.adapter": torch.ones(1)}, strict=False)
    assert found.unexpected_keys == ["3.adapter"] and "2._extra_state" not in found.missing_keys
    now = [model[0].state_dict()["_extra_state"], *(each.get_extra_state() for each in model[1:])]
    assert all(map(torch.equal, saved, now)) and all(each.numel() for each in now)
    assert scales[0] is model[0]._fp8.scales.get("y")
    # One that has a layer's parameters alone removes its scales.
    state = {f"{at}.{name}": p for at in range(3) for name, p in model[at].named_parameters()}
    model.load_state_dict(state, strict=False)
    assert scales_of(model) == [None] * 3


def test_scales_without_values_are_none():
    """Of a model or a state dict that torch.load puts on "meta", and of FakeTensors."""
    model, files = make(), [io.BytesIO(), io.BytesIO()]
    for file, saved in zip(files, (model, model.state_dict())):
        torch.save(saved, file)
        file.seek(0)
    of_file = torch.load(files[0], map_location="meta", weights_only=False)
    of_state, fake = make(), make()
    of_state.load_state_dict(torch.load(files[1], map_location="meta"), assign=True)
    files[1].seek(0)
    with FakeTensorMode():
        fake.load_state_dict(torch.load(files[1]), assign=True)
    for each in (of_file, of_state, fake):
        assert not any(scales_of(each))
        assert not each[2].state_dict()["_extra_state"].numel()
    of_file.to_empty(device="cpu").load_state_dict(model.state_dict())
    states = [each.state_dict() for each in (of_file, model)]
    assert states[0].keys() == states[1].keys()
    assert all(map(torch.equal, *(each.values() for each in states)))


def test_a_state_stays_an_object_between_processes():
    """torch.distributed.checkpoint's async_save may save it in a process of its own."""
    for state in (make()[0].get_extra_state(), LayerNorm(8).get_extra_state()):
        received = ForkingPickler.loads(ForkingPickler.dumps(state))
        assert torch.equal(received, state) and type(received) is type(state) is not torch.Tensor
