"""Ways of torch to load and to convert a model: values, scales, gradients and attributes stay."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
from cupynorm import (  # noqa: E402
    LayerNorm,
    LayerNormLinear,
    Linear,
    fp8_autocast,
)
from cupynorm.recipes import DelayedScaling  # noqa: E402

SETTINGS = ("swap_module_params_on_conversion", "overwrite_module_params_on_conversion")
ATTRIBUTES = ("sequence_parallel", "tensor_model_parallel", "partition_dim", "partition_stride")
LAYERS = {"plain": {}, "split": {"parameters_split": ("q", "k")}}


def make(kind: str, num_steps: int, seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        LayerNorm(16, sequence_parallel=True),
        LayerNormLinear(16, 32, device="cpu", **LAYERS[kind]),
        Linear(32, 8),
    )
    for _ in range(num_steps):
        with fp8_autocast(recipe=DelayedScaling(amax_history_len=3)):
            model(torch.randn(4, 16)).sum().backward()
            model[0](torch.randn(4, 16), fp8_output=True)
    model.zero_grad()
    return model


@contextlib.contextmanager
def setting(name: str):
    change = getattr(torch.__future__, f"set_{name}")
    change(True)
    try:
        yield
    finally:
        change(False)


def by_mmap(saver, loader, path, assign=False):
    torch.save(saver.state_dict(), path)
    loader.load_state_dict(torch.load(path, mmap=True, weights_only=True), assign=assign)
    return loader


def by_assigned_mmap(saver, loader, path):
    return by_mmap(saver, loader, path, assign=True)


def by_whole_mmap(saver, loader, path):
    torch.save(saver, path)
    return torch.load(path, mmap=True, weights_only=False)


def from_meta(saver, loader, path):
    loader = loader.to("meta").to_empty(device="cpu")
    loader.load_state_dict(saver.state_dict())
    return loader


def by_swapped_tensors(saver, loader, path):
    parameters = [*loader.parameters()]
    with setting(SETTINGS[0]):
        loader.double().float().load_state_dict(saver.state_dict())
    assert all(one is other for one, other in zip(parameters, loader.parameters()))
    return loader


def by_overwritten_parameters(saver, loader, path):
    with setting(SETTINGS[1]):
        loader.double().float().load_state_dict(saver.state_dict())
    return loader


def by_renamed_keys(saver, loader, path):
    def rename(module, state, prefix, *_):
        for name in [name for name in state if name.startswith(f"{prefix}old.")]:
            state[name.replace("old.", "")] = state.pop(name)

    state = {}
    for at, layer in enumerate(loader):
        layer.register_load_state_dict_pre_hook(rename)
        for name, value in saver[at].state_dict().items():
            state[f"{at}.{name}" if name == "_extra_state" else f"{at}.old.{name}"] = value
    loader.load_state_dict(state)
    return loader


def by_pickle(saver, loader, path):
    return pickle.loads(pickle.dumps(saver, protocol=2))


WAYS = (
    by_mmap,
    by_assigned_mmap,
    by_whole_mmap,
    from_meta,
    by_swapped_tensors,
    by_overwritten_parameters,
    by_renamed_keys,
    by_pickle,
)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_loaded_model_is_the_saved_one(way, kind, tmp_path):
    saver = make(kind, 2, seed=0)
    saved = copy.deepcopy(saver.state_dict())
    loaded = way(saver, make(kind, 1, seed=1), tmp_path / "saved.pt")
    state = loaded.state_dict()
    assert state.keys() == saved.keys() and sum("_extra" in name for name in state) == 3
    for name, value in saved.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    for (name, one), (_, other) in zip(loaded.named_parameters(), saver.named_parameters()):
        assert type(one) is type(other) and one.requires_grad, name
        assert all(getattr(one, each, None) == getattr(other, each, None) for each in ATTRIBUTES)
    x = torch.randn(4, 16)
    for model in (loaded, saver):
        model(x).square().sum().backward()
    for one, other in zip(loaded.parameters(), saver.parameters()):
        assert torch.allclose(one.grad, other.grad, rtol=1e-5, atol=1e-6)
    torch.optim.SGD(loaded.parameters(), 0.1).step()  # the saved values are not written to
    assert all(torch.equal(saver.state_dict()[name], saved[name]) for name in saved)
