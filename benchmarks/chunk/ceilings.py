"""What the card does at best with the model's own shapes: linears, attention, copies.

These are single calls on random data; the floor of a chunk (floor.py) is made of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from lingbot_core.models.attention import sdpa
from lingbot_core.models.dit import DiTConfig

from .timing import milliseconds


@dataclass
class Ceilings:
    """Milliseconds of one call each.

    linear: (in, out) -> bf16. fp8: the same in float8 with a scale a row. self_attention: latent frames attended -> ms.
    cross_attention: to a prompt. copy: GB/s read and written.
    """

    tokens: int
    linear: dict[tuple[int, int], float] = field(default_factory=dict)
    fp8: dict[tuple[int, int], float] = field(default_factory=dict)
    self_attention: dict[int, float] = field(default_factory=dict)
    cross_attention: float = 0.0
    copy: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Rates beside times, JSON types only."""

        def rates(times: dict[tuple[int, int], float]) -> dict[str, dict[str, float]]:
            flops = {shape: 2 * self.tokens * shape[0] * shape[1] for shape in times}
            return {
                f"{i}x{o}": {"ms": round(ms, 4), "tflops": round(flops[i, o] / ms / 1e9, 1)}
                for (i, o), ms in times.items()
            }

        return {
            "tokens": self.tokens,
            "linear": rates(self.linear),
            "fp8": rates(self.fp8),
            "self_attention_ms": {str(frames): round(ms, 4) for frames, ms in self.self_attention.items()},
            "cross_attention_ms": round(self.cross_attention, 4),
            "copy_gb_s": round(self.copy, 1),
        }


def shapes(config: DiTConfig) -> list[tuple[int, int]]:
    """The blocks' linears, (in, out); q, k and v as one."""
    d, f = config.dim, config.ffn_dim
    return [(d, d), (d, 3 * d), (d, 2 * d), (d, f), (f, d)]


def measure(
    config: DiTConfig, tokens: int, frame_tokens: int, frames: list[int], device: torch.device, dtype: torch.dtype
) -> Ceilings:
    """tokens: of a chunk. frames: numbers of latent frames that self-attention sees."""
    found = Ceilings(tokens)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    for inner, outer in shapes(config):
        x, weight, bias = rand(tokens, inner), rand(outer, inner), rand(outer)
        found.linear[inner, outer] = milliseconds(lambda x=x, w=weight, b=bias: F.linear(x, w, b), device)
        if device.type == "cuda":
            found.fp8[inner, outer] = _fp8(x, weight, bias, device)
    attend = sdpa()
    heads = (config.num_heads, config.head_dim)
    q = rand(tokens, *heads)
    for count in frames:
        k, v = rand(count * frame_tokens, *heads), rand(count * frame_tokens, *heads)
        found.self_attention[count] = milliseconds(lambda k=k, v=v: attend(q, k, v), device)
    k, v = rand(config.text_len, *heads), rand(config.text_len, *heads)
    found.cross_attention = milliseconds(lambda: attend(q, k, v), device)
    x = torch.empty(2**28 if device.type == "cuda" else 2**22, device=device, dtype=torch.float32)
    y = torch.empty_like(x)
    found.copy = 2 * x.nbytes / milliseconds(lambda: y.copy_(x), device) / 1e6
    return found


def _fp8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, device: torch.device) -> float:
    x8, w8 = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    row, column = torch.ones(len(x), 1, device=device), torch.ones(1, len(weight), device=device)
    kind = torch.bfloat16
    return milliseconds(
        lambda: torch._scaled_mm(x8, w8.t(), row, column, bias=bias.to(kind), out_dtype=kind, use_fast_accum=True),
        device,
    )
