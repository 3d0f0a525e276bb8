"""Regions of fp8_autocast: their recipes, their order, and what runs at their end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import cupynorm

torch = pytest.importorskip("torch")

from cupynorm.nn import scales  # noqa: E402
from cupynorm.recipes import BlockScaling, CurrentScaling, DelayedScaling  # noqa: E402


def test_regions_may_end_out_of_order():
    """Regions of several threads may end in any order."""
    first, second = (
        scales.fp8_autocast(recipe=recipe) for recipe in (CurrentScaling(), BlockScaling())
    )
    with first:
        second.__enter__()
    assert scales.active().recipe == BlockScaling()
    second.__exit__(None, None, None)
    assert scales.active() is None


def test_regions():
    assert scales.active() is None
    with cupynorm.fp8_autocast():
        assert scales.active().recipe == DelayedScaling()
        with cupynorm.fp8_autocast(recipe=BlockScaling()):
            assert scales.active().recipe == BlockScaling()
            with cupynorm.fp8_autocast(enabled=False):
                assert scales.active() is None
        assert scales.active().recipe == DelayedScaling()
    with cupynorm.fp8_autocast(False, CurrentScaling()):
        assert scales.active() is None

    @cupynorm.fp8_autocast(recipe=CurrentScaling())
    def inside():
        return scales.active().recipe

    assert inside() == inside() == CurrentScaling() and scales.active() is None
    with pytest.raises(KeyError), cupynorm.fp8_autocast():
        raise KeyError
    assert scales.active() is None


def test_actions_at_the_end_of_the_outermost_region():
    ran = []

    class Seen:
        def update(self, recipe):
            ran.append(recipe)

        def forget(self):
            ran.append("forgotten")

    recipe = DelayedScaling()
    with cupynorm.fp8_autocast():
        with cupynorm.fp8_autocast(recipe=CurrentScaling()):
            for _ in range(2):
                scales.active().used[0, 0] = scales.UsedScales(Seen(), recipe, "group")
        assert not ran
    assert ran == [recipe]
    with torch.no_grad(), cupynorm.fp8_autocast():
        scales.active().used[0, 0] = scales.UsedScales(Seen(), recipe, None)
    assert len(ran) == 1
    with pytest.raises(KeyError), cupynorm.fp8_autocast():
        scales.active().used[0, 0] = scales.UsedScales(Seen(), recipe, None)
        raise KeyError
    assert ran[1:] == ["forgotten"]


def test_names_of_transformer_engine():
    group, recipe = SimpleNamespace(size=lambda: 1), CurrentScaling()
    with cupynorm.fp8_autocast(fp8_recipe=recipe, fp8_group=group, calibrating=False):
        assert scales.active().recipe == recipe and scales.active().group is group
    for arguments, options, sentence in (
        ((True, False), {}, "recipe is a bool; expected DelayedScaling"),
        ((), {"recipe": recipe, "fp8_recipe": recipe}, "recipe and fp8_recipe are given"),
        ((), {"group": group, "fp8_group": group}, "group and fp8_group are given"),
        ((), {"calibrating": True}, "calibrating is True; expected False: scales start at 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            cupynorm.fp8_autocast(*arguments, **options).__enter__()
    assert scales.active() is None
