"""Parts of the transformer: norms, attention to the cache and to the prompt, the block, the head.

Precision follows the reference: Linears run in the compute dtype, the residual stream is float32 from the first gate
on, modulation, gates and head are float32 throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention
from .dit_config import DiTConfig
from .kv_cache import KVCache
from .pieces import Pieces, layer_norm, rms_norm
from .rope import Rope


@dataclass(frozen=True)
class CrossKV:
    """Keys and values of a prompt for every layer: [text_len, heads, head_dim] each."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (*self.keys, *self.values))


@dataclass(frozen=True)
class CameraModulation:
    """What a chunk's camera does to every block: x -> scale * x + shift. Both [tokens, dim] per layer."""

    scales: tuple[Tensor, ...]
    shifts: tuple[Tensor, ...]


@dataclass(frozen=True)
class TimeModulation:
    """Time embedding of one timestep in float32. embedding: [1, dim]; rows: [6, dim]."""

    embedding: Tensor
    rows: Tensor


@dataclass(frozen=True)
class ChunkContext:
    """Everything that all forwards of one chunk and one branch share.

    condition: [in_dim - out_dim, frames, h, w] = mask and image latents. first_frame: absolute latent frame.
    """

    first_frame: int
    condition: Tensor
    camera: CameraModulation
    rope: Rope
    cross: CrossKV
    cache: KVCache


class RMSNorm(nn.Module):
    """RMS norm over the last dimension: float32 statistics, result in the dtype of x, then the weight."""

    def __init__(self, dim: int, eps: float, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim]."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm with float32 statistics, result in the dtype of x. Without affine parameters unless asked for."""

    def __init__(self, dim: int, eps: float, *, affine: bool = False, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.dim, self.eps, self.affine = dim, eps, affine
        if affine:
            self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
            self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim]."""
        weight = self.weight.to(x.device, torch.float32) if self.affine else None
        bias = self.bias.to(x.device, torch.float32) if self.affine else None
        return layer_norm(x, self.eps, weight, bias)


class AttentionLayers(nn.Module):
    """The projections that both kinds of attention are made of; queries and keys are normalised over the full width."""

    def __init__(self, config: DiTConfig, operations: Any, factory: dict[str, Any]) -> None:
        super().__init__()
        dim = config.dim
        self.heads, self.head_dim = config.num_heads, config.head_dim
        self.q = operations.Linear(dim, dim, **factory)
        self.k = operations.Linear(dim, dim, **factory)
        self.v = operations.Linear(dim, dim, **factory)
        self.o = operations.Linear(dim, dim, **factory)
        self.norm_q = RMSNorm(dim, config.eps, **factory)
        self.norm_k = RMSNorm(dim, config.eps, **factory)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim))


@dataclass(frozen=True)
class _Joined:
    """One weight and bias whose parts are those of q, k and v; places: where the parts lay when they were joined."""

    weight: Tensor
    bias: Tensor
    places: tuple[int, ...]


class SelfAttention(AttentionLayers):
    """Attention of a chunk to itself and to everything in the cache."""

    _joined: _Joined | None = None

    def join(self) -> None:
        """Lays the weights of q, k and v behind each other, so that one matrix product gives all three.

        They keep their names and values. Weights that are moved or replaced later are used one by one again.
        """
        layers = (self.q, self.k, self.v)
        if any(type(layer) is not nn.Linear for layer in layers):
            return
        weight = torch.cat([layer.weight.detach() for layer in layers])
        bias = torch.cat([layer.bias.detach() for layer in layers])
        for layer, part, offset in zip(layers, weight.chunk(3), bias.chunk(3), strict=True):
            layer.weight, layer.bias = (nn.Parameter(t, requires_grad=False) for t in (part, offset))
        self._joined = _Joined(weight, bias, self._places())

    def _places(self) -> tuple[int, ...]:
        return tuple(t.data_ptr() for layer in (self.q, self.k, self.v) for t in (layer.weight, layer.bias))

    def remember(self, x: Tensor, layer: int, context: ChunkContext, pieces: Pieces) -> None:
        """Writes the chunk's keys (rotated) and values into the cache. x: [tokens, dim]."""
        self._write(self.k(x), self.v(x), layer, context, pieces)

    def forward(self, x: Tensor, layer: int, context: ChunkContext, attention: Attention, pieces: Pieces) -> Tensor:
        """x: [tokens, dim] in the compute dtype; returns the same shape and dtype."""
        queries, keys, values = self._project(x)
        self._write(keys, values, layer, context, pieces)
        query = pieces.heads(queries, self.norm_q.weight, self.norm_q.eps, context.rope, self.heads, None)
        seen, shown = context.cache.view(layer)
        return self.o(attention(query, seen.to(query.dtype), shown.to(query.dtype)).flatten(1))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        joined = self._joined
        if joined is None or joined.places != self._places():
            return self.q(x), self.k(x), self.v(x)
        queries, keys, values = F.linear(x, joined.weight, joined.bias).chunk(3, dim=-1)
        return queries, keys, values

    def _write(self, keys: Tensor, values: Tensor, layer: int, context: ChunkContext, pieces: Pieces) -> None:
        norm, first = self.norm_k, 0
        for key_slots, value_slots in context.cache.places(layer):
            rows = slice(first, first + len(key_slots))
            rope = Rope(context.rope.cos[rows], context.rope.sin[rows])
            pieces.heads(keys[rows], norm.weight, norm.eps, rope, self.heads, key_slots)
            value_slots.copy_(self._split(values[rows]))
            first = rows.stop


class CrossAttention(AttentionLayers):
    """Attention of a chunk to the prompt."""

    def encode(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """text: [text_len, dim] embedded prompt. Returns keys and values [text_len, heads, head_dim]."""
        return self._split(self.norm_k(self.k(text))), self._split(self.v(text))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, attention: Attention, pieces: Pieces) -> Tensor:
        """x: [tokens, dim] in the compute dtype; returns the same shape and dtype."""
        query = pieces.heads(self.q(x), self.norm_q.weight, self.norm_q.eps, None, self.heads, None)
        return self.o(attention(query, keys, values).flatten(1))


class Block(nn.Module):
    """Self-attention, camera, cross-attention, feed-forward, in this order."""

    def __init__(self, config: DiTConfig, operations: Any, factory: dict[str, Any], compute_dtype: torch.dtype) -> None:
        super().__init__()
        dim = config.dim
        self.compute_dtype = compute_dtype
        self.norm1 = LayerNorm(dim, config.eps)
        self.self_attn = SelfAttention(config, operations, factory)
        self.norm3 = LayerNorm(dim, config.eps, affine=True, **factory)
        self.cross_attn = CrossAttention(config, operations, factory)
        self.norm2 = LayerNorm(dim, config.eps)
        self.ffn = nn.Sequential(
            operations.Linear(dim, config.ffn_dim, **factory),
            nn.GELU(approximate="tanh"),
            operations.Linear(config.ffn_dim, dim, **factory),
        )
        self.modulation = nn.Parameter(torch.empty(1, 6, dim, **factory))
        self.cam_injector_layer1 = operations.Linear(dim, dim, **factory)
        self.cam_injector_layer2 = operations.Linear(dim, dim, **factory)
        self.cam_scale_layer = operations.Linear(dim, dim, **factory)
        self.cam_shift_layer = operations.Linear(dim, dim, **factory)

    def camera(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """embedding: [tokens, dim]. Returns (1 + scale, shift) of this block; the sum is rounded as in the source."""
        hidden = self.cam_injector_layer2(F.silu(self.cam_injector_layer1(embedding))) + embedding
        return 1.0 + self.cam_scale_layer(hidden), self.cam_shift_layer(hidden)

    def modulate(self, time: TimeModulation) -> tuple[Tensor, ...]:
        """Six float32 rows [1, dim]: shift, scale, gate of self-attention, then of the feed-forward."""
        rows = self.modulation[0].to(time.rows.device, torch.float32) + time.rows
        return rows.split(1)

    def forward(
        self, x: Tensor, time: TimeModulation, layer: int, context: ChunkContext, attn: Attention, pieces: Pieces
    ) -> Tensor:
        """x: [tokens, dim] residual (float32 after the first block), which is used up. Returns the new one, float32."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulate(time)
        dtype, eps = self.compute_dtype, self.norm1.eps
        y = self.self_attn(pieces.modulated(x, shift1, scale1, eps, dtype), layer, context, attn, pieces)
        camera = context.camera.scales[layer], context.camera.shifts[layer]
        x, query = pieces.camera(x, y, gate1, camera, self.norm3, dtype)
        y = self.cross_attn(query, context.cross.keys[layer], context.cross.values[layer], attn, pieces)
        x, hidden = pieces.added(x, y, shift2, scale2, eps, dtype)
        return pieces.gated(x, self.ffn(hidden), gate2)

    def remember(self, x: Tensor, time: TimeModulation, layer: int, context: ChunkContext, pieces: Pieces) -> None:
        """Only what self-attention leaves in the cache. x: as in `forward`."""
        shift, scale, *_ = self.modulate(time)
        hidden = pieces.modulated(x, shift, scale, self.norm1.eps, self.compute_dtype)
        self.self_attn.remember(hidden, layer, context, pieces)


class Head(nn.Module):
    """Final norm, modulation and projection to patches, in float32."""

    def __init__(self, config: DiTConfig, operations: Any, factory: dict[str, Any]) -> None:
        super().__init__()
        self.norm = LayerNorm(config.dim, config.eps)
        self.head = operations.Linear(config.dim, math.prod(config.patch_size) * config.out_dim, **factory)
        self.modulation = nn.Parameter(torch.empty(1, 2, config.dim, **factory))

    def forward(self, x: Tensor, time: TimeModulation) -> Tensor:
        """x: [tokens, dim]. Returns float32 [tokens, prod(patch_size) * out_dim]."""
        shift, scale = (self.modulation[0].to(x.device, torch.float32) + time.embedding).split(1)
        return float32_linear(self.head, self.norm(x).float() * (1 + scale) + shift)


def float32_linear(layer: Any, x: Tensor) -> Tensor:
    """A Linear in float32 whatever the dtype of its weights; the time path and the head are specified so.

    A host's Linear that casts by itself is called as it is, so that its patches and its streaming keep working.
    """
    if layer.weight.dtype == torch.float32 or getattr(layer, "comfy_cast_weights", False):
        return layer(x)
    bias = None if layer.bias is None else layer.bias.float()
    return F.linear(x, layer.weight.float(), bias)
