"""Swaps the norms of Hugging Face models, and measures the effect on logits and gradients.

    python notebooks/swap_hugging_face.py [--families bert,llama,gemma,qwen3]
                                          [--size tiny|realistic]
                                          [--dtypes float32,bfloat16] [--device cuda]

The weights are random, so nothing is downloaded. Each model runs three times with the same weights:

1. unchanged,
2. with its norms swapped,
3. in float64, with torch's norms in float64.

The distance of the first from the third is the usual rounding error of the model in that dtype.
The distance of the second may exceed it only by chance.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

import cupynorm

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


class Compared(NamedTuple):
    """Distances of all logits and of all gradients from float64, relative to the float64 norm.

    was: before the swap. now: after it.
    """

    family: str
    dtype: str
    swapped: cupynorm.SwappedNorms
    logits_was: float
    logits_now: float
    gradients_was: float
    gradients_now: float

    @property
    def ok(self) -> bool:
        pairs = (self[3:5], self[5:7])
        return bool(self.swapped.swapped) and all(now <= CHANCE * was for was, now in pairs)


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
    was = logits_and_gradients(model, tokens)
    swapped = cupynorm.swap_norms(model)
    now = logits_and_gradients(model, tokens)
    distances = [
        ((found[at] - right[at]).norm() / right[at].norm()).item()
        for at in (0, 1)
        for found in (was, now)
    ]
    return Compared(family, dtype, swapped, *distances)


def table(compared: list[Compared]) -> str:
    lines = [f"{'':<18}{'distance from float64':>44}"]
    titles = f"{'logits was':>11}{'now':>11}{'gradients was':>15}{'now':>11}"
    lines += [f"{'model':<7}{'dtype':<11}{titles}  swapped"]
    for each in compared:
        counts = Counter((place.was, place.now) for place in each.swapped.swapped)
        what = ", ".join(f"{count} {was} -> {now}" for (was, now), count in counts.items())
        what += f", {len(each.swapped.left)} left" if each.swapped.left else ""
        figures = f"{each.logits_was:>11.2e}{each.logits_now:>11.2e}"
        figures += f"{each.gradients_was:>15.2e}{each.gradients_now:>11.2e}"
        what += "" if each.ok else "  FURTHER THAN CHANCE"
        lines.append(f"{each.family:<7}{each.dtype:<11}{figures}  {what}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[Compared]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    on_gpu = torch.cuda.is_available()
    add, shown = parser.add_argument, "default: %(default)s"
    add("--families", default=",".join(FAMILIES), help=shown)
    add("--size", choices=SIZES, default="realistic" if on_gpu else "tiny", help=shown)
    add("--dtypes", default="float32,bfloat16", help=shown)
    add("--device", default="cuda" if on_gpu else "cpu", help=shown)
    given = parser.parse_args(arguments)
    compared = []
    for family in given.families.split(","):
        if family not in FAMILIES:
            parser.error(f"--families has {family}; expected some of {', '.join(FAMILIES)}")
        for dtype in given.dtypes.split(","):
            try:
                compared.append(compare(family, given.size, dtype, given.device))
            except (ImportError, AttributeError) as error:  # an old transformers
                print(f"{family} is left out: {error}")
                break
    print(table(compared))
    return compared


if __name__ == "__main__":
    raise SystemExit(not all(each.ok for each in main()))
