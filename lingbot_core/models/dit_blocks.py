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
from .float8 import Activations, Linear8, takes
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

    condition: [in_dim - out_dim, frames, h, w] = mask and image latents. first_frame: absolute latent frame. seen:
    slots of the cache that attention is limited to (KVCache.latest), None for all that are filled.
    """

    first_frame: int
    condition: Tensor
    camera: CameraModulation
    rope: Rope
    cross: CrossKV
    cache: KVCache
    seen: Tensor | None = None


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
    """Layer norm with weight and bias and float32 statistics, result in the dtype of x."""

    def __init__(self, dim: int, eps: float, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim]."""
        weight, bias = (t.to(x.device, torch.float32) for t in (self.weight, self.bias))
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
    """One layer whose weights are those of q, k and v; places: where the parts lay when they were joined."""

    layer: nn.Module
    places: tuple[int, ...]


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = (nn.Parameter(t, requires_grad=False) for t in (weight, bias))
    return layer


class SelfAttention(AttentionLayers):
    """Attention of a chunk to itself and to everything in the cache."""

    _joined: _Joined | None = None

    def join(self) -> None:
        """Lays the weights of q, k and v behind each other, so that one matrix product gives all three.

        They keep their names and values. Weights that are moved or replaced later are used one by one again.
        """
        layers = (self.q, self.k, self.v)
        kind = type(self.q)
        if kind not in (nn.Linear, Linear8) or any(type(layer) is not kind for layer in layers):
            return
        names = [name for name, _ in self.q.named_parameters()]
        parts = {name: torch.cat([getattr(layer, name).detach() for layer in layers]) for name in names}
        for name, whole in parts.items():
            for layer, part in zip(layers, whole.chunk(3), strict=True):
                setattr(layer, name, nn.Parameter(part, requires_grad=False))
        self._joined = _Joined(Linear8(**parts) if kind is Linear8 else _linear(**parts), self._places())

    def _places(self) -> tuple[int, ...]:
        return tuple(t.data_ptr() for layer in (self.q, self.k, self.v) for t in (layer.weight, layer.bias))

    def takes(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of its input."""
        return takes(dtype, self.q, self.k, self.v)

    def remember(self, x: Activations, layer: int, context: ChunkContext, pieces: Pieces) -> None:
        """Writes the chunk's keys (rotated) and values into the cache. x: [tokens, dim]."""
        self._keep(self.k(x), self.v(x), layer, context, pieces)

    def forward(
        self, x: Activations, layer: int, context: ChunkContext, attention: Attention, pieces: Pieces
    ) -> Tensor:
        """x: [tokens, dim] in the compute dtype or float8; returns the same shape in the compute dtype."""
        queries, keys, values = self._project(x)
        self._keep(keys, values, layer, context, pieces)
        query = pieces.heads(queries, self.norm_q.weight, self.norm_q.eps, context.rope, self.heads)
        seen, shown = context.cache.view(layer, context.seen)
        result = attention(query, seen.to(query.dtype), shown.to(query.dtype)).flatten(1)
        return self.o(pieces.given(result, takes(result.dtype, self.o)))

    def _project(self, x: Activations) -> tuple[Tensor, Tensor, Tensor]:
        joined = self._joined
        if joined is None or joined.places != self._places():
            return self.q(x), self.k(x), self.v(x)
        queries, keys, values = joined.layer(x).chunk(3, dim=-1)
        return queries, keys, values

    def _keep(self, keys: Tensor, values: Tensor, layer: int, context: ChunkContext, pieces: Pieces) -> None:
        norm = self.norm_k
        pieces.keep(keys, values, norm.weight, norm.eps, context.rope, context.cache, layer)


class CrossAttention(AttentionLayers):
    """Attention of a chunk to the prompt."""

    def encode(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """text: [text_len, dim] embedded prompt. Returns keys and values [text_len, heads, head_dim]."""
        return self._split(self.norm_k(self.k(text))), self._split(self.v(text))

    def forward(self, x: Activations, keys: Tensor, values: Tensor, attention: Attention, pieces: Pieces) -> Tensor:
        """x: [tokens, dim] in the compute dtype or float8; returns the same shape in the compute dtype."""
        query = pieces.heads(self.q(x), self.norm_q.weight, self.norm_q.eps, None, self.heads)
        result = attention(query, keys, values).flatten(1)
        return self.o(pieces.given(result, takes(result.dtype, self.o)))


class Block(nn.Module):
    """Self-attention, camera, cross-attention, feed-forward, in this order."""

    def __init__(self, config: DiTConfig, operations: Any, factory: dict[str, Any], compute_dtype: torch.dtype) -> None:
        super().__init__()
        dim = config.dim
        self.compute_dtype, self.eps = compute_dtype, config.eps
        self.self_attn = SelfAttention(config, operations, factory)
        self.norm3 = LayerNorm(dim, config.eps, **factory)
        self.cross_attn = CrossAttention(config, operations, factory)
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
        # In place where nobody asks for gradients: these are as large as everything else of a chunk together.
        inner = F.silu(self.cam_injector_layer1(embedding), inplace=not torch.is_grad_enabled())
        hidden = self.cam_injector_layer2(inner).add_(embedding)
        return self.cam_scale_layer(hidden).add_(1.0), self.cam_shift_layer(hidden)

    def begin(self, x: Tensor, rows: Tensor, pieces: Pieces) -> Activations:
        """What the first block's self-attention reads. x: [tokens, dim] embedded latents; rows: float32 [6, dim]."""
        return pieces.modulated(x, rows[:1], rows[1:2], self.eps, self.self_attn.takes(self.compute_dtype))

    def forward(
        self,
        x: Tensor,
        hidden: Activations,
        rows: Tensor,
        after: After,
        layer: int,
        context: ChunkContext,
        attention: Attention,
        pieces: Pieces,
    ) -> tuple[Tensor, Activations]:
        """x: [tokens, dim] residual (float32 after the first block), which is used up. hidden: its modulated norm.

        rows: float32 [6, dim]: shift, scale, gate of self-attention, then of the feed-forward. after: who comes next.
        Returns the new residual, float32, and what comes next reads of it.
        """
        _, _, gate1, shift2, scale2, gate2 = rows.split(1)
        dtype = self.compute_dtype
        y = self.self_attn(hidden, layer, context, attention, pieces)
        camera = context.camera.scales[layer], context.camera.shifts[layer]
        x, query = pieces.camera(x, y, gate1, camera, self.norm3, takes(dtype, self.cross_attn.q))
        y = self.cross_attn(query, context.cross.keys[layer], context.cross.values[layer], attention, pieces)
        first, _, second = self.ffn
        x, inner = pieces.added(x, y, shift2, scale2, self.eps, takes(dtype, first))
        y = second(pieces.activated(first, inner, takes(dtype, second)))
        return pieces.gated(x, y, gate2, after.shift, after.scale, self.eps, after.kind)

    def remember(self, hidden: Activations, layer: int, context: ChunkContext, pieces: Pieces) -> None:
        """Only what self-attention leaves in the cache. hidden: as in `forward`."""
        self.self_attn.remember(hidden, layer, context, pieces)


@dataclass(frozen=True)
class After:
    """How the residual is modulated for whoever reads it next. shift, scale: float32 [1, dim]; kind: dtype it takes."""

    shift: Tensor
    scale: Tensor
    kind: torch.dtype


class Head(nn.Module):
    """Final norm, modulation and projection to patches, in float32."""

    def __init__(self, config: DiTConfig, operations: Any, factory: dict[str, Any]) -> None:
        super().__init__()
        self.head = operations.Linear(config.dim, math.prod(config.patch_size) * config.out_dim, **factory)
        self.modulation = nn.Parameter(torch.empty(1, 2, config.dim, **factory))

    def after(self, time: TimeModulation) -> After:
        """How it reads the residual."""
        rows = self.modulation[0].to(time.embedding.device, torch.float32) + time.embedding
        shift, scale = rows.split(1)
        return After(shift, scale, torch.float32)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: float32 [tokens, dim], modulated. Returns float32 [tokens, prod(patch_size) * out_dim]."""
        return float32_linear(self.head, hidden)


def float32_linear(layer: Any, x: Tensor) -> Tensor:
    """A Linear in float32 whatever the dtype of its weights; the time path and the head are specified so.

    A host's Linear that casts by itself is called as it is, so that its patches and its streaming keep working.
    """
    if layer.weight.dtype == torch.float32 or getattr(layer, "comfy_cast_weights", False):
        return layer(x)
    bias = None if layer.bias is None else layer.bias.float()
    return F.linear(x, layer.weight.float(), bias)
