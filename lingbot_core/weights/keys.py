"""What the tensors of a checkpoint are called in the wild, and the names our modules use.

Ours are the published ones for the transformer and the VAE, and transformers' own for the text encoder.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from ..errors import WeightsError
from ..models.text import convert_umt5_keys
from .tokenizer import JSON

TRANSFORMER, VAE, TEXT = "transformer", "VAE", "text encoder"

# Longest first. ComfyUI's checkpoints put every part of a model into one file behind such prefixes.
PREFIXES = {
    TRANSFORMER: ("model.diffusion_model.", "diffusion_model."),
    VAE: ("first_stage_model.", "vae."),
    TEXT: ("text_encoders.umt5xxl.transformer.", "umt5xxl.transformer."),
}
# Behind these lie the other parts of such a file.
NEIGHBOURS = ("first_stage_model.", "vae.", "text_encoders.", "cond_stage_model.", "model.diffusion_model.")

# Plain Wan has everything but this and the cam_* layers.
CAMERA = "patch_embedding_wancamctrl.weight"

# One of the groups must be there, whole.
_SIGNS = {
    TRANSFORMER: (("patch_embedding.weight", "blocks.0.self_attn.q.weight"),),
    VAE: (
        ("encoder.conv1.weight", "decoder.conv1.weight"),
        ("encoder.conv_in.weight", "decoder.conv_in.weight"),
    ),
    TEXT: (
        ("token_embedding.weight", "blocks.0.attn.q.weight"),
        ("shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"),
        ("encoder.embed_tokens.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"),
    ),
}


def find_prefix(part: str, names: Collection[str]) -> str | None:
    """What stands before the part's tensors ('' for nothing), or None when the part is not there."""
    known = set(names)
    for prefix in ("", *PREFIXES[part]):
        if any(all(prefix + name in known for name in group) for group in _SIGNS[part]):
            return prefix
    return None


def identify(names: Collection[str]) -> str | None:
    """Which part of a model these tensors are; None when they are none. The first of several."""
    return next((part for part in (TRANSFORMER, VAE, TEXT) if find_prefix(part, names) is not None), None)


def is_steerable(names: Collection[str]) -> bool:
    """Whether these are the tensors of a transformer that takes a camera, which a plain Wan does not."""
    prefix = find_prefix(TRANSFORMER, names)
    return prefix is not None and f"{prefix}{CAMERA}" in names


def strip_prefix(prefix: str, names: Iterable[str]) -> dict[str, str]:
    """Name as stored -> name without the prefix; the other parts of a whole checkpoint are left out."""
    stripped = {}
    for name in names:
        if name.startswith(prefix):
            stripped[name] = name.removeprefix(prefix)
        elif not name.startswith(NEIGHBOURS):
            stripped[name] = name
    return stripped


def native_names(part: str, names: Iterable[str]) -> dict[str, str]:
    """Name (without prefix) -> our name. Unknown names stay, for the check of the whole to report.

    What a text encoder's file holds beyond the encoder is left out: see models.text.convert_umt5_keys.
    """
    names = list(names)
    if part == TEXT:
        known = {name: name for name in names if name != JSON}
        return {old: new for new, old in convert_umt5_keys(known).items()}
    if part == VAE and "encoder.conv_in.weight" in names:
        return native_vae_names(names)
    return {name: name for name in names}


_VAE_OUTER = {
    "conv_in": "conv1",
    "norm_out": "head.0",
    "conv_out": "head.2",
}
_RESIDUAL = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}
_QUANT = {"quant_conv": "conv1", "post_quant_conv": "conv2"}


def native_vae_names(names: Iterable[str]) -> dict[str, str]:
    """diffusers' AutoencoderKLWan names -> those of Wan2.1_VAE.pth.

    diffusers nests the decoder's levels; the published file counts all of its layers in one sequence.
    """
    names = list(names)
    resnets = [
        int(found[1]) for name in names if (found := re.match(r"decoder\.up_blocks\.\d+\.resnets\.(\d+)\.", name))
    ]
    # A level is its residual blocks and one upsampler.
    level = max(resnets, default=-1) + 2
    return {name: _native_vae_name(name, level) for name in names}


def _native_vae_name(name: str, level: int) -> str:
    head, _, rest = name.partition(".")
    if head in _QUANT:
        return f"{_QUANT[head]}.{rest}"
    side = head
    if found := re.fullmatch(r"(\w+)\.(weight|bias|gamma)", rest):
        return f"{side}.{_VAE_OUTER.get(found[1], found[1])}.{found[2]}"
    if found := re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)", rest):
        place = 2 * int(found[2]) + (found[1] == "attentions")
        return f"{side}.middle.{place}.{_inner(found[3])}"
    if found := re.fullmatch(r"down_blocks\.(\d+)\.(.+)", rest):
        return f"{side}.downsamples.{found[1]}.{_inner(found[2])}"
    if found := re.fullmatch(r"up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.(.+)", rest):
        place = level * int(found[1]) + (int(found[3]) if found[2] == "resnets" else level - 1)
        return f"{side}.upsamples.{place}.{_inner(found[4])}"
    return name


def _inner(name: str) -> str:
    layer, _, leaf = name.partition(".")
    return f"{_RESIDUAL.get(layer, layer)}.{leaf}"


def require_part(part: str, names: Collection[str], where: str) -> str:
    """The prefix of the part, or WeightsError saying what the tensors are instead."""
    prefix = find_prefix(part, names)
    if prefix is not None:
        if part == TRANSFORMER and not is_steerable(names):
            raise WeightsError(
                f"{where} is a plain Wan transformer: {prefix}{CAMERA} and the cam_* layers of its blocks are missing, "
                "so no camera can steer it; LingBot-World-Fast is needed"
            )
        return prefix
    other = identify(names)
    if other is not None:
        raise WeightsError(f"{where} is a {other}, not a {part}; give it as the {other}")
    example = next(iter(sorted(names)), "no tensor at all")
    raise WeightsError(f"{where} is not a {part} that is known here; it holds {len(names)} tensors, such as {example}")
