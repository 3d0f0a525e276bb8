"""Recipes of scaling, their states, and scales of several ranks and of CUDA graphs.

Delayed scaling is compared with delayed_scaling.py, a second implementation.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
from delayed_scaling import Machine

import cupynorm

torch = pytest.importorskip("torch")
from norm_calls import DEVICES  # noqa: E402

from cupynorm import recipes  # noqa: E402
from cupynorm.nn import quantization, scales  # noqa: E402
from cupynorm.nn.scales import Scales  # noqa: E402
from cupynorm.recipes import BlockScaling, CurrentScaling, DelayedScaling, Format  # noqa: E402


def record(scales, at, x):
    """Records the amax of x, as a step that quantises x does."""
    quantization.quantize(x.reshape(1, -1), scales.scale[at], recipes.E4M3, amax=scales.amax(at))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ("max", "most_recent"))
@pytest.mark.parametrize("length, margin", ((1, 0), (2, 1), (4, 0), (16, 3), (300, -2), (1024, 0)))
@pytest.mark.parametrize("device", (*DEVICES, "kernels"))
def test_fifty_steps_give_the_scales_of_the_second_implementation(
    device, length, margin, rule, request
):
    launched = request.getfixturevalue("kernels") if device == "kernels" else None
    device = "cpu" if device == "kernels" else device
    generator = np.random.default_rng([length, margin + 4])
    dtypes = (recipes.E4M3, recipes.E5M2, recipes.E4M3)
    recipe = DelayedScaling(margin, amax_history_len=length, amax_compute_algo=rule)
    scales = Scales(dtypes, length, torch.device(device))
    machines = [Machine(recipes.LARGEST[dtype], length, margin, rule) for dtype in dtypes]
    places = scales.scale.data_ptr(), scales.amax_history.data_ptr()
    changed = 0
    for _ in range(50):
        amaxes = np.abs(generator.standard_normal(3) * 10.0 ** generator.integers(-4, 5, 3)).astype(
            np.float32
        )
        odd = generator.random(3)
        for bound, value in ((0.10, 0.0), (0.17, np.inf), (0.24, np.nan), (0.30, 1e-42)):
            amaxes[(odd < bound) & (odd >= bound - 0.07)] = value
        for at, (machine, amax) in enumerate(zip(machines, amaxes)):
            if (
                at != 2 or generator.random() < 0.5
            ):  # the last tensor is used in about half the steps
                record(scales, at, torch.tensor([[-amax, amax / 2]], device=device))
            else:
                amax = 0.0
            machine.step(amax)
        before = scales.scale.clone()
        scales.update(recipe)
        changed += int((scales.scale != before).any())
        assert scales.scale.tolist() == [machine.scale for machine in machines]
        expected = np.array([machine.history() for machine in machines], np.float32).T
        np.testing.assert_array_equal(scales.amax_history.cpu().numpy(), expected)
    assert changed > 3 and places == (scales.scale.data_ptr(), scales.amax_history.data_ptr())
    assert launched is None or "update_scales.cu" in [launch.kernel.source for launch in launched]


def test_a_tensor_used_twice_in_a_step_records_the_larger_amax():
    scales = Scales((recipes.E4M3,), 3, torch.device("cpu"))
    for value in (2.0, 8.0, 4.0):
        record(scales, 0, torch.full((3,), value))
    scales.update(DelayedScaling(amax_history_len=3))
    assert scales.scale.item() == 448 / 8
    assert scales.amax_history.flatten().tolist() == [0.0, 0.0, 8.0]


def test_callables_of_a_recipe():
    seen = []

    def amax(history):
        seen.append(history.clone())
        return history.mean(0)

    def scale(amax, scale, fp8_max, recipe):
        assert recipe.margin == 2 and fp8_max.tolist() == [448.0, 57344.0]
        return fp8_max / amax / 2

    recipe = DelayedScaling(
        2, amax_history_len=2, amax_compute_algo=amax, scaling_factor_compute_algo=scale
    )
    scales = Scales((recipes.E4M3, recipes.E5M2), 2, torch.device("cpu"))
    for at in range(2):
        record(scales, at, torch.tensor([4.0]))
    scales.update(recipe)
    assert seen[0].tolist() == [[4.0, 4.0], [0.0, 0.0]]
    assert scales.scale.tolist() == [112.0, 14336.0]


def test_options_that_recipes_refuse():
    assert DelayedScaling() == DelayedScaling(0, Format.HYBRID, 1024, "max", None, True)
    assert CurrentScaling() == CurrentScaling(Format.HYBRID, 0.0, False)
    assert BlockScaling() == BlockScaling(Format.E4M3, True)
    assert Format.HYBRID.value == (recipes.E4M3, recipes.E5M2)
    assert Format.E4M3.value == (recipes.E4M3, recipes.E4M3)
    number, flag = "expected a finite number", "expected True or False"
    for make, name, value, error, words in (
        (DelayedScaling, "amax_history_len", 0, ValueError, "0; expected 1 or more"),
        (DelayedScaling, "amax_history_len", 1.5, TypeError, "1.5; expected an int, 1 or more"),
        (DelayedScaling, "margin", "a", TypeError, f"'a'; {number}"),
        (DelayedScaling, "margin", True, TypeError, f"True; {number}"),
        (DelayedScaling, "margin", None, TypeError, f"None; {number}"),
        (DelayedScaling, "margin", float("nan"), TypeError, f"nan; {number}"),
        (DelayedScaling, "margin", -2000, ValueError, "-2000; expected -126 to 126"),
        (DelayedScaling, "margin", 10**400, ValueError, "an int of 401 digits"),
        (DelayedScaling, "reduce_amax", "no", TypeError, f"'no'; {flag}"),
        (DelayedScaling, "scaling_factor_compute_algo", 3, TypeError, "3; expected None or a call"),
        (DelayedScaling, "amax_compute_algo", "mean", ValueError, "'mean'"),
        (DelayedScaling, "fp8_format", "E5M2", TypeError, "'E5M2'; expected Format.E4M3 or Form"),
        (CurrentScaling, "power_of_two", "no", TypeError, f"'no'; {flag}"),
        (CurrentScaling, "amax_epsilon", -1.0, ValueError, "-1.0; expected 0 or more"),
        (CurrentScaling, "amax_epsilon", float("nan"), ValueError, "nan; expected 0 or more"),
        (CurrentScaling, "amax_epsilon", 1e39, ValueError, r"1e\+39; .*, and no more than float32"),
        (CurrentScaling, "amax_epsilon", "0", TypeError, "'0'; expected a number that is 0 or mo"),
        (BlockScaling, "power_of_two", 1, TypeError, f"1; {flag}"),
    ):
        with pytest.raises(error, match=f"{name} is {words}"):
            make(**{name: value})
    for arguments, sentence in (
        ({"enabled": CurrentScaling()}, "enabled is CurrentScaling.*; expected True or False"),
        ({"recipe": "delayed"}, "recipe is a str; expected DelayedScaling"),
    ):
        with pytest.raises(TypeError, match=sentence):
            scales.fp8_autocast(**arguments).__enter__()


def filled(length: int) -> Scales:
    scales = Scales((recipes.E4M3, recipes.E5M2), length, torch.device("cpu"))
    recipe = DelayedScaling(amax_history_len=length)
    for step in range(1, 6):
        for at in range(2):
            record(scales, at, torch.tensor([step * 10.0**at]))
        scales.update(recipe)
    return scales


def with_length(kept: Scales, length: int) -> Scales:
    recipe = DelayedScaling(amax_history_len=length)
    device = torch.device("cpu")
    return scales.scales_for(kept, kept.dtypes, recipe, device, keeps_amaxes=True)


def test_a_history_of_another_length():
    longer = filled(4)
    assert longer.amax_history[:, 0].tolist() == [0.0, 3.0, 4.0, 5.0]
    longer = with_length(longer, 6)
    assert longer.amax_history[:, 0].tolist() == [0.0, 0.0, 0.0, 3.0, 4.0, 5.0]
    for length, kept in ((3, [0.0, 4.0, 5.0]), (2, [0.0, 5.0]), (1, [0.0])):
        longer = with_length(longer, length)
        assert longer.amax_history[:, 0].tolist() == kept and longer.amax_history.shape == (
            length,
            2,
        )


def test_states_are_packed_as_bytes_without_pickle():
    states = {"forward": filled(4), "backward": filled(2)}
    packed = scales.pack(states)
    assert packed.dtype == torch.uint8 and packed.is_contiguous()
    assert bytes(packed.numpy()).startswith(
        b'cupynorm fp8 state 1\n{"forward": [4, 2], "backward": [2, 2]}\n'
    )
    found = scales.unpack(packed)
    assert list(found) == ["forward", "backward"]
    for name, (scale, history) in found.items():
        assert torch.equal(scale, states[name].scale) and torch.equal(
            history, states[name].amax_history
        )
    for cut in (packed[:-8], packed[:-3], packed[:40]):
        with pytest.raises(
            ValueError, match="the fp8 state in a state dict has [0-9]+ bytes after"
        ):
            scales.unpack(cut)
    assert (
        scales.pack({}).numel() == 0
        and scales.unpack(scales.pack({})) == {}
        and scales.unpack(None) == {}
    )
    for foreign in (torch.tensor([128, 4, 149], dtype=torch.uint8), io.BytesIO(b"x")):
        with pytest.warns(UserWarning, match="is not cupynorm's"):
            assert scales.unpack(foreign) == {}


def header(text: bytes, *numbers: float) -> torch.Tensor:
    raw = b"cupynorm fp8 state 1\n" + text + b"\n" + np.array(numbers, np.float32).tobytes()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


@pytest.mark.parametrize(
    "state, sentence",
    [
        (np.zeros(3, np.uint8), "is an ndarray; expected the uint8 tensor"),
        (b"cupynorm fp8 state 1\n", "is a bytes; expected the uint8 tensor"),
        ({"scale": 1}, "is a dict; expected the uint8 tensor"),
        (header(b"[1, 2]"), ".*; expected finite scales above 0"),
        (header(b"[" * 100_000), ".*; expected finite scales above 0"),
        (header(b'{"y": [1, -1]}'), ".*; expected finite scales above 0"),
        (header(b'{"y": 3}'), ".*; expected finite scales above 0"),
        (header(b"{}"), "has 0 bytes after b?.*; expected finite scales"),
        (header(b'{"y": [1, 1]}', np.nan, 0), "has 8 bytes after .*; expected finite scales"),
        (header(b'{"y": [1, 1]}', 0, 0), "has 8 bytes after .*; expected finite scales"),
        (header(b'{"y": [1, 1]}', -np.inf, 0), "has 8 bytes after .*; expected finite scales"),
    ],
)
@pytest.mark.parametrize("kind", ["RMSNorm", "Linear"])
def test_states_of_a_wrong_form_are_refused(kind, state, sentence):
    """They change nothing."""
    module = cupynorm.RMSNorm(8) if kind == "RMSNorm" else cupynorm.Linear(8, 8, device="cpu")
    before = module.state_dict()
    with pytest.raises((TypeError, ValueError), match=f"the fp8 state in a state dict {sentence}"):
        module.load_state_dict(before | {"_extra_state": state})
    assert module.state_dict().keys() == before.keys()
