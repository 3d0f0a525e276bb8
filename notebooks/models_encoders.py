"""BERT, ViT and a block of DiT, for models.py: written plainly, with torch's norms.

A model has `blocks`, which torch.compile compiles one by one, `batch`, which makes random inputs
and a target, and `loss`. There is no dropout, so that all variants compute the same.
"""

from __future__ import annotations

import torch
from models_decoders import Batch, distance_loss, token_loss
from torch.nn import functional


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
    return torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width),
        torch.nn.GELU(approximate),
        torch.nn.Linear(4 * width, width),
    )


class BertBlock(torch.nn.Module):
    """A layer of BERT: the norms are after the sums."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, num_heads), mlp(width)
        self.attention_norm = torch.nn.LayerNorm(width, eps=1e-12)
        self.mlp_norm = torch.nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
        self.blocks = torch.nn.ModuleList(BertBlock(width, num_heads) for _ in range(num_layers))
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


class VitBlock(torch.nn.Module):
    """A layer of ViT: the norms are before attention and MLP."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, num_heads), mlp(width)
        self.attention_norm = torch.nn.LayerNorm(width, eps=1e-6)
        self.mlp_norm = torch.nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Vit(torch.nn.Module):
    """ViT (Dosovitskiy and others 2021): patches and a class token, which is classified."""

    loss = staticmethod(token_loss)

    def __init__(
        self,
        num_layers: int,
        width: int,
        num_heads: int,
        *,
        image_size: int,
        patch_size: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.image_size = image_size
        self.patches = torch.nn.Conv2d(3, width, patch_size, patch_size)
        self.class_token = torch.nn.Parameter(torch.zeros(1, 1, width))
        num_patches = (image_size // patch_size) ** 2
        self.positions = torch.nn.Parameter(torch.zeros(1, 1 + num_patches, width))
        self.blocks = torch.nn.ModuleList(VitBlock(width, num_heads) for _ in range(num_layers))
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
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (
            self.modulation(condition).unsqueeze(1).chunk(6, -1)
        )
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
        shapes = (
            (size, self.num_tokens, self.width),
            (size, self.width),
            (size, self.num_tokens, self.width),
        )
        x, condition, target = (
            torch.randn(shape, generator=generator, device=generator.device) for shape in shapes
        )
        return (x.requires_grad_(), condition.requires_grad_()), target
