"""Our streaming VAE from a native one, and native ones from folders.

ComfyUI's own decode starts its causal cache anew at every call, which would leave a seam at each chunk; and parameters
shared with a module of ours would be gone from it when ComfyUI offloads theirs. So a world has a copy of the weights,
with a ModelPatcher of its own that ComfyUI moves and frees like any other model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sd
import torch
from torch import Tensor, nn

from ...lingbot_core.errors import WeightsError
from ...lingbot_core.models.vae import LATENT_MEAN, VAEConfig, WanVAE
from ...lingbot_core.weights.layout import Layout
from ...lingbot_core.weights.load import parameter_mark, vae_config

_ADVICE = "connect the Wan 2.1 VAE (wan_2.1_vae.safetensors in VAELoader, or LingBotLoadWorldFolder)"


class _Operations(comfy.ops.disable_weight_init):
    """ComfyUI's convolutions, and their weights for kernels of ours that do what a call of them would."""

    @staticmethod
    @contextmanager
    def weights_of(conv: nn.Module, x: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """As a call gets them: moved, cast and patched if need be; it is also where a cancelled run ends."""
        comfy.ops.run_every_op()
        if conv.comfy_cast_weights or conv.weight_function or conv.bias_function:
            with comfy.ops.CastBiasWeightContext(conv, x, offloadable=True) as (weight, bias):
                yield weight, bias
        else:
            yield conv.weight, conv.bias


_marks: weakref.WeakKeyDictionary[WanVAE, dict[str, bytes]] = weakref.WeakKeyDictionary()
_copies: weakref.WeakKeyDictionary[Any, tuple[WanVAE, comfy.model_patcher.ModelPatcher]] = weakref.WeakKeyDictionary()


def world_vae(vae: Any) -> tuple[WanVAE, comfy.model_patcher.ModelPatcher]:
    """The streaming VAE with a native VAE's weights, and its patcher, which must be loaded before it is used.

    The encoder is float32, so that conditions do not depend on the precision that decoding is done in; the decoder is
    as ComfyUI loaded it. Made once for each native VAE, and gone with it.
    Raises WeightsError for anything but a Wan 2.1 VAE.
    """
    require_wan21(vae)
    if vae not in _copies:
        _copies[vae] = _copy(vae)
    return _copies[vae]


def vae_marks(copy: WanVAE) -> dict[str, bytes]:
    """What of a copy's weights goes into a world's fingerprint, taken when it was made."""
    return _marks[copy]


def require_wan21(vae: Any) -> None:
    """Raises WeightsError naming what was connected instead of a Wan 2.1 VAE."""
    model = getattr(vae, "first_stage_model", None)
    if model is None:
        raise WeightsError(f"the VAE input got {type(vae).__name__}, which is no VAE of ComfyUI; {_ADVICE}")
    if isinstance(model, comfy.ldm.wan.vae.WanVAE) and getattr(vae, "output_channels", 3) == 3:
        return
    channels = getattr(vae, "latent_channels", "an unknown number of")
    if isinstance(model, comfy.ldm.wan.vae2_2.WanVAE):
        what = f"a Wan 2.2 VAE of {channels} latent channels"
    elif getattr(vae, "latent_dim", 2) == 2:
        what = f"an image VAE of {channels} latent channels ({type(model).__name__})"
    else:
        what = f"another VAE, of {channels} latent channels ({type(model).__name__})"
    raise WeightsError(f"the VAE input got {what}; a world needs {len(LATENT_MEAN)} of a video: {_ADVICE}")


def native_vae(layout: Layout) -> comfy.sd.VAE:
    """A layout's VAE as ComfyUI's, whatever names its tensors have. Raises WeightsError."""
    layout.require("VAE")
    assert layout.vae is not None
    checkpoint = layout.vae.open()
    config = vae_config(checkpoint)
    weights = {name: checkpoint.read(name) for name in checkpoint}
    if _is_native(config):
        return comfy.sd.VAE(sd=weights)
    return _other_size(config, weights)


def _is_native(config: VAEConfig) -> bool:
    """Whether ComfyUI's VAE class makes a VAE of this shape; it reads the width alone off the tensors."""
    return config == VAEConfig(dim=config.dim)


def _other_size(config: VAEConfig, weights: dict[str, Tensor]) -> comfy.sd.VAE:
    """All but the network comes from ComfyUI's own constructor, which is given one of its own size to look at."""
    shape = {
        "dim": config.dim,
        "z_dim": config.z_dim,
        "dim_mult": list(config.dim_mult),
        "num_res_blocks": config.num_res_blocks,
        "attn_scales": [],
        "temperal_downsample": list(config.temporal_downsample),
        "image_channels": 3,
        "conv_out_channels": 3,
        "dropout": 0.0,
    }
    known = VAEConfig(dim=config.dim)
    sample = comfy.ldm.wan.vae.WanVAE(
        **{**shape, "dim_mult": list(known.dim_mult), "num_res_blocks": known.num_res_blocks,
           "temperal_downsample": list(known.temporal_downsample)}
    )  # fmt: skip
    vae = comfy.sd.VAE(sd=sample.state_dict())
    model = comfy.ldm.wan.vae.WanVAE(**shape).eval()
    model.load_state_dict(weights, assign=True)
    model.to(vae.vae_dtype)
    comfy.model_management.archive_model_dtypes(model)
    vae.first_stage_model = model
    vae.patcher = comfy.model_patcher.CoreModelPatcher(
        model, load_device=vae.device, offload_device=comfy.model_management.vae_offload_device()
    )
    vae.size = None
    vae.model_size()
    return vae


def _copy(vae: Any) -> tuple[WanVAE, comfy.model_patcher.ModelPatcher]:
    device, offload = vae.patcher.load_device, vae.patcher.offload_device
    weights = dict(vae.first_stage_model.state_dict())
    on_cpu = comfy.model_management.is_device_cpu(device)
    copy = WanVAE(
        VAEConfig.from_state_dict(weights),
        # On the CPU nothing is streamed, and our blocks know a faster way for plain convolutions.
        operations=nn if on_cpu else _Operations,
        device="meta",
        compute_device=device,
    )
    for name in [name for name, _ in copy.named_parameters()]:
        owner, _, leaf = name.rpartition(".")
        encodes = name.startswith(("encoder.", "conv1."))
        tensor = weights.pop(name).to(device=offload, dtype=torch.float32 if encodes else None, copy=True)
        if not (encodes or on_cpu) and leaf == "weight" and tensor.itemsize == 2:
            # As our kernels read it; in any other order each decode would copy it first.
            layout = torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
            tensor = tensor.contiguous(memory_format=layout)
        setattr(copy.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
    copy.eval()
    comfy.model_management.archive_model_dtypes(copy)
    _marks[copy] = {name: parameter_mark(parameter) for name, parameter in copy.named_parameters()}
    return copy, comfy.model_patcher.CoreModelPatcher(copy, load_device=device, offload_device=offload)
