"""Small blocks with the norms of real models, written out as those models write them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Of four heads. head_norm: Qwen3's norm of each query and key."""

    def __init__(self, width: int, head_norm: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = (
            nn.Identity() if head_norm is None else head_norm(width // 4) for _ in range(2)
        )

    def forward(self, x):
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.num_heads, -1).unbind(2)
        q, k = rotate(self.q_norm(q)), rotate(self.k_norm(k))
        heads = (each.transpose(1, 2) for each in (q, k, v))
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))


def rotate(x):
    first, second = x.chunk(2, -1)
    return 0.5 * x + 0.25 * torch.cat([-second, first], -1)


class Mlp(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class GatedMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class HuggingFaceRMSNorm(nn.Module):
    """Llama's and Qwen3's: x_hat is rounded before the weight."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class GemmaRMSNorm(nn.Module):
    """Gemma's: 1 + weight in float32, and one rounding."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.zeros(width))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class WrittenLayerNorm(nn.Module):
    """The LayerNorm of torch operations, as in ConvNeXt and older transformers."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        u = x.mean(-1, keepdim=True)
        s = (x - u).pow(2).mean(-1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight * x + self.bias


class MambaNorm(nn.Module):
    """Mamba 2's: the input times silu(gate) is normalised."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, hidden_states, gate=None):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        if gate is not None:
            hidden_states = hidden_states * functional.silu(gate.to(torch.float32))
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class PreNorm(nn.Module):
    """GPT-2, ViT, Llama, Qwen3, Gemma: x + attention(norm(x)), x + mlp(norm(x))."""

    def __init__(self, width: int, norm: type[nn.Module], mlp: type[nn.Module] = Mlp, **options):
        super().__init__()
        self.attention, self.mlp = Attention(width, **options), mlp(width)
        self.attention_norm, self.mlp_norm = norm(width), norm(width)

    def forward(self, x):
        residual = x
        x = residual + self.attention(self.attention_norm(x))
        residual = x
        return residual + self.mlp(self.mlp_norm(x))


class PostNorm(nn.Module):
    """BERT: norm(x + attention(x)), norm(x + mlp(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width), Mlp(width)
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(width, eps=1e-12) for _ in range(2))

    def forward(self, x):
        x = self.attention_norm(self.attention(x) + x)
        return self.mlp_norm(self.mlp(x) + x)


class Dit(nn.Module):
    """DiT: adaLN-Zero, with shift, scale and gate of each sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width), Mlp(width)
        self.norm1, self.norm2 = (
            nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x):
        chunks = self.modulation(x.mean(1)).chunk(6, dim=1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = chunks
        x = x + gate.unsqueeze(1) * self.attention(modulate(self.norm1(x), shift, scale))
        return x + mlp_gate.unsqueeze(1) * self.mlp(modulate(self.norm2(x), mlp_shift, mlp_scale))


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Mamba(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.input, self.norm = nn.Linear(width, 2 * width), MambaNorm(width)
        self.output = nn.Linear(width, width)

    def forward(self, x):
        hidden, gate = self.input(x).chunk(2, -1)
        return x + self.output(self.norm(hidden, gate))


WIDTH = 32
# name -> (block, dtype of its parameters and input, autocast to bfloat16)
MODELS = {
    "gpt2": (lambda: PreNorm(WIDTH, nn.LayerNorm), torch.float32, True),
    "vit": (lambda: PreNorm(WIDTH, nn.LayerNorm), torch.float32, False),
    "bert": (lambda: PostNorm(WIDTH), torch.bfloat16, False),
    "bert_autocast": (lambda: PostNorm(WIDTH), torch.float32, True),
    "llama": (lambda: PreNorm(WIDTH, HuggingFaceRMSNorm, GatedMlp), torch.bfloat16, False),
    "qwen3": (
        lambda: PreNorm(WIDTH, HuggingFaceRMSNorm, GatedMlp, head_norm=HuggingFaceRMSNorm),
        torch.bfloat16,
        False,
    ),
    "gemma": (lambda: PreNorm(WIDTH, GemmaRMSNorm, GatedMlp), torch.bfloat16, False),
    "written": (lambda: PreNorm(WIDTH, WrittenLayerNorm), torch.float32, False),
    "dit": (lambda: Dit(WIDTH), torch.float32, False),
    "mamba": (lambda: Mamba(WIDTH), torch.bfloat16, False),
}


def model_and_input(name: str) -> tuple[nn.Module, torch.Tensor, bool]:
    """A block with random parameters, its input [2, 5, WIDTH], and whether it is autocast."""
    make, dtype, autocast = MODELS[name]
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype), torch.randn(2, 5, WIDTH, dtype=dtype), autocast
