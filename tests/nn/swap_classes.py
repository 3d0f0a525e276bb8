"""Norms as other libraries write them, for the tests of swap_norms."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


class LlamaRMSNorm(torch.nn.Module):
    """The norm of Hugging Face's Llama, which rounds x_hat before the weight multiplies it."""

    def __init__(self, num_cols: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(num_cols))
        self.variance_epsilon = eps
        self.num_steps = 0  # not an eps, though its name ends in eps

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        return self.weight * self.normalized(hidden_states.float()).to(hidden_states.dtype)


class T5LayerNorm(LlamaRMSNorm):
    """An RMSNorm in spite of its name."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class GemmaRMSNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.normalized(x.float()) * (1.0 + self.weight.float())).type_as(x)


class CohereLayerNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (self.weight.float() * self.normalized(wide - wide.mean(-1, keepdim=True))).to(
            x.dtype
        )


class In16Bits(LlamaRMSNorm):
    """Each step is rounded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.normalized(x)


class ClipLayerNorm(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).type(x.dtype)


def foreign(name: str, module: str, **attributes) -> torch.nn.Module:
    """A module with the name of another library's. Its forward raises.

    TransformerEngine's have an extra state and a _load_from_state_dict of their own.
    """

    def forward(self, x):
        raise AssertionError("only CUDA")

    methods = {"forward": forward}
    if module.startswith("transformer_engine"):
        methods["_load_from_state_dict"] = lambda self, *arguments: None
        methods["set_extra_state"] = lambda self, state: None
    names = {"__module__": module, "__qualname__": name}
    made = type(name, (torch.nn.Module,), names | methods)()
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape))


class Gated(LlamaRMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if gate is None else x * torch.nn.functional.silu(gate))
