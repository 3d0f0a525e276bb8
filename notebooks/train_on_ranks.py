"""Trains a small GPT on several GPUs, or on several CPU processes: tensor and sequence parallel.

    torchrun --nproc-per-node 2 notebooks/train_on_ranks.py [STEPS]

Each rank has some heads of the attention, some neurons of the MLP, and some positions of the
text between them. The losses are the same for 1, 2 and 4 ranks. With plain python it has one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

import cupynorm

TEXT = Path(__file__).parents[1] / "LICENSE"
LENGTH, BATCH, WIDTH, HEADS, LAYERS = 32, 8, 64, 4, 2
LEARNING_RATE = 0.1


class Block(nn.Module):
    """Attention and MLP, each with a norm before its first and before its second linear layer."""

    def __init__(self, group, device: torch.device) -> None:
        super().__init__()
        self.size = size = group.size()
        rank = distributed.get_rank(group)

        def make(mode: str, num_in: int, num_out: int, **options) -> cupynorm.LayerNormLinear:
            def initialise(weight: Tensor) -> None:
                """This rank's part of a weight that all ranks draw alike."""
                dim, shape = weight.partition_dim, list(weight.shape)
                shape[dim] *= size
                whole = torch.empty(shape).normal_(0.0, shape[1] ** -0.5)
                weight.copy_(whole.chunk(size, dim)[rank])

            options |= {"tp_group": group, "parallel_mode": mode, "init_method": initialise}
            options |= {"sequence_parallel": True, "reduce_norm_gradients": True}
            return cupynorm.LayerNormLinear(num_in, num_out, device=device, **options)

        self.qkv = make("column", WIDTH, 3 * WIDTH, parameters_split=("q", "k", "v"))
        self.out = make("row", WIDTH, WIDTH)
        self.up = make("column", WIDTH, 4 * WIDTH)
        self.down = make("row", 4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: [this rank's positions, BATCH, WIDTH]."""
        q, k, v = (
            each.unflatten(2, (HEADS // self.size, -1)).permute(1, 2, 0, 3)
            for each in self.qkv(x).chunk(3, 2)  # all positions, this rank's heads
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.permute(2, 0, 1, 3).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class GPT(nn.Module):
    """What is not in the blocks is whole on each rank, and used for this rank's positions."""

    def __init__(self, num_letters: int, group, device: torch.device) -> None:
        super().__init__()
        self.letters = nn.Embedding(num_letters, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.norm = cupynorm.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_letters)
        self.shared = [*self.parameters()]
        self.to(device)
        self.blocks = nn.Sequential(*(Block(group, device) for _ in range(LAYERS)))

    def forward(self, letters: Tensor, positions: Tensor) -> Tensor:
        x = self.letters(letters) + self.positions(positions)[:, None]
        return self.head(self.norm(self.blocks(x)))


def train(steps: int, group, device: torch.device) -> list[float]:
    """The mean cross-entropy of each step, in nats."""
    size, rank = group.size(), distributed.get_rank(group)
    torch.manual_seed(0)  # the same on all ranks, which so draw the same weights and samples
    text = torch.tensor(list(TEXT.read_bytes()))
    letters, text = text.unique(return_inverse=True)
    model = GPT(len(letters), group, device)
    positions = torch.arange(LENGTH).chunk(size)[rank]
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,))
        seen = (starts + positions[:, None]).to(device)
        seen, following = text.to(device)[seen], text.to(device)[seen + 1]
        logits = model(seen, positions.to(device))
        loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
        loss = loss / (LENGTH * BATCH)
        model.zero_grad()
        loss.backward()
        for parameter in model.shared:
            distributed.all_reduce(parameter.grad, group=group)
        # Stochastic gradient descent. torch.optim, first imported here, would keep the group alive:
        # its threads, at work when Python ends, can abort the process.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LEARNING_RATE * parameter.grad
        loss = loss.detach()
        distributed.all_reduce(loss, group=group)
        losses.append(loss.item())
    return losses


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpus else "cpu"
    if on_gpus:
        torch.cuda.set_device(device)
    store = {} if "RANK" in os.environ else {"store": distributed.HashStore()}
    backend = "nccl" if on_gpus else "gloo"
    distributed.init_process_group(backend, rank=rank, world_size=size, **store)
    losses = train(steps, distributed.group.WORLD, torch.device(device))
    if rank == 0:
        print(f"{size} ranks:", *(f"{loss:.4f}" for loss in losses))
    distributed.barrier()  # a rank that leaves first can break the end of another
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
