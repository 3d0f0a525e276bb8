"""Trains a GPT with torch's norms and with cupynorm's, and compares the losses.

    python notebooks/train_gpt.py [--steps 200] [--layers 12] [--width 768] [--batch 64]
                                  [--context 512] [--device cuda]
                                  [--runs RUN,..] [--json FILE]

All runs have the same initial weights and the same batches. The text is the source code of Python's
standard library, and a token is a byte. Weights are float32. A GPU computes under autocast to
bfloat16, a CPU in float32.

Rounding differs between the norms, and training amplifies the difference. So two loss curves never
agree exactly. The run float64 shows how much divergence rounding alone explains: its norms are
torch's, computed in float64 and rounded once. cupynorm must not diverge much more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional

import cupynorm

RUNS = ("torch", "float64", "cupynorm")
NUM_TOKENS = 256
NUM_BYTES = 4_000_000  # of text
FIRST = 10  # steps that are not timed, because they warm up


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = max(1, width // 64)
        self.attention_norm, self.mlp_norm = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attention_in = torch.nn.Linear(width, 3 * width)
        self.attention_out = torch.nn.Linear(width, width)
        self.mlp_in = torch.nn.Linear(width, 4 * width)
        self.mlp_out = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        heads = (
            self.attention_in(self.attention_norm(x))
            .view(batch, context, 3, self.num_heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        attended = functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, context, width))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))


class Gpt(torch.nn.Module):
    def __init__(
        self, num_layers: int, width: int, context: int, num_tokens: int = NUM_TOKENS
    ) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(num_tokens, width)
        self.positions = torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(num_layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, num_tokens, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # As in GPT-2: layers that add to the residual start smaller in deeper models.
                is_added = name.endswith(("attention_out.weight", "mlp_out.weight"))
                torch.nn.init.normal_(
                    parameter, std=0.02 / (2 * num_layers) ** 0.5 if is_added else 0.02
                )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def like_torch(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """y in the dtype that torch's norm of x returns: float32 under autocast."""
    return y.to(torch.float32 if torch.is_autocast_enabled() else x.dtype)


class LayerNormInFloat64(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (
            each if each is None else each.double() for each in (self.weight, self.bias)
        )
        y = functional.layer_norm(x.double(), self.normalized_shape, weight, bias, self.eps)
        return like_torch(y, x)


class RMSNormInFloat64(torch.nn.RMSNorm):
    """eps must be a number: torch's default depends on the dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = None if self.weight is None else self.weight.double()
        y = functional.rms_norm(x.double(), self.normalized_shape, weight, self.eps)
        return like_torch(y, x)


def norms_in_float64(model: torch.nn.Module) -> None:
    """Computes torch's norms in the model in float64 from now on, and rounds once."""
    classes = {torch.nn.LayerNorm: LayerNormInFloat64, torch.nn.RMSNorm: RMSNormInFloat64}
    for module in model.modules():
        module.__class__ = classes.get(type(module), type(module))


def read_text() -> torch.Tensor:
    """The source code of the standard library, one token for each byte."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) > NUM_BYTES:
            break
    return torch.frombuffer(text[:NUM_BYTES], dtype=torch.uint8).long()


class Trained(NamedTuple):
    """The loss of each step, in nats per byte, and its time."""

    losses: list[float]
    milliseconds: list[float]


def train(run: str, text: torch.Tensor, given: argparse.Namespace) -> Trained:
    """Trains one of RUNS. Runs with equal options have the same first weights and batches."""
    torch.manual_seed(0)
    model = Gpt(given.layers, given.width, given.context)
    if run == "float64":
        norms_in_float64(model)
    if run == "cupynorm":
        swapped = cupynorm.swap_norms(model)
        if len(swapped.swapped) != 2 * given.layers + 1:
            raise RuntimeError(f"not all norms were swapped:\n{swapped}")
    model.to(given.device)
    on_gpu = torch.device(given.device).type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    autocast = torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext()
    generator = torch.Generator().manual_seed(0)
    losses, milliseconds = [], []
    for _ in range(given.steps):
        last = len(text) - given.context - 1
        starts = torch.randint(last, (given.batch, 1), generator=generator)
        tokens = text[starts + torch.arange(given.context + 1)].to(given.device)
        start = time.perf_counter()
        with autocast:
            scores = model(tokens[:, :-1])
        loss = functional.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        if on_gpu:
            torch.cuda.synchronize()
        milliseconds.append(1e3 * (time.perf_counter() - start))
        schedule.step()
    return Trained(losses, milliseconds)


def largest_gap(one: Trained, other: Trained) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, other.losses))


def table(trained: dict[str, Trained]) -> str:
    titles = f"{'run':<18} {'first loss':>10} {'last loss':>10}"
    lines = [f"{titles} {'largest gap to torch':>21} {'median step, ms':>16}"]
    for run, each in trained.items():
        compares = run != "torch" and "torch" in trained
        gap = f"{largest_gap(each, trained['torch']):.2e}" if compares else "-"
        timed = each.milliseconds[FIRST:] or each.milliseconds
        losses = f"{run:<18} {each.losses[0]:>10.4f} {each.losses[-1]:>10.4f}"
        lines.append(f"{losses} {gap:>21} {statistics.median(timed):>16.2f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> dict[str, Trained]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = {"steps": 200, "layers": 12, "width": 768, "batch": 64, "context": 512}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="default: %(default)s")
    parser.add_argument("--runs", default=",".join(RUNS), help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="writes all losses and times there")
    given = parser.parse_args(arguments)
    runs = given.runs.split(",")
    for run in runs:
        if run not in RUNS:
            parser.error(f"--runs has {run}; expected some of {', '.join(RUNS)}")
    if given.width % max(1, given.width // 64):
        parser.error(f"--width is {given.width}; expected a multiple of 64, or less than 128")
    text, trained = read_text(), {}
    for run in runs:
        start = time.perf_counter()
        trained[run] = train(run, text, given)
        print(f"{run}: {given.steps} steps in {time.perf_counter() - start:.1f} s", flush=True)
    print(f"\n{table(trained)}")
    if given.json:
        on_gpu = torch.device(given.device).type == "cuda"
        content = {
            "device": torch.cuda.get_device_name(given.device) if on_gpu else "CPU",
            "torch": torch.__version__,
            "cupynorm": cupynorm.__version__,
            "settings": {name: getattr(given, name) for name in (*sizes, "device")},
            "runs": {run: each._asdict() for run, each in trained.items()},
        }
        given.json.write_text(json.dumps(content))
    return trained


if __name__ == "__main__":
    main()
