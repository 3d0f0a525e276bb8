"""Trains a network with CuPy and without torch. It predicts the next character of a text.

    python notebooks/train_with_cupy.py [STEPS]

A LayerNorm comes before each layer: cupynorm.layer_norm_forward and layer_norm_backward. The other
gradients are written out. Without a GPU the same code runs on NumPy arrays.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from cupynorm import layer_norm_backward, layer_norm_forward
from cupynorm.gpu.nvrtc import has_gpu

TEXT = Path(__file__).parents[1] / "LICENSE"
CONTEXT, WIDTH, BATCH = 8, 64, 256  # characters read, elements per layer, samples per step


def array_library():
    if not has_gpu():
        return np
    import cupy

    return cupy


def train(steps: int = 200, seed: int = 0) -> list[float]:
    """The mean cross-entropy of each step's samples, in nats."""
    xp, random = array_library(), np.random.default_rng(seed)
    text = np.frombuffer(TEXT.read_bytes(), np.uint8)
    letters, text = np.unique(text, return_inverse=True)

    def normal(*shape: int, scale: float):
        return xp.asarray(random.standard_normal(shape) * scale, dtype=np.float32)

    cols = CONTEXT * WIDTH
    parameters = {
        "embedding": normal(len(letters), WIDTH, scale=1.0),
        "weight_1": xp.ones(cols, np.float32),
        "bias_1": xp.zeros(cols, np.float32),
        "hidden": normal(cols, WIDTH, scale=cols**-0.5),
        "weight_2": xp.ones(WIDTH, np.float32),
        "bias_2": xp.zeros(WIDTH, np.float32),
        "output": normal(WIDTH, len(letters), scale=WIDTH**-0.5),
    }
    moments = {
        name: (xp.zeros_like(value), xp.zeros_like(value)) for name, value in parameters.items()
    }
    losses = []
    for step in range(1, steps + 1):
        starts = random.integers(0, len(text) - CONTEXT, BATCH)
        seen = xp.asarray(text[starts[:, None] + np.arange(CONTEXT)])
        following = xp.asarray(text[starts + CONTEXT])
        loss, gradients = loss_and_gradients(xp, parameters, seen, following)
        losses.append(float(loss))
        for name, gradient in gradients.items():  # Adam (Kingma, Ba 2015)
            mean, square = moments[name]
            mean += 0.1 * (gradient - mean)
            square += 0.01 * (gradient**2 - square)
            rate = 3e-3 * (1 - 0.99**step) ** 0.5 / (1 - 0.9**step)
            parameters[name] -= rate * mean / (xp.sqrt(square) + 1e-8)
    return losses


def loss_and_gradients(xp, parameters, seen, following):
    embedding, hidden, output = (parameters[name] for name in ("embedding", "hidden", "output"))
    weight_1, bias_1, weight_2, bias_2 = (
        parameters[name] for name in ("weight_1", "bias_1", "weight_2", "bias_2")
    )
    samples = xp.arange(len(seen))
    # Forward.
    x = embedding[seen].reshape(len(seen), -1)
    first = layer_norm_forward(x, x.shape[-1], weight_1, bias_1)
    added = first.y @ hidden
    active = xp.maximum(added, 0)
    second = layer_norm_forward(active, active.shape[-1], weight_2, bias_2)
    scores = second.y @ output
    scores -= scores.max(1, keepdims=True)
    shares = xp.exp(scores)
    shares /= shares.sum(1, keepdims=True)
    loss = -xp.log(shares[samples, following]).mean()
    # Backward.
    dscores = shares
    dscores[samples, following] -= 1
    dscores /= len(seen)
    saved = active, active.shape[-1], second.mean, second.rstd
    behind = layer_norm_backward(dscores @ output.T, *saved, weight_2)
    dadded = behind.dx * (added > 0)
    saved = x, x.shape[-1], first.mean, first.rstd
    before = layer_norm_backward(dadded @ hidden.T, *saved, weight_1)
    dembedding = xp.zeros_like(embedding)
    xp.add.at(dembedding, seen.reshape(-1), before.dx.reshape(-1, WIDTH))
    return loss, {
        "embedding": dembedding,
        "weight_1": before.dweight,
        "bias_1": before.dbias,
        "hidden": first.y.T @ dadded,
        "weight_2": behind.dweight,
        "bias_2": behind.dbias,
        "output": second.y.T @ dscores,
    }


if __name__ == "__main__":
    losses = train(*map(int, sys.argv[1:]))
    for step in range(0, len(losses), max(1, len(losses) // 10)):
        print(f"step {step:>4}  {losses[step]:.3f} nats a character")
    print(f"last       {losses[-1]:.3f}")
