"""fp8_autocast(enabled=False, calibrating=True), and TransformerEngine's names of its arguments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from fp8_linear_cases import OF_Y, make, relative, tensor, truth_of  # noqa: E402
from linear_cases import DEVICES  # noqa: E402

import cupynorm  # noqa: E402
from cupynorm import CurrentScaling, DelayedScaling, fp8_autocast  # noqa: E402
from cupynorm.nn import scales  # noqa: E402

RECIPE = DelayedScaling(amax_history_len=3)


@pytest.mark.parametrize("records", (True, False))
@pytest.mark.parametrize("device", DEVICES)
def test_scales_are_recorded_while_products_stay_in_their_dtype(device, records):
    module, problem = make(device=device)
    module.train(records)
    x = tensor(problem.x, device=device)
    plain = module(x)
    with torch.set_grad_enabled(records):
        with fp8_autocast(enabled=False, calibrating=True, fp8_recipe=RECIPE):
            assert torch.equal(module(x), plain)
        normalized = cupynorm.layer_norm(
            x, 200, module.layer_norm_weight, module.layer_norm_bias, out_dtype="float32"
        )
    amaxes = normalized.abs().max(), module.weight.float().abs().max()
    state = module._fp8.scales["forward"]
    scales = [448 / amaxes[0].item(), 448 / amaxes[1].item(), 1]
    assert state.scale.tolist() == pytest.approx(scales, rel=2**-23)
    assert state.amax_history[-1].tolist() == [*amaxes, 0]
    # The first step in 8 bits is the second of a layer that was not calibrated.
    other, made = make(device=device)[0], []
    for layer in (module, other, other):
        with fp8_autocast(recipe=RECIPE):
            made.append(layer(x))
    assert torch.equal(made[0], made[2]) and not torch.equal(made[0], made[1])
    assert relative(made[0].detach().double().cpu().numpy(), truth_of(problem)["y"]) <= OF_Y


def test_a_checkpoint_and_other_recipes_record_nothing_more():
    module, problem = make(num_rows=4)

    def run(x):
        with fp8_autocast(enabled=False, calibrating=True, recipe=RECIPE):
            return module(x)

    x = tensor(problem.x, grad=True)
    y = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
    state = module._fp8.scales["forward"]
    assert state.num_steps == 1
    y.sum().backward()
    assert state.amax_history[0].eq(0).all() and state.amax_history[1].eq(0).all()
    with fp8_autocast(enabled=False, calibrating=True, recipe=CurrentScaling()):
        module(x)
    with fp8_autocast(recipe=RECIPE), fp8_autocast(enabled=False):
        module(x)
    assert not state.amax_history[:2].any()


def test_names_of_transformer_engine():
    group = SimpleNamespace(size=lambda: 1)
    with fp8_autocast(fp8_recipe=CurrentScaling(), fp8_group=group, calibrating=True):
        region = scales.active()
        assert region.recipe == CurrentScaling() and region.group is group
        assert scales.calibration() is None
    for arguments, options, sentence in (
        ((True, False), {}, "recipe is False; expected a recipe: .* as calibrating=False"),
        ((), {"recipe": RECIPE, "fp8_recipe": RECIPE}, "recipe and fp8_recipe are given"),
        ((), {"group": group, "fp8_group": group}, "group and fp8_group are given"),
        ((), {"calibrating": 1}, "calibrating is 1; expected True or False"),
    ):
        with pytest.raises(TypeError, match=sentence):
            fp8_autocast(*arguments, **options).__enter__()
    assert scales.active() is None
