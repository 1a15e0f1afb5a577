"""Which attention a world runs: the one the user chose for ComfyUI, or ours."""

from __future__ import annotations

from typing import Any

import comfy.ldm.modules.attention
from comfy.cli_args import args
from torch import Tensor

from ...lingbot_core.models.attention import Attention, sdpa

_FLAGS = (
    "use_split_cross_attention",
    "use_quad_cross_attention",
    "use_pytorch_cross_attention",
    "use_sage_attention",
    "use_flash_attention",
    "use_ck_attention",
)
OVERRIDE = "optimized_attention_override"
"""Key in transformer_options under which a node leaves an attention function for one MODEL."""


def chosen_attention() -> Attention:
    """ComfyUI's when it was started with one of its attention flags; else ours, which prefers cuDNN on a GPU."""
    return host_attention({}) if any(getattr(args, flag, False) for flag in _FLAGS) else sdpa()


def host_attention(transformer_options: dict[str, Any]) -> Attention:
    """ComfyUI's attention with what nodes put into a MODEL's transformer_options."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # The one shape that all of ComfyUI's functions take: [batch, tokens, heads * head_dim].
        flat = (x.flatten(1).unsqueeze(0) for x in (q, k, v))
        # Looked up at every call, because other packs replace it.
        run = comfy.ldm.modules.attention.optimized_attention
        out = run(*flat, heads=q.shape[1], transformer_options=transformer_options)
        return out.squeeze(0).unflatten(-1, q.shape[1:])

    return attention
