"""A GPT in plain PyTorch, as one would write it today: the yardstick beside which megatron-core is measured.

It follows nanoGPT (github.com/karpathy/nanoGPT), with Llama's choices where the recipe makes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from llmrecipes.recipe.schema import Model

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": F.gelu, "silu": F.silu}


class PlainGPT(nn.Module):
    """Decoder-only transformer of a recipe's shape; `forward` gives the mean loss.

    Args:
        model: the recipe's model section. Dropout and scaled rotary embeddings are not built.
        vocab_size: rows of the embedding.
    """

    def __init__(self, model: Model, vocab_size: int) -> None:
        super().__init__()
        width, bias = model.hidden_size, model.add_bias_linear
        learned = model.position_embedding_type == "learned_absolute"
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(model.seq_length, width) if learned else None
        self.layers = nn.ModuleList(_Layer(model) for _ in range(model.num_layers))
        self.norm = _norm(model)
        self.output = nn.Linear(width, vocab_size, bias=False)
        if model.share_embeddings_and_output_weights:
            self.output.weight = self.tokens.weight
        rotary = None if learned else _rotary(model)
        self.register_buffer("rotary", rotary, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = math.sqrt(2.0 * model.num_layers) if name.endswith(("project.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=model.init_method_std / scale)
            elif bias and name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy; `tokens` and `labels` are [b, s]."""
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x, self.rotary)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), labels.reshape(-1))


class _Layer(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        width, bias = model.hidden_size, model.add_bias_linear
        ffn = model.ffn_hidden_size or 4 * width
        self.heads, self.gated = model.num_attention_heads, model.gated_linear_unit
        self.activation: Callable[[torch.Tensor], torch.Tensor] = ACTIVATIONS[model.activation_func]
        self.norm_attention, self.norm_mlp = _norm(model), _norm(model)
        self.groups = model.num_query_groups or self.heads
        self.channels = model.kv_channels or width // self.heads
        inner = self.heads * self.channels
        self.qkv = nn.Linear(width, inner + 2 * self.groups * self.channels, bias=bias)
        self.project = nn.Linear(inner, width, bias=bias)
        self.up = nn.Linear(width, ffn * (2 if self.gated else 1), bias=bias)
        self.down = nn.Linear(ffn, width, bias=bias)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor | None) -> torch.Tensor:
        x = x + self._attend(self.norm_attention(x), rotary)
        hidden = self.up(self.norm_mlp(x))
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            return x + self.down(self.activation(gate) * hidden)
        return x + self.down(self.activation(hidden))

    def _attend(self, x: torch.Tensor, rotary: torch.Tensor | None) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, self.channels).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.groups, self.groups], dim=1)
        if rotary is not None:
            q, k = _rotate(q, rotary), _rotate(k, rotary)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups < self.heads)
        return self.project(out.transpose(1, 2).reshape(batch, length, -1))


def _norm(model: Model) -> nn.Module:
    kind = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}[model.normalization]
    return kind(model.hidden_size, eps=model.layernorm_epsilon)


def _rotary(model: Model) -> torch.Tensor:
    """Cosines and sines, [2, s, channels of a head]."""
    channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    frequencies = model.rotary_base ** (-torch.arange(0, channels, 2) / channels)
    angles = torch.outer(torch.arange(model.seq_length), frequencies).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def _rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = rotary.to(x.dtype)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
