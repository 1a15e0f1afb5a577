"""From files into models, one tensor at a time.

The models are built on the meta device and filled with tensors that are read, cast and checked one after the other, so
that beside the finished model little more than a piece of one tensor is in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import WeightsError
from ..models.attention import sdpa
from ..models.dit import CausalWanDiT, DiTConfig
from ..models.float8 import FLOAT8, Linear8, float8_names, quantise_rows
from ..models.text import TextEncoder, build_umt5, umt5_config_from_shapes
from ..models.vae import VAEConfig, WanVAE
from .checkpoint import Checkpoint
from .layout import Layout
from .tokenizer import read_tokenizer

HEAD_DIM = 128
TEXT_LEN = 512
# Memory grows with the length that prompts may have; no published model goes beyond 512.
MAX_TEXT_LEN = 4096
# config.json's spellings of what the shapes must show: DiTConfig's field -> names in the published files.
_CONFIG_NAMES = {
    "dim": ("dim",),
    "ffn_dim": ("ffn_dim",),
    "num_layers": ("num_layers",),
    "freq_dim": ("freq_dim",),
    "text_dim": ("text_dim",),
    "in_dim": ("in_dim", "in_channels"),
    "out_dim": ("out_dim", "out_channels"),
    "control": ("control_type",),
}
_HEADS_NAMES = ("num_heads", "num_attention_heads")
# What a umT5's config.json may say: sizes, which its tensors show, and what is the same in all of them.
_UMT5_SIZES = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "relative_attention_num_buckets")
_UMT5_CONSTANTS = {
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "gated-gelu",
    "dense_act_fn": "gelu_new",
    "is_gated_act": True,
}


@dataclass
class Progress:
    """Tells a callback how far loading is. report: called with bytes read so far and in all, after each tensor."""

    report: Callable[[int, int], None] | None = None
    total: int = 0
    done: int = field(default=0)

    def add(self, nbytes: int) -> None:
        """So many bytes more have been read."""
        self.done += nbytes
        if self.report is not None:
            self.report(self.done, self.total)


def problems(module: nn.Module, checkpoint: Checkpoint) -> list[str]:
    """What keeps these files from filling the module: missing, unexpected and misshapen tensors. Reads headers only."""
    own = {name: tuple(p.shape) for name, p in module.named_parameters()}
    shapes = checkpoint.shapes()
    found = []
    if missing := sorted(own.keys() - shapes.keys()):
        found.append(f"{len(missing)} tensors are missing, such as {checkpoint.prefix}{missing[0]}")
    if extra := sorted(shapes.keys() - own.keys()):
        found.append(f"{len(extra)} tensors do not belong to it, such as {checkpoint.place(extra[0])}")
    if other := sorted(key for key in own.keys() & shapes.keys() if own[key] != shapes[key]):
        key = other[0]
        found.append(
            f"{len(other)} tensors have another shape, such as {checkpoint.place(key)}: {list(shapes[key])} instead of "
            f"{list(own[key])}"
        )
    return found


def fill(
    module: nn.Module,
    checkpoint: Checkpoint,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    float8: Sequence[str] = (),
    progress: Progress | None = None,
) -> None:
    """Gives every parameter of a module on the meta device its value. float8: Linears that become Linear8.

    Raises WeightsError naming missing, unexpected and misshapen tensors before anything is read, and non-finite ones.
    """
    if found := problems(module, checkpoint):
        raise WeightsError(
            f"{checkpoint.where} is not the {checkpoint.part} it should be: {'; '.join(found)}. Get the files again, "
            "or check that they belong together"
        )
    rounded = set(float8)
    for name in [name for name, _ in module.named_parameters()]:
        owner, _, leaf = name.rpartition(".")
        if owner in rounded and leaf == "weight":
            bias = checkpoint.read(f"{owner}.bias", dtype=dtype, device=device)
            _replace(module, owner, _linear8(checkpoint, name, bias))
        elif owner not in rounded:
            tensor = checkpoint.read(name, dtype=dtype, device=device)
            setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
        if progress is not None:
            progress.add(checkpoint.entry(name).nbytes)


def _linear8(checkpoint: Checkpoint, name: str, bias: Tensor) -> Linear8:
    """A weight that is stored in the same float8 is taken as it is, whatever its scale is for."""
    stored = checkpoint.read_scaled(name)
    if stored is not None and stored.values.dtype == FLOAT8:
        scale = stored.scale.reshape(-1, 1).expand(len(stored.values), 1)
        return Linear8(stored.values.to(bias.device), scale.contiguous().to(bias.device), bias)
    rows = quantise_rows(checkpoint.read(name, dtype=torch.float32, device=bias.device))
    return Linear8(rows.values, rows.scale, bias)


def _replace(module: nn.Module, name: str, layer: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, layer)


def dit_config(checkpoint: Checkpoint, config: Mapping[str, Any], *, control: str | None = None) -> DiTConfig:
    """Sizes of a transformer. config: its config.json, or {}; control: 'cam' or 'act' when one is demanded.

    Raises WeightsError when the tensors contradict config.json or the demand.
    """
    own = checkpoint.about
    config = {**config, **(own.config if own else {})}
    shapes = checkpoint.shapes()
    heads = _whole_number(checkpoint, config, _HEADS_NAMES)
    if heads is None:
        heads = max(1, shapes["patch_embedding.weight"][0] // HEAD_DIM)
    text_len = _whole_number(checkpoint, config, ("text_len",), MAX_TEXT_LEN) or TEXT_LEN
    try:
        found = DiTConfig.from_shapes(shapes, num_heads=heads, text_len=text_len)
    except (WeightsError, ValueError, IndexError) as error:
        raise WeightsError(f"{checkpoint.where}: {error}") from None
    for name, spellings in _CONFIG_NAMES.items():
        for spelling in spellings:
            said = config.get(spelling)
            if said is not None and said != getattr(found, name):
                raise WeightsError(
                    f"{checkpoint.where}: config says {spelling} = {said}, the tensors say {getattr(found, name)}; the "
                    "files are incomplete or do not belong together"
                )
    if control is not None and control != found.control:
        features = shapes["patch_embedding_wancamctrl.weight"][1]
        raise WeightsError(
            f"{checkpoint.place('patch_embedding_wancamctrl.weight')} takes {features} features, which is control "
            f"{found.control!r}; {control!r} was asked for. Use a checkpoint of that control"
        )
    return found


def _whole_number(
    checkpoint: Checkpoint, config: Mapping[str, Any], spellings: Sequence[str], highest: int | None = None
) -> int | None:
    """A number of a config under the first of its names that is there; None without one. Raises WeightsError."""
    name = next((name for name in spellings if config.get(name) is not None), None)
    if name is None:
        return None
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (highest and value > highest):
        limits = f"from 1 to {highest}" if highest else "above 0"
        raise WeightsError(
            f"{checkpoint.where}: config says {name} = {_shown(value)}, which must be a whole number {limits}; get the "
            "config that belongs to it"
        )
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def load_dit(
    layout: Layout,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
    control: str | None = None,
    float8: bool = False,
    progress: Progress | None = None,
) -> CausalWanDiT:
    """The transformer, ready to run. float8: with the blocks' large matrices in float8."""
    checkpoint = layout.transformer.open()
    config = dit_config(checkpoint, layout.transformer.config, control=control)
    dit = CausalWanDiT(config, device="meta", dtype=dtype, attention=sdpa(attention))
    linears = [name for name, layer in dit.named_modules() if isinstance(layer, nn.Linear)]
    chosen = float8_names(linears) if float8 else ()
    fill(dit, checkpoint, device=device, dtype=dtype, float8=chosen, progress=progress)
    return dit.eval()


def load_vae(layout: Layout, *, device: torch.device, dtype: torch.dtype, progress: Progress | None = None) -> WanVAE:
    """The VAE, ready to run."""
    layout.require("VAE")
    assert layout.vae is not None
    checkpoint = layout.vae.open()
    vae = WanVAE(vae_config(checkpoint), device="meta", dtype=dtype)
    fill(vae, checkpoint, device=device, dtype=dtype, progress=progress)
    return vae.eval()


def vae_config(checkpoint: Checkpoint) -> VAEConfig:
    """Sizes of a VAE. Raises WeightsError for other VAEs than Wan 2.1's."""
    try:
        return VAEConfig.from_state_dict(checkpoint.shapes())
    except (WeightsError, ValueError, IndexError) as error:
        raise WeightsError(f"{checkpoint.where}: {error}") from None


def text_config(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a umT5 encoder, as its tensors show them. config: its config.json, or {}, which is checked and not used.

    Raises WeightsError naming the field of a config that contradicts the tensors, or umT5.
    """
    try:
        sizes = umt5_config_from_shapes(checkpoint.shapes())
    except (WeightsError, ValueError, IndexError) as error:
        raise WeightsError(f"{checkpoint.where}: {error}") from None
    known = {**{name: sizes[name] for name in _UMT5_SIZES}, **_UMT5_CONSTANTS}
    for name, value in known.items():
        said = config.get(name)
        # True is no 1.
        if said is not None and (said != value or isinstance(said, bool) != isinstance(value, bool)):
            source = "the tensors say" if name in _UMT5_SIZES else "umT5 has"
            raise WeightsError(
                f"{checkpoint.files[0].parent / 'config.json'} says {name} = {_shown(said)}, {source} {value}; get the "
                "config.json that belongs to the text encoder, or remove it"
            )
    return sizes


def text_model(checkpoint: Checkpoint, config: Mapping[str, Any], *, dtype: torch.dtype) -> Any:
    """An empty umT5 encoder on the meta device. config: its config.json, or {}. Raises WeightsError."""
    sizes = text_config(checkpoint, config)
    try:
        return build_umt5(sizes, dtype=dtype)
    except WeightsError as error:
        raise WeightsError(f"{checkpoint.where}: {error}") from None


def load_text(
    layout: Layout,
    *,
    max_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> TextEncoder | None:
    """The text encoder with its tokenizer, or None when the model has no encoder."""
    if layout.text is None:
        return None
    layout.require("tokenizer")
    assert layout.tokenizer is not None
    tokenizer = read_tokenizer(layout.tokenizer)
    checkpoint = layout.text.open()
    model = text_model(checkpoint, layout.text.config, dtype=dtype)
    fill(model, checkpoint, device=device, dtype=dtype, progress=progress)
    return TextEncoder(model, tokenizer, max_tokens=max_tokens, device=device)


def stored_bytes(layout: Layout) -> int:
    """Bytes that loading all parts reads."""
    return sum(part.open().nbytes for part in (layout.transformer, layout.vae, layout.text) if part is not None)


def fingerprint(modules: Mapping[str, nn.Module]) -> str:
    """16 hexadecimal digits that tell models apart: names, shapes, dtypes and the first values of every parameter."""
    return fingerprint_of({prefix: dict(module.named_parameters()) for prefix, module in modules.items()})


def fingerprint_of(parts: Mapping[str, Mapping[str, Tensor | bytes]]) -> str:
    """The same of tensors by name. A tensor may also be given as its `parameter_mark`, taken when it was at hand."""
    digest = hashlib.sha256()
    for prefix, tensors in sorted(parts.items()):
        for name in sorted(tensors):
            mark = tensors[name]
            digest.update(f"{prefix}.{name} ".encode())
            digest.update(mark if isinstance(mark, bytes) else parameter_mark(mark))
    return digest.hexdigest()[:16]


def parameter_mark(tensor: Tensor) -> bytes:
    """What of a tensor goes into a fingerprint: its shape, its dtype and its first values."""
    head = tensor.detach().reshape(-1)[:16].float().cpu().numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype}".encode() + head
