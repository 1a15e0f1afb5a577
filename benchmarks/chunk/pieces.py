"""Milliseconds of everything between the matrix products: with PyTorch, compiled by Inductor, and our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lingbot_core.models.dit import DiTConfig
from lingbot_core.models.dit_blocks import LayerNorm
from lingbot_core.models.float8 import FLOAT8
from lingbot_core.models.kv_cache import CacheShape, KVCache
from lingbot_core.models.pieces import PYTORCH, Pieces, pieces_for
from lingbot_core.models.rope import rope_for_chunk

from .timing import milliseconds


@torch.no_grad()
def measure(config: DiTConfig, tokens: int, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """A row for each piece: bytes that one pass must move, and ms of each way."""
    d, heads = config.dim, config.num_heads

    def rand(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=device, dtype=kind)

    x, y, shift, scale, gate = rand(tokens, d), rand(tokens, d, kind=dtype), rand(1, d), rand(1, d), rand(1, d)
    camera = rand(tokens, d, kind=dtype), rand(tokens, d, kind=dtype)
    norm = LayerNorm(d, 1e-6, device=device, dtype=dtype)
    weight = rand(d, kind=dtype)
    rope = rope_for_chunk(0, 1, 1, tokens, config.head_dim, device)
    wide = rand(tokens, config.ffn_dim, kind=dtype)
    cache = KVCache(CacheShape(1, heads, config.head_dim, tokens), window=1, dtype=dtype, device=device)
    cache.begin(0, 1)
    row = (shift, scale, 1e-6)
    cases: dict[str, tuple[int, Callable[[Pieces], Any]]] = {
        "modulated": (x.nbytes + y.nbytes, lambda p: p.modulated(x, *row, dtype)),
        "queries": (2 * y.nbytes, lambda p: p.heads(y, weight, 1e-6, rope, heads)),
        "queries, not rotated": (2 * y.nbytes, lambda p: p.heads(y, weight, 1e-6, None, heads)),
        "keys and values": (4 * y.nbytes, lambda p: p.keep(y, y, weight, 1e-6, rope, cache, 0)),
        "camera": (2 * x.nbytes + 4 * y.nbytes, lambda p: p.camera(x, y, gate, camera, norm, dtype)),
        "added": (2 * x.nbytes + 2 * y.nbytes, lambda p: p.added(x, y, *row, dtype)),
        "gated": (2 * x.nbytes + 2 * y.nbytes, lambda p: p.gated(x, y, gate, *row, dtype)),
    }
    if device.type == "cuda":
        half = y.nbytes // 2
        cases |= {
            "modulated, float8": (x.nbytes + half, lambda p: p.modulated(x, *row, FLOAT8)),
            "given, float8": (y.nbytes + half, lambda p: p.given(y, FLOAT8)),
            "gelu, float8": (3 * wide.nbytes // 2, lambda p: p.activated(nn.Identity(), wide, FLOAT8)),
        }
    fused = pieces_for(x)
    for name, (size, function) in cases.items():
        ways: dict[str, Callable[[], Any]] = {"pytorch": lambda f=function: f(PYTORCH)}
        if fused is not PYTORCH:
            ways["kernel"] = lambda f=function: f(fused)
            ways["inductor"] = torch.compile(lambda f=function: f(PYTORCH), dynamic=False)
        yield {"piece": name, "mb": round(size / 1e6, 1), **_times(ways, device)}
    first = rand(config.ffn_dim, d, kind=dtype), rand(config.ffn_dim, kind=dtype)
    ways = {
        "linear, then gelu": lambda: F.gelu(F.linear(y, *first), approximate="tanh"),
        "linear alone": lambda: F.linear(y, *first),
        "gelu alone": lambda: F.gelu(wide, approximate="tanh"),
        "gelu in the product": lambda: torch._addmm_activation(first[1], y, first[0].t(), use_gelu=True),
    }
    yield {"piece": "feed-forward", "mb": round(2 * wide.nbytes / 1e6, 1), **_times(ways, device)}


def _times(ways: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, Any]:
    times: dict[str, Any] = {}
    for way, function in ways.items():
        try:
            times[way] = round(milliseconds(function, device, runs=9), 4)
        except Exception as error:  # a way that this PyTorch does not have is named, not hidden
            times[way] = f"{type(error).__name__}: {error}"[:160]
    return times
