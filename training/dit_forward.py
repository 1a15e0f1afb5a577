"""The transformer for training: batches, teacher forcing, gradients, on the parameters of a `CausalWanDiT`.

Every chunk of a clip stands twice in the sequence: clean at time 0, as a session commits it, and noisy. Both attend to
the clean tokens of the chunks before them within the window, and to themselves; that is what `KVCache` shows a session.
Only differences of positions enter attention, so that chunks may be numbered from 0 wherever a clip begins.

Precision is that of the blocks: Linears in the compute dtype, residual stream, time, gates and head in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lingbot_core.models.dit import CausalWanDiT
from lingbot_core.models.dit_blocks import Block, LayerNorm, RMSNorm
from lingbot_core.models.rope import rope_for_chunk

KV = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Batch:
    """What a forward knows beside the latents.

    condition: [B, n, 20, c, h, w], mask first. rays: [B, n, S, features]. prompts: rows of the table of text states,
    int64 [B, n]. n chunks of c latent frames, S tokens each.
    """

    condition: Tensor
    rays: Tensor
    prompts: Tensor


def linear(layer: torch.nn.Module, x: Tensor) -> Tensor:
    """A Linear in the dtype of x."""
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


def rms_norm(norm: RMSNorm, x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)).to(x.dtype) * norm.weight.to(x.dtype)


def layer_norm(norm: LayerNorm, x: Tensor) -> Tensor:
    """float32 in, float32 out."""
    return F.layer_norm(x, (norm.dim,), norm.weight, norm.bias, norm.eps)


def plain_norm(x: Tensor, eps: float) -> Tensor:
    """The same without weights."""
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [..., S, heads, head_dim]; cos, sin broadcast against [..., S, heads, head_dim / 2]."""
    real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = (real * cos - imaginary * sin, real * sin + imaginary * cos)
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """[N, L, heads, head_dim] each; mask broadcasts to [N, heads, Lq, Lk]."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return out.transpose(1, 2)


def before_attention(block: Block, x: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> KV:
    """Queries, keys and values [..., S, heads, head_dim]; queries and keys are rotated. x: float32 [..., S, dim]."""
    a = block.self_attn
    shift, scale = rows[..., 0, :], rows[..., 1, :]
    h = (plain_norm(x, block.eps) * (1 + scale.unsqueeze(-2)) + shift.unsqueeze(-2)).to(dtype)
    split = (a.heads, a.head_dim)
    q = rotate(rms_norm(a.norm_q, linear(a.q, h)).unflatten(-1, split), cos, sin)
    k = rotate(rms_norm(a.norm_k, linear(a.k, h)).unflatten(-1, split), cos, sin)
    return q, k, linear(a.v, h).unflatten(-1, split)  # type: ignore[return-value]


def camera(block: Block, embedding: Tensor) -> tuple[Tensor, Tensor]:
    hidden = F.silu(linear(block.cam_injector_layer1, embedding))
    hidden = linear(block.cam_injector_layer2, hidden) + embedding
    return 1.0 + linear(block.cam_scale_layer, hidden), linear(block.cam_shift_layer, hidden)


def after_attention(
    block: Block, x: Tensor, out: Tensor, rows: Tensor, scale: Tensor, shift: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """The rest of a block. x: float32 [B, n, r, S, dim]; out: attention's result, [B, n, r, S, dim] in the compute
    dtype; rows: [B, n, r, 6, dim]; scale, shift: [B, n, 1, S, dim]; keys, values: [B, n, Lt, heads, head_dim]."""
    dtype = out.dtype
    gate1, shift2, scale2, gate2 = (rows[..., i, :].unsqueeze(-2) for i in (2, 3, 4, 5))
    x = x + linear(block.self_attn.o, out) * gate1
    x = scale * x + shift
    c = block.cross_attn
    query = rms_norm(c.norm_q, linear(c.q, layer_norm(block.norm3, x).to(dtype)))
    query = query.view(-1, query.shape[2] * query.shape[3], c.heads, c.head_dim)
    read = attend(query, keys.flatten(0, 1), values.flatten(0, 1))
    x = x + linear(c.o, read.reshape(x.shape))
    hidden = (plain_norm(x, block.eps) * (1 + scale2) + shift2).to(dtype)
    first, _, second = block.ffn
    return x + linear(second, F.gelu(linear(first, hidden), approximate="tanh")) * gate2


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention of [B, n, 2, S, heads, head_dim] (clean, noisy): own tokens and clean ones of window - 1 chunks back.

    Runs without a mask: chunks with a full past go into one call, each of the first ones into a call of its own.
    """
    batch, chunks = q.shape[:2]
    past = window - 1

    def call(first: int, count: int, back: int) -> Tensor:
        """Chunks first .. first + count - 1, each with ``back`` chunks before it."""
        pair = slice(first, first + count)

        def keys(t: Tensor) -> Tensor:
            own = t[:, pair]
            before = [t[:, first - j : first - j + count, :1].expand_as(own) for j in range(back, 0, -1)]
            return torch.cat([*before, own], dim=3).flatten(0, 2)

        return attend(q[:, pair].flatten(0, 2), keys(k), keys(v)).unflatten(0, (batch, count, 2))

    parts = [call(i, 1, i) for i in range(min(past, chunks))]
    if chunks > past:
        parts.append(call(past, chunks - past, past))
    return torch.cat(parts, dim=1)


def masked(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The same as `windowed` in one call with a boolean mask over the whole sequence."""
    batch, chunks, _, size, heads, width = q.shape
    i = torch.arange(chunks, device=q.device).view(-1, 1).expand(-1, 2).flatten().repeat_interleave(size)
    noisy = torch.arange(2, device=q.device).repeat(chunks).repeat_interleave(size)
    behind = i[:, None] - i[None]
    own = (behind == 0) & (noisy[:, None] == noisy[None])
    mask = own | ((behind > 0) & (behind < window) & (noisy[None] == 0))
    out = attend(*(t.reshape(batch, -1, heads, width) for t in (q, k, v)), mask=mask)
    return out.reshape(q.shape)


class Teacher:
    """Teacher forcing on the parameters of ``dit``.

    window: chunks that attention sees, the current one included. table: text states of all prompts, [P, text_len,
    text_dim], padded with zeros. run_block, run_begin, run_end: the functions below, or compiled versions of them.
    """

    def __init__(
        self, dit: CausalWanDiT, table: Tensor, *, window: int, chunk: int, size: tuple[int, int], dtype: torch.dtype
    ) -> None:
        self.dit, self.window, self.chunk, self.size, self.dtype = dit, window, chunk, size, dtype
        self.table = table
        self.device = table.device
        self.run_block = block_forward
        self.run_begin, self.run_end = block_begin, block_end
        self.attention = windowed

    @property
    def tokens(self) -> int:
        """Tokens of a chunk."""
        _, ph, pw = self.dit.config.patch_size
        return self.chunk * (self.size[0] // ph) * (self.size[1] // pw)

    def rope(self, first: int, chunks: int) -> KV:
        """cos and sin, float32 [chunks, S, 1, head_dim / 2] for the chunks from ``first`` on."""
        _, ph, pw = self.dit.config.patch_size
        frames = chunks * self.chunk
        rope = rope_for_chunk(
            first * self.chunk, frames, self.size[0] // ph, self.size[1] // pw, self.dit.config.head_dim, self.device
        )
        shape = (chunks, self.tokens, 1, -1)
        return rope.cos.view(shape), rope.sin.view(shape)

    def times(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """t: [...] in 0..1000. Returns the embedding [..., dim] and the rows [..., 6, dim], float32."""
        config = self.dit.config
        half = config.freq_dim // 2
        exponents = torch.arange(half, dtype=torch.float64, device=t.device) / half
        angles = t.double().unsqueeze(-1) * torch.pow(10000.0, -exponents)
        sinusoid = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
        first, _, second = self.dit.time_embedding
        embedding = linear(second, F.silu(linear(first, sinusoid)))
        rows = linear(self.dit.time_projection[1], F.silu(embedding)).unflatten(-1, (6, config.dim))
        return embedding, rows

    def embed(self, latents: Tensor, condition: Tensor) -> Tensor:
        """[B, n, 16, c, h, w] and [B, n, 20, c, h, w] -> float32 tokens [B, n, S, dim]."""
        x = torch.cat([latents, condition], dim=2).to(self.dtype)
        _, ph, pw = self.dit.config.patch_size
        batch, chunks, channels, frames, height, width = x.shape
        x = x.view(batch, chunks, channels, frames, height // ph, ph, width // pw, pw)
        x = x.permute(0, 1, 3, 4, 6, 2, 5, 7).reshape(batch, chunks, self.tokens, -1)
        patch = self.dit.patch_embedding
        return F.linear(x, patch.weight.flatten(1).to(x.dtype), patch.bias.to(x.dtype)).float()

    def unpatchify(self, tokens: Tensor) -> Tensor:
        """[B, n, S, 16 * ph * pw] -> [B, n, 16, c, h, w]."""
        _, ph, pw = self.dit.config.patch_size
        height, width = self.size
        x = tokens.unflatten(-1, (ph, pw, -1)).unflatten(2, (self.chunk, height // ph, width // pw))
        return x.permute(0, 1, 7, 2, 3, 5, 4, 6).flatten(6, 7).flatten(4, 5)

    def head(self, x: Tensor, embedding: Tensor) -> Tensor:
        """x: float32 [B, n, S, dim]; embedding: [B, n, dim]."""
        head = self.dit.head
        shift, scale = (head.modulation[0] + embedding.unsqueeze(-2)).split(1, dim=-2)
        return linear(head.head, plain_norm(x, self.dit.config.eps) * (1 + scale) + shift)

    def embed_camera(self, rays: Tensor) -> Tensor:
        dit = self.dit
        e = linear(dit.patch_embedding_wancamctrl, rays.to(self.dtype))
        hidden = F.silu(linear(dit.c2ws_hidden_states_layer1, e))
        return e + linear(dit.c2ws_hidden_states_layer2, hidden)

    def embed_text(self) -> Tensor:
        first, _, second = self.dit.text_embedding
        return linear(second, F.gelu(linear(first, self.table.to(self.dtype)), approximate="tanh"))

    def cross(self, block: Block, text: Tensor, prompts: Tensor) -> KV:
        """Keys and values [B, n, Lt, heads, head_dim] of each chunk's prompt; computed once per prompt."""
        keys, values = cross_table(block, text)
        return keys[prompts], values[prompts]

    def flow(self, clean: Tensor, noisy: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """The flow of the noisy chunks, float32 [B, n, 16, c, h, w], each after the clean chunks before it.

        clean, noisy: [B, n, 16, c, h, w]. t: [B, n].
        """
        both = torch.stack([torch.zeros_like(t), t], dim=2)
        embedding, rows = self.times(both)
        x = torch.stack([self.embed(clean, batch.condition), self.embed(noisy, batch.condition)], dim=2)
        cos, sin = (r.unsqueeze(1) for r in self.rope(0, clean.shape[1]))
        view, text = self.embed_camera(batch.rays), self.embed_text()
        for block in self.dit.blocks:
            keys, values = self.cross(block, text, batch.prompts)
            x = self.run_block(block, x, rows, cos, sin, view, keys, values, self.window, self.attention)
        return self.unpatchify(self.head(x[:, :, 1], embedding[:, :, 1]))

    def chunk_forward(
        self, latents: Tensor, t: float, batch: Batch, index: int, past: list[KV], camera_text: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, list[KV]]:
        """One chunk after the keys and values of earlier ones, as a session runs it.

        latents: [B, 16, c, h, w] of chunk ``index`` of the batch. past: per layer, [B, tokens, heads, head_dim] each.
        Returns the flow and the chunk's own keys and values per layer.
        """
        one = slice(index, index + 1)
        times = torch.full((len(latents), 1), t, device=self.device)
        embedding, rows = self.times(times)
        x = self.embed(latents[:, None], batch.condition[:, one])[:, :, None]
        cos, sin = (r.unsqueeze(1) for r in self.rope(index, 1))
        view, text = camera_text
        own = []
        for layer, block in enumerate(self.dit.blocks):
            keys, values = self.cross(block, text, batch.prompts[:, one])
            before_k, before_v = past[layer]
            q, k, v = self.run_begin(block, x, rows[:, :, None], cos, sin, view[:, one])
            # Between two parts that may be compiled: the past has many lengths, and each would be compiled anew.
            out = attend(q, torch.cat([before_k, k], dim=1), torch.cat([before_v, v], dim=1))
            x = self.run_end(block, x, out, rows[:, :, None], view[:, one], keys, values)
            own.append((k, v))
        return self.unpatchify(self.head(x[:, :, 0], embedding))[:, 0], own

    def no_past(self, batch: int) -> list[KV]:
        """The past of a first chunk."""
        c = self.dit.config
        empty = torch.zeros(batch, 0, c.num_heads, c.head_dim, device=self.device, dtype=self.dtype)
        return [(empty, empty)] * c.num_layers


def cross_table(block: Block, text: Tensor) -> KV:
    c = block.cross_attn
    split = (c.heads, c.head_dim)
    return rms_norm(c.norm_k, linear(c.k, text)).unflatten(-1, split), linear(c.v, text).unflatten(-1, split)


def block_forward(
    block: Block,
    x: Tensor,
    rows: Tensor,
    cos: Tensor,
    sin: Tensor,
    view: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int,
    attention: object,
) -> Tensor:
    """A block over clean and noisy chunks, x: float32 [B, n, 2, S, dim]."""
    rows = rows + block.modulation[0]
    q, k, v = before_attention(block, x, rows, cos, sin, view.dtype)
    out = attention(q, k, v, window).flatten(-2)  # type: ignore[operator]
    scale, shift = camera(block, view)
    return after_attention(block, x, out, rows, scale.unsqueeze(2), shift.unsqueeze(2), keys, values)


def block_begin(
    block: Block, x: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, view: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one chunk, x: float32 [B, 1, 1, S, dim]."""
    q, k, v = before_attention(block, x, rows + block.modulation[0], cos, sin, view.dtype)
    return q[:, 0, 0], k[:, 0, 0], v[:, 0, 0]


def block_end(block: Block, x: Tensor, out: Tensor, rows: Tensor, view: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """What follows on attention's result ``out`` [B, S, heads, head_dim]."""
    rows = rows + block.modulation[0]
    scale, shift = camera(block, view)
    out = out.flatten(-2)[:, None, None]
    return after_attention(block, x, out, rows, scale.unsqueeze(2), shift.unsqueeze(2), keys, values)
