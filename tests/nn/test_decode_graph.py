"""A decode step of a swapped model in a CUDA graph, as docs/calls.md captures it."""

from __future__ import annotations

import copy
import re

import pytest
from repository_files import REPOSITORY

import cupynorm

torch = pytest.importorskip("torch")

BATCH, WIDTH, VOCABULARY, LONGEST = 2, 256, 97, 8


class Decoder(torch.nn.Module):
    """One token of each sequence in, logits of the next one out, by a cache of fixed shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.last = torch.nn.LayerNorm(WIDTH), torch.nn.RMSNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("rows", torch.zeros(LONGEST, BATCH, WIDTH))

    def forward(self, token, position):
        x = self.embedding(token)
        self.rows.index_copy_(0, position, self.first(x)[None])
        seen = torch.arange(LONGEST, device=x.device) <= position
        return self.head(self.last(x + (self.rows * seen[:, None, None]).sum(0)))


def decoder(device: str, dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    return Decoder().to(device, dtype).eval()


def decoded(model: Decoder, prompt: torch.Tensor) -> list[torch.Tensor]:
    """The logits after each token, by eager steps."""
    steps = enumerate(prompt)
    with torch.no_grad():
        return [model(token, torch.tensor([at], device=token.device)) for at, token in steps]


def recipe() -> str:
    text = (REPOSITORY / "docs" / "calls.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- decode -->\n```python\n(.*?)```\n<!-- /decode -->", text, re.DOTALL)
    return code


def test_a_swapped_decoder_decodes_as_before():
    """Also shows that the logits depend on the cache, so that the test of the graph sees it."""
    model = decoder("cpu", torch.float64)
    prompt = torch.arange(3 * BATCH).reshape(3, BATCH)
    before = decoded(copy.deepcopy(model), prompt)
    alone = decoded(copy.deepcopy(model), prompt[-1:])
    assert len(cupynorm.swap_norms(model).swapped) == 2
    for one, other in zip(decoded(model, prompt), before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert (alone[0] - before[-1]).abs().max() > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_recipe_of_the_documents_decodes(dtype):
    """Replays give the bits of eager steps, for other tokens and for parameters changed in place.

    A replay allocates nothing.
    """
    model = decoder("cuda", dtype)
    prompt = torch.arange(6 * BATCH, device="cuda").reshape(6, BATCH)
    token, position = prompt[0].clone(), torch.zeros(1, dtype=torch.int64, device="cuda")
    names = {"cupynorm": cupynorm, "torch": torch, "model": model}
    names |= {"prompt": prompt, "token": token, "position": position}
    exec(recipe(), names)
    graph, logits = names["graph"], names["logits"]
    assert torch.equal(logits, decoded(copy.deepcopy(model), prompt)[-1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    right = decoded(copy.deepcopy(model), prompt.flip(0))
    for at, (next_token, expected) in enumerate(zip(prompt.flip(0), right, strict=True)):
        token.copy_(next_token)
        position.fill_(at)
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
        assert torch.equal(logits, expected) and expected.isfinite().all(), at
    assert not torch.equal(right[-1], right[0])
