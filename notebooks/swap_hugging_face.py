"""Runs Hugging Face models under enable() and with swapped norms: logits, gradients, and times.

    python notebooks/swap_hugging_face.py [--families bert,llama,gemma,qwen3]
                                          [--size tiny|realistic]
                                          [--dtypes float32,bfloat16] [--device cuda]

Weights are random, so nothing is downloaded. Each model runs in four ways with the same weights:

was      unchanged
enabled  under cupynorm.enable(), which serves the norms that call torch's own operators
now      with its norms swapped
float64  with torch's norms, all in float64

The distance of `was` from float64 is the usual rounding error of the model in that dtype. Those of
`enabled` and `now` may exceed it only by chance. A step is forward and backward.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch

import cupynorm
from cupynorm.command_line import several
from cupynorm.table import as_text

# family -> prefix of its classes, suffix of its language model, options of its config only.
FAMILIES = {
    "bert": ("Bert", "ForMaskedLM", {}),
    "llama": ("Llama", "ForCausalLM", {}),
    "gemma": ("Gemma", "ForCausalLM", {"head_dim": 64}),
    "qwen3": ("Qwen3", "ForCausalLM", {"head_dim": 64}),
}
_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES = {
    "tiny": dict(zip(_FIELDS, (100, 64, 128, 2)), num_attention_heads=2),
    "realistic": dict(zip(_FIELDS, (32_000, 2048, 5632, 6)), num_attention_heads=32),
}
SHAPES = {"tiny": (2, 16), "realistic": (4, 512)}  # sequences, tokens per sequence
# A distance comes from thousands of independent roundings, so it varies by chance by a few percent.
# Norms cause few of these roundings. An increase by half cannot be chance.
CHANCE = 1.5


RUNS, DTYPES = ("was", "enabled", "now"), ("float32", "bfloat16")
STEPS = 15  # that are timed


class Compared(NamedTuple):
    """What each of RUNS made of one model.

    distances: of all logits and of all gradients from float64, relative to the float64 norm.
    milliseconds: of a step, median. served, left: calls of norms in a step under enable().
    """

    family: str
    dtype: str
    swapped: cupynorm.SwappedNorms
    served: int
    left: int
    distances: dict[str, list[float]]
    milliseconds: dict[str, float]

    @property
    def ok(self) -> bool:
        """Whether norms were swapped, and no run is further off than by chance."""
        return bool(self.swapped.swapped) and all(
            now <= CHANCE * was
            for run in RUNS
            for now, was in zip(self.distances[run], self.distances["was"])
        )


def make(family: str, size: str) -> torch.nn.Module:
    """A model with random weights, in float32 on the CPU."""
    import transformers

    prefix, kind, own = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")
    config = config(**SIZES[size], **own, max_position_embeddings=1024)
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = config.num_attention_heads // 2
    torch.manual_seed(0)
    model = getattr(transformers, prefix + kind)(config).eval()  # no dropout
    with torch.no_grad():
        for parameter in model.parameters():
            # New norm weights are all 1 or all 0, which would hide errors in their use.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def by_torch(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What cupynorm's module computes, by torch."""
    weight = 1 + norm.weight if norm.zero_centered_gamma else norm.weight
    if isinstance(norm, torch.nn.LayerNorm):
        return torch.nn.functional.layer_norm(x, weight.shape, weight, norm.bias, norm.eps)
    return torch.nn.functional.rms_norm(x, weight.shape, weight, norm.eps)


def in_float64(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model in float64, with its norms in float64 too."""
    model = copy.deepcopy(model).double()
    # The norms of transformers compute in float32, also for float64 input.
    for place in cupynorm.swap_norms(model).swapped:
        norm = model.get_submodule(place.name)
        norm.forward = partial(by_torch, norm)
    return model


def logits_and_gradients(
    model: torch.nn.Module, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All logits, and all gradients of the model's own loss, each as one vector of float64."""
    result = model(input_ids=tokens, labels=tokens)
    gradients = torch.autograd.grad(result.loss, list(model.parameters()))
    logits = result.logits.detach().double().flatten()
    return logits, torch.cat([gradient.double().flatten() for gradient in gradients])


def compare(family: str, size: str, dtype: str, device: str) -> Compared:
    model = make(family, size).to(getattr(torch, dtype)).to(device)
    size_of_vocabulary, generator = SIZES[size]["vocab_size"], torch.Generator().manual_seed(0)
    tokens = torch.randint(size_of_vocabulary, SHAPES[size], generator=generator).to(device)
    right = logits_and_gradients(in_float64(model), tokens)
    models = {"was": model, "enabled": model, "now": copy.deepcopy(model)}
    swapped = cupynorm.swap_norms(models["now"])
    norms = {run: cupynorm.enabled if run == "enabled" else nullcontext for run in RUNS}
    distances, times = {}, {run: [] for run in RUNS}
    for run in RUNS:
        with norms[run]() as calls:
            found = logits_and_gradients(models[run], tokens)
        if calls is not None:
            served, left = sum(calls.served.values()), sum(calls.left.values())
        distances[run] = [
            ((a - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True)
        ]
    for at in range(STEPS):
        for run in RUNS[:: -1 if at % 2 else 1]:
            with norms[run]():
                times[run].append(seconds_of_step(models[run], tokens))
    milliseconds = {run: 1e3 * statistics.median(each) for run, each in times.items()}
    return Compared(family, dtype, swapped, served, left, distances, milliseconds)


def seconds_of_step(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Of forward and backward, until the GPU is done."""
    wait = torch.cuda.synchronize if tokens.is_cuda else lambda: None
    model.zero_grad()
    wait()
    start = time.perf_counter()
    model(input_ids=tokens, labels=tokens).loss.backward()
    wait()
    return time.perf_counter() - start


def table(compared: list[Compared]) -> str:
    """Three rows for each model: its runs."""
    rows = [("model", "dtype", "norms", "logits off", "gradients off", "ms a step", "calls")]
    for each in compared:
        counts = Counter((place.was, place.now) for place in each.swapped.swapped)
        what = ", ".join(f"{count} {was} -> {now}" for (was, now), count in counts.items())
        what += f", {len(each.swapped.left)} left" if each.swapped.left else ""
        what += "" if each.ok else "  FURTHER THAN CHANCE"
        said = {"enabled": f"{each.served} served, {each.left} left", "now": what}
        for run in RUNS:
            figures = [f"{off:.2e}" for off in each.distances[run]]
            figures += [f"{each.milliseconds[run]:.2f}", said.get(run, "")]
            rows.append((each.family, each.dtype, run, *figures))
    return as_text(rows)


def main(arguments: Sequence[str] | None = None) -> list[Compared]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    on_gpu = torch.cuda.is_available()
    add, shown = parser.add_argument, "default: %(default)s"
    add("--families", type=several(tuple(FAMILIES)), default=[*FAMILIES], help=shown)
    add("--size", choices=SIZES, default="realistic" if on_gpu else "tiny", help=shown)
    add("--dtypes", type=several(DTYPES), default=DTYPES, help=shown)
    add("--device", default="cuda" if on_gpu else "cpu", help=shown)
    given = parser.parse_args(arguments)
    compared = []
    for family in given.families:
        for dtype in given.dtypes:
            try:
                compared.append(compare(family, given.size, dtype, given.device))
            except (ImportError, AttributeError) as error:  # an old transformers
                print(f"{family} is left out: {error}")
                break
    print(table(compared))
    return compared


if __name__ == "__main__":
    raise SystemExit(not all(each.ok for each in main()))
