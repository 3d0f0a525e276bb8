"""notebooks/train_with_cupy.py learns, and its gradients are those of its loss."""

import numpy as np
import pytest


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_it_learns(example, where, monkeypatch):
    if where == "cpu":
        monkeypatch.setattr(example, "has_gpu", lambda: False)
    losses = example.train(steps=40)
    # Blind guessing among the letters costs ln 73 = 4.3 nats, knowing how frequent each is about 3.
    assert losses[0] > 4 and np.mean(losses[-5:]) < 2.6


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_its_gradients_are_those_of_its_loss(example, where, monkeypatch):
    if where == "cpu":
        monkeypatch.setattr(example, "has_gpu", lambda: False)
    xp, random = example.array_library(), np.random.default_rng(0)
    cols = example.CONTEXT * example.WIDTH
    shapes = {
        "embedding": (5, example.WIDTH),
        "weight_1": (cols,),
        "bias_1": (cols,),
        "hidden": (cols, example.WIDTH),
        "weight_2": (example.WIDTH,),
        "bias_2": (example.WIDTH,),
        "output": (example.WIDTH, 5),
    }
    parameters = {
        name: xp.asarray(random.standard_normal(shape) * shape[0] ** -0.5)
        for name, shape in shapes.items()
    }
    seen, following = (
        xp.asarray(random.integers(0, 5, (6, example.CONTEXT))),
        xp.asarray(random.integers(0, 5, 6)),
    )
    _, gradients = example.loss_and_gradients(xp, parameters, seen, following)
    for name, value in parameters.items():
        direction = xp.asarray(random.standard_normal(value.shape))
        step = 1e-5
        moved = [
            float(
                example.loss_and_gradients(
                    xp, {**parameters, name: value + sign * step * direction}, seen, following
                )[0]
            )
            for sign in (1, -1)
        ]
        slope = float((gradients[name] * direction).sum())
        # A central difference is off by step^2 of the third derivative, and by 2^-53 / step
        # of rounding.
        assert abs((moved[0] - moved[1]) / (2 * step) - slope) <= 1e-6 * (1 + abs(slope)), name
