"""Shapes of the norms of known models, for `bench --models`."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """A norm of a model: its width, and the numbers of rows that it normalises at once.

    residual: adds a residual, also without the option --residual.
    """

    norm: str
    num_cols: int
    num_rows: tuple[int, ...]
    residual: bool = False


# 128 sequences that are one token longer each; a short and a long batch in training.
_TOKENS = (128, 4096, 16384)
_FEW = (1, 16, 64, 256, 1024, 4096)
MODELS = {
    # Brown and others 2020, table 2.1: d_model of GPT-3 175B.
    "gpt3": (Shape("layer_norm", 12288, _TOKENS),),
    # Llama team 2024, "The Llama 3 herd of models", table 3: model dimension.
    "llama3-8b": (Shape("rms_norm", 4096, _TOKENS),),
    "llama3-70b": (Shape("rms_norm", 8192, _TOKENS),),
    "llama3-405b": (Shape("rms_norm", 16384, _TOKENS),),
    # Jiang and others 2024, "Mixtral of experts", table 1: dim of 8x7B.
    "mixtral": (Shape("rms_norm", 4096, (8192,)),),
    # Qwen3-32B, its config.json: hidden_size 5120; q and k are normalised by head, 64 + 8 heads of
    # head_dim 128.
    "qwen3": (Shape("rms_norm", 5120, _TOKENS), Shape("rms_norm", 128, (128 * 72, 4096 * 72))),
    # DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 4.2: hidden dimension; query and
    # key-value compression.
    "deepseek-v3": (
        Shape("rms_norm", 7168, _TOKENS),
        Shape("rms_norm", 1536, (4096,)),
        Shape("rms_norm", 512, (4096,)),
    ),
    # Dosovitskiy and others 2021, table 1: hidden size of ViT-L and ViT-H; 256 images of 196
    # patches and a class token.
    "vit": (Shape("layer_norm", 1024, (256 * 197,)), Shape("layer_norm", 1280, (256 * 197,))),
    # Devlin and others 2019, section 3: H of BERT-base and BERT-large; 32 sequences of 512 tokens.
    "bert": (Shape("layer_norm", 768, (32 * 512,)), Shape("layer_norm", 1024, (32 * 512,))),
    # Eleven shapes on which eight libraries were compared: launches and caches matter here.
    "mix": (
        Shape("rms_norm", 4096, (16384, 2048)),
        Shape("rms_norm", 8192, (8192,)),
        Shape("rms_norm", 16384, (4096,)),
        Shape("rms_norm", 128, (131072, 8192)),
        Shape("rms_norm", 2048, (4096,)),
        Shape("layer_norm", 1024, (4096, 49152)),
        Shape("layer_norm", 4096, (16384,)),
        Shape("layer_norm", 8192, (4096,)),
    ),
    # Few rows, as in decoding and small batches. A launch and the latency of memory decide here.
    "few": tuple(
        Shape(norm, num_cols, _FEW, residual)
        for norm in ("layer_norm", "rms_norm")
        for residual in (False, True)
        for num_cols in (64, 128, 1024, 2880, 4096, 8192, 12288, 16384)
    ),
}
