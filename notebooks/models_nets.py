"""Six models for models.py, written plainly, with torch's norms.

A model has `batch`, which makes random inputs and a target, and `loss`.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from train_gpt import Gpt

Batch = tuple[tuple[torch.Tensor, ...], torch.Tensor]  # inputs, target


def token_loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy in float32. scores: [.., num_tokens]. target: [..]."""
    return functional.cross_entropy(scores.float().flatten(0, -2), target.flatten())


def distance_loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared difference in float32, for layers without a head. Both have one shape."""
    return functional.mse_loss(y.float(), target.float())


class Gpt2(Gpt):
    """GPT-2 (Radford and others 2019): the GPT of train_gpt.py, whose head is the embedding."""

    loss = staticmethod(token_loss)

    def __init__(self, num_layers: int, width: int, context: int, num_tokens: int) -> None:
        super().__init__(num_layers, width, context, num_tokens)
        self.head.weight = self.tokens.weight

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Tokens of `size` sequences, and those that follow each."""
        num_tokens, _ = self.tokens.weight.shape
        context, _ = self.positions.weight.shape
        options = {"generator": generator, "device": generator.device}
        tokens = torch.randint(num_tokens, (size, context + 1), **options)
        return (tokens[:, :-1],), tokens[:, 1:]


class Rotary(torch.nn.Module):
    """Rotary position embedding (Su and others 2021), in halves as Llama's weights need it."""

    def __init__(self, context: int, head_dim: int, base: float) -> None:
        super().__init__()
        frequencies = base ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.arange(context).float()[:, None] * torch.cat([frequencies, frequencies])
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, num_heads, context, head_dim]."""
        first, second = x.chunk(2, -1)
        return x * self.cos.to(x.dtype) + torch.cat([-second, first], -1) * self.sin.to(x.dtype)


class GroupedAttention(torch.nn.Module):
    """Causal attention with fewer heads for keys and values. with_norms: of each q and k."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int,
        eps: float,
        with_norms: bool,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.queries = torch.nn.Linear(width, num_heads * head_dim, bias=False)
        self.keys = torch.nn.Linear(width, num_kv_heads * head_dim, bias=False)
        self.values = torch.nn.Linear(width, num_kv_heads * head_dim, bias=False)
        self.out = torch.nn.Linear(num_heads * head_dim, width, bias=False)
        self.query_norm = self.key_norm = torch.nn.Identity()
        if with_norms:
            self.query_norm = torch.nn.RMSNorm(head_dim, eps=eps)
            self.key_norm = torch.nn.RMSNorm(head_dim, eps=eps)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        batch, context, _ = x.shape
        queries = self.queries(x).view(batch, context, self.num_heads, self.head_dim)
        keys, values = (
            layer(x).view(batch, context, self.num_kv_heads, self.head_dim)
            for layer in (self.keys, self.values)
        )
        attended = functional.scaled_dot_product_attention(
            rotary(self.query_norm(queries).transpose(1, 2)),
            rotary(self.key_norm(keys).transpose(1, 2)),
            values.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return self.out(attended.transpose(1, 2).flatten(2))


class DecoderBlock(torch.nn.Module):
    """A layer of Llama or Qwen3: attention and a gated MLP, each after an RMSNorm."""

    def __init__(self, width: int, mlp_width: int, eps: float, **attention: int | bool) -> None:
        super().__init__()
        self.attention_norm = torch.nn.RMSNorm(width, eps=eps)
        self.attention = GroupedAttention(width, eps=eps, **attention)
        self.mlp_norm = torch.nn.RMSNorm(width, eps=eps)
        self.gate = torch.nn.Linear(width, mlp_width, bias=False)
        self.up = torch.nn.Linear(width, mlp_width, bias=False)
        self.down = torch.nn.Linear(mlp_width, width, bias=False)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        normalized = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(normalized)) * self.up(normalized))


class Decoder(torch.nn.Module):
    """Layers of Llama or Qwen3 and the last norm.

    There is no embedding and no head: beside so few layers they would take half of the step.
    """

    loss = staticmethod(distance_loss)

    def __init__(
        self, num_layers: int, width: int, context: int, *, base: float, **block: float
    ) -> None:
        super().__init__()
        self.context, self.width = context, width
        self.rotary = Rotary(context, block["head_dim"], base)
        blocks = (DecoderBlock(width, **block) for _ in range(num_layers))
        self.blocks = torch.nn.ModuleList(blocks)
        self.norm = torch.nn.RMSNorm(width, eps=block["eps"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.norm(x)

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Hidden states of `size` sequences, with a gradient as in the middle of a model."""
        shape, options = (size, self.context, self.width), {"device": generator.device}
        x, target = (torch.randn(shape, generator=generator, **options) for _ in range(2))
        return (x.requires_grad_(),), target


class Attention(torch.nn.Module):
    """Attention of all tokens to all."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.into = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, num_tokens, width = x.shape
        heads = self.into(x).view(batch, num_tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads.unbind())
        return self.out(attended.transpose(1, 2).reshape(batch, num_tokens, width))


def mlp(width: int, approximate: str = "none") -> torch.nn.Sequential:
    """Two linear layers, four times as wide between them, with GELU."""
    up, down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
    return torch.nn.Sequential(up, torch.nn.GELU(approximate), down)


class EncoderBlock(torch.nn.Module):
    """A layer of BERT, whose norms are after the sums, or of ViT: before attention and MLP."""

    def __init__(self, width: int, num_heads: int, *, eps: float, norm_first: bool) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, num_heads), mlp(width)
        self.norm_first = norm_first
        self.attention_norm, self.mlp_norm = (torch.nn.LayerNorm(width, eps=eps) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm_first:
            x = x + self.attention(self.attention_norm(x))
            return x + self.mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self.attention(x))
        return self.mlp_norm(x + self.mlp(x))


class Bert(torch.nn.Module):
    """BERT (Devlin and others 2019) with the head that predicts 15% of the tokens."""

    loss = staticmethod(token_loss)

    def __init__(
        self, num_layers: int, width: int, num_heads: int, *, context: int, num_tokens: int
    ) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(num_tokens, width)
        self.positions = torch.nn.Embedding(context, width)
        self.norm = torch.nn.LayerNorm(width, eps=1e-12)
        self.blocks = torch.nn.ModuleList(
            EncoderBlock(width, num_heads, eps=1e-12, norm_first=False) for _ in range(num_layers)
        )
        self.before_head = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width, eps=1e-12)
        )
        self.head = torch.nn.Linear(width, num_tokens)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.tokens(tokens) + self.positions.weight)
        for block in self.blocks:
            x = block(x)
        at = masked[..., None].expand(-1, -1, x.shape[-1])
        return self.head(self.before_head(x.gather(1, at)))

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Tokens of `size` sequences, the places that are masked, and the tokens there."""
        num_tokens, _ = self.tokens.weight.shape
        context, _ = self.positions.weight.shape
        options = {"generator": generator, "device": generator.device}
        tokens = torch.randint(num_tokens, (size, context), **options)
        masked = torch.rand(size, context, **options).argsort(1)[:, : context * 15 // 100]
        return (tokens, masked), torch.randint(num_tokens, masked.shape, **options)


class Vit(torch.nn.Module):
    """ViT (Dosovitskiy and others 2021): patches and a class token, which is classified."""

    loss = staticmethod(token_loss)

    def __init__(
        self, num_layers: int, width: int, num_heads: int, *, num_classes: int, **sizes: int
    ) -> None:
        super().__init__()
        self.image_size, patch_size = sizes["image_size"], sizes["patch_size"]
        self.patches = torch.nn.Conv2d(3, width, patch_size, patch_size)
        self.class_token = torch.nn.Parameter(torch.zeros(1, 1, width))
        num_patches = (self.image_size // patch_size) ** 2
        self.positions = torch.nn.Parameter(torch.zeros(1, 1 + num_patches, width))
        self.blocks = torch.nn.ModuleList(
            EncoderBlock(width, num_heads, eps=1e-6, norm_first=True) for _ in range(num_layers)
        )
        self.norm = torch.nn.LayerNorm(width, eps=1e-6)
        self.head = torch.nn.Linear(width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        class_token = self.class_token.to(patches.dtype).expand(len(images), -1, -1)
        x = torch.cat([class_token, patches], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """`size` images and their classes."""
        options = {"generator": generator, "device": generator.device}
        images = torch.randn(size, 3, self.image_size, self.image_size, **options)
        return (images,), torch.randint(self.head.out_features, (size,), **options)


class DitBlock(torch.nn.Module):
    """A layer of DiT (Peebles and Xie 2023), adaLN-Zero: shift, scale and gate of a condition."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, num_heads), mlp(width, "tanh")
        self.attention_norm = torch.nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp_norm = torch.nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.modulation = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        six = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        (shift, scale, gate), (mlp_shift, mlp_scale, mlp_gate) = six[:3], six[3:]
        x = x + gate * self.attention(self.attention_norm(x) * (1 + scale) + shift)
        return x + mlp_gate * self.mlp(self.mlp_norm(x) * (1 + mlp_scale) + mlp_shift)


class Dit(torch.nn.Module):
    """Blocks of DiT, without what turns an image into tokens and back."""

    loss = staticmethod(distance_loss)

    def __init__(self, num_layers: int, width: int, num_heads: int, *, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens, self.width = num_tokens, width
        self.blocks = torch.nn.ModuleList(DitBlock(width, num_heads) for _ in range(num_layers))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, condition)
        return x

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Tokens of `size` images and their conditions, with gradients as inside a model."""
        of_tokens, options = (size, self.num_tokens, self.width), {"device": generator.device}
        shapes = (of_tokens, (size, self.width), of_tokens)
        x, condition, target = (torch.randn(s, generator=generator, **options) for s in shapes)
        return (x.requires_grad_(), condition.requires_grad_()), target
