"""Transformer-L, the language model of the paper, as a chain of L + 2 layers.

::

    tokens ── embedding ── block × L ── output ── logits
    (N, T)    (N, T, d)    (N, T, d)    (N, T, vocab)

It is causal: the logits at position t see the tokens up to t, and are to predict token t + 1.

Sources: Vaswani et al., *Attention Is All You Need*, arXiv 1706.03762, for the layers; Huang et al., *GPipe*,
arXiv 1811.06965, for the sizes. What the latter leaves open is chosen so that the parameters are as many as
it prints: embedding and output weights are two matrices, no LayerNorm follows the last block, and positions
are sinusoids, not learnt. LayerNorm stands before attention and before feed-forward (pre-norm).
"""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


def transformer(
    num_layers: int,
    vocab_size: int = 32_000,
    d_model: int = 2048,
    num_heads: int = 32,
    d_ff: int = 8192,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Build Transformer-L, by default in the paper's sizes.

    >>> with torch.device("meta"):
    ...     model = transformer(num_layers=3)
    >>> len(model), sum(p.numel() for p in model.parameters())
    (5, 282178816)

    Args:
        num_layers: L, the number of blocks.
        vocab_size: the number of different tokens.
        d_model: d, the width of what passes from layer to layer.
        num_heads: of the attention; divides d.
        d_ff: width inside the feed-forward layers.
        dropout: probability with which a number is dropped after the embedding, and from what attention and
            feed-forward layers add. Attention weights are never dropped.

    Returns:
        L + 2 layers, named "0", "1" and so on. They take tokens below ``vocab_size``, int64 of shape (N, T)
        for any T, and give logits of shape (N, T, vocab_size).

    Raises:
        ValueError: if a number is out of range, or d cannot be split into the heads.
    """
    sizes = {"num_layers": num_layers, "vocab_size": vocab_size, "d_model": d_model}
    for name, size in {**sizes, "num_heads": num_heads, "d_ff": d_ff}.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is a whole number, 1 or more, not {size!r}")
    if d_model % num_heads:
        heads = max(n for n in range(1, num_heads) if d_model % n == 0)
        raise ValueError(
            f"d_model {d_model} cannot be split into {num_heads} equal heads: take {heads} heads, "
            f"or a d_model of {math.ceil(d_model / num_heads) * num_heads}"
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout is a probability from 0 to below 1, not {dropout!r}")
    return nn.Sequential(
        Embedding(vocab_size, d_model, dropout),
        *(Block(d_model, num_heads, d_ff, dropout) for _ in range(num_layers)),
        nn.Linear(d_model, vocab_size),
    )


class Embedding(nn.Module):
    """Tokens to vectors, plus where they stand."""

    def __init__(self, vocab_size: int, d_model: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """From tokens of shape (N, T) to vectors of shape (N, T, d)."""
        x = self.tokens(tokens)
        _, length, d_model = x.shape
        return cast(Tensor, self.dropout(x + sinusoids(length, d_model, x.device).to(x.dtype)))


class Block(nn.Module):
    """What attention and a feed-forward layer see after LayerNorm, they add to their input."""

    def __init__(self, d_model: int, num_heads: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = CausalAttention(d_model, num_heads)
        self.attention_dropout = nn.Dropout(dropout)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.feed_forward = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.feed_forward_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """From shape (N, T, d) to the same."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        return x + cast(Tensor, self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(x))))


class CausalAttention(nn.Module):
    """Self-attention in which each position sees itself and the ones before it."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(d_model, 3 * d_model)
        self.output = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """From shape (N, T, d) to the same."""
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # (N, T, 3, heads, d / heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (N, heads, T, d / heads)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.output(seen.transpose(1, 2).flatten(2)))


def sinusoids(length: int, d_model: int, device: torch.device | None = None) -> Tensor:
    """Positions as sines and cosines of d/2 wavelengths, from 2π to nearly 10,000 · 2π.

    They are computed for each call and not kept: no length is too long, and the model has nothing to save but
    its parameters.

    Args:
        length: T.
        d_model: d.
        device: of the result.

    Returns:
        Shape (T, d), float32: sines in the even columns, cosines in the odd ones.
    """
    position = torch.arange(length, device=device, dtype=torch.float32)
    frequency = 10_000.0 ** (-torch.arange(0, d_model, 2, device=device, dtype=torch.float32) / d_model)
    angle = torch.outer(position, frequency)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :d_model]
