"""The reference implementation as a subject of measurement, from a folder the user names; none of it is shipped.

The folder holds the package ``wan`` of the LingBot-World code with ``wan/modules/model_fast.py``. Its attention is
replaced by PyTorch's scaled-dot-product attention and what it imports without using here is stubbed.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from lingbot_core.models.attention import PRIORITY
from lingbot_core.models.dit import DiTConfig
from lingbot_core.models.vae import VAEConfig

from .random_weights import randomise


def load_reference(folder: Path, config: DiTConfig, device: torch.device) -> nn.Module:
    """The reference transformer in bfloat16 with random weights, on ``device``."""
    _stub_packages(folder)
    from wan.modules import model as wan_model
    from wan.modules import model_fast

    for module in (model_fast, wan_model):
        module.flash_attention = _sdpa
    model_fast.attention = _sdpa
    model_fast.WanModelFast.init_weights = lambda self: None
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = model_fast.WanModelFast(
                model_type="i2v",
                control_type=config.control,
                in_dim=config.in_dim,
                dim=config.dim,
                ffn_dim=config.ffn_dim,
                freq_dim=config.freq_dim,
                text_dim=config.text_dim,
                text_len=config.text_len,
                out_dim=config.out_dim,
                num_heads=config.num_heads,
                num_layers=config.num_layers,
            )
    finally:
        torch.set_default_dtype(torch.float32)
    d = config.head_dim
    tables = [wan_model.rope_params(1024, size) for size in (d - 4 * (d // 6), 2 * (d // 6), 2 * (d // 6))]
    model.freqs = torch.cat(tables, dim=1).to(device)
    model.eval().requires_grad_(False)
    randomise(model)
    return model


def load_reference_vae(folder: Path, config: VAEConfig, device: torch.device) -> nn.Module:
    """The reference's VAE, encoder and decoder, float32 and untrained, on ``device``."""
    _stub_packages(folder)
    from wan.modules import vae2_1

    model = vae2_1.WanVAE_(
        dim=config.dim,
        z_dim=config.z_dim,
        dim_mult=list(config.dim_mult),
        num_res_blocks=config.num_res_blocks,
        attn_scales=[],
        temperal_downsample=list(config.temporal_downsample),
        dropout=0.0,
    )
    return model.to(device).eval().requires_grad_(False)


class ReferenceSession:
    """Caches and calls of the reference for one walk. window, sink: latent frames; None keeps everything."""

    def __init__(
        self, model: nn.Module, config: DiTConfig, *, frame_tokens: int, frames: int, window: int | None, sink: int
    ) -> None:
        device = next(model.parameters()).device
        self.model, self.frame_tokens = model, frame_tokens
        self.capacity = frame_tokens * (frames if window is None else window)
        for module in model.modules():
            if hasattr(module, "local_attn_size") and hasattr(module, "sink_size"):
                module.local_attn_size = -1 if window is None else window
                module.sink_size = sink
        size = (1, self.capacity, config.num_heads, config.head_dim)
        self.self_caches = [
            {
                "k": torch.zeros(size, dtype=torch.bfloat16, device=device),
                "v": torch.zeros(size, dtype=torch.bfloat16, device=device),
                "global_end_index": torch.tensor([0], device=device),
                "local_end_index": torch.tensor([0], device=device),
            }
            for _ in range(config.num_layers)
        ]
        self.cross_caches: list[dict[str, Any]] = [
            {"k": None, "v": None, "is_init": False} for _ in range(config.num_layers)
        ]

    @torch.no_grad()
    def forward(self, x: Tensor, t: float, condition: Tensor, rays: Tensor, states: Tensor, first_frame: int) -> Tensor:
        """The flow, float32 [16, frames, h, w]; writes the caches as the reference does."""
        with torch.amp.autocast("cuda", dtype=torch.bfloat16):
            return self.model(
                x=[x],
                t=torch.tensor([t], device=x.device),
                context=[states.to(torch.bfloat16)],
                seq_len=x.shape[1] * self.frame_tokens,
                y=[condition],
                dit_cond_dict={"c2ws_plucker_emb": rays.to(torch.bfloat16).chunk(1, dim=0)},
                kv_cache=self.self_caches,
                crossattn_cache=self.cross_caches,
                current_start=first_frame * self.frame_tokens,
                max_attention_size=self.capacity,
            )[0]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """[1, L, heads, head_dim] as the reference's attention takes them; the backend that ours takes first, too."""
    heads_first = (x.transpose(1, 2).to(torch.bfloat16) for x in (q, k, v))
    with sdpa_kernel(PRIORITY, set_priority=True):
        return F.scaled_dot_product_attention(*heads_first).transpose(1, 2).contiguous()


def _stub_packages(folder: Path) -> None:
    if not (folder / "wan" / "modules" / "model_fast.py").is_file():
        sys.exit(f"{folder} does not hold the reference: wan/modules/model_fast.py is missing")

    def module(name: str, **attributes: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(attributes)
        sys.modules[name] = made
        return made

    def register_to_config(init: Any) -> Any:
        def wrapped(self: Any, **arguments: Any) -> None:
            init(self, **arguments)
            self.config = types.SimpleNamespace(**arguments)

        return wrapped

    module("diffusers")
    module("diffusers.models")
    module(
        "diffusers.configuration_utils", ConfigMixin=type("ConfigMixin", (), {}), register_to_config=register_to_config
    )
    module("diffusers.models.modeling_utils", ModelMixin=type("ModelMixin", (nn.Module,), {}))
    # Namespace packages, so that the package's own __init__ with all its imports never runs.
    module("wan", __path__=[str(folder / "wan")])
    module("wan.modules", __path__=[str(folder / "wan" / "modules")])
