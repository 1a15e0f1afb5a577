"""From files into models, one tensor at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import WeightsError
from ..models.attention import sdpa
from ..models.dit import CausalWanDiT, DiTConfig
from ..models.text import TextEncoder, build_umt5, load_tokenizer, load_umt5, umt5_config_from_shapes
from ..models.vae import VAEConfig, WanVAE
from .layout import Layout


class TensorFiles:
    """The tensors of one or several files, read lazily. .safetensors, or .pth with weights only."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._where: dict[str, tuple[Path, Any]] = {}
        for file in files:
            for key, source in self._open(file):
                if key in self._where:
                    raise WeightsError(f"{file}: tensor {key} is also in {self._where[key][0].name}")
                self._where[key] = (file, source)

    @staticmethod
    def _open(file: Path) -> Iterator[tuple[str, Any]]:
        from safetensors import SafetensorError, safe_open

        try:
            if file.suffix == ".safetensors":
                handle = safe_open(file, "pt")
                yield from ((key, handle) for key in handle.keys())  # noqa: SIM118 - not a dict
            else:
                state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
                yield from state.items()
        except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, AttributeError) as error:
            raise WeightsError(f"{file} cannot be read, it may be truncated or of another kind: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, without reading any tensor."""
        return {
            key: tuple(source.shape if isinstance(source, Tensor) else source.get_slice(key).get_shape())
            for key, (_, source) in self._where.items()
        }

    def file_of(self, key: str) -> Path:
        """Where a tensor lies."""
        return self._where[key][0]

    def __getitem__(self, key: str) -> Tensor:
        _, source = self._where[key]
        return source if isinstance(source, Tensor) else source.get_tensor(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def fill(module: nn.Module, tensors: TensorFiles, *, device: torch.device, dtype: torch.dtype, what: str) -> None:
    """Assigns every parameter of a module on the meta device, one tensor in flight at a time.

    Raises WeightsError naming missing, unexpected, misshapen and non-finite tensors with their file.
    """
    own = {name: tuple(p.shape) for name, p in module.named_parameters()}
    shapes = tensors.shapes()
    problems = []
    if missing := sorted(own.keys() - shapes.keys()):
        problems.append(f"{len(missing)} tensors are missing, such as {missing[0]}")
    if extra := sorted(shapes.keys() - own.keys()):
        problems.append(f"{len(extra)} tensors do not belong to it, such as {extra[0]} in {tensors.file_of(extra[0]).name}")
    for key in sorted(own.keys() & shapes.keys()):
        if own[key] != shapes[key]:
            where = tensors.file_of(key).name
            problems.append(f"{key} in {where} has shape {list(shapes[key])} instead of {list(own[key])}")
            break
    if problems:
        raise WeightsError(f"these files are not the {what} they should be: " + "; ".join(problems))
    for key in own:
        tensor = tensors[key]
        if not torch.isfinite(tensor).all():
            raise WeightsError(f"{what}: {key} in {tensors.file_of(key)} holds NaN or infinity; get the file again")
        owner, _, leaf = key.rpartition(".")
        parameter = nn.Parameter(tensor.to(device=device, dtype=dtype, copy=True), requires_grad=False)
        setattr(module.get_submodule(owner), leaf, parameter)


def load_dit(layout: Layout, *, device: torch.device, dtype: torch.dtype, attention: str) -> CausalWanDiT:
    """The transformer, ready to run."""
    tensors = TensorFiles(layout.transformer)
    shapes = tensors.shapes()
    about = layout.transformer_config
    heads = about.get("num_heads") or about.get("num_attention_heads")
    if not heads:
        # All published models have heads of 128.
        heads = max(1, shapes.get("patch_embedding.weight", (128,))[0] // 128)
    config = DiTConfig.from_shapes(shapes, num_heads=int(heads), text_len=int(about.get("text_len", 512)))
    dit = CausalWanDiT(config, device="meta", dtype=dtype, attention=sdpa(attention))
    fill(dit, tensors, device=device, dtype=dtype, what="LingBot-World transformer")
    return dit.eval()


def load_vae(layout: Layout, *, device: torch.device, dtype: torch.dtype) -> WanVAE:
    """The VAE, ready to run."""
    tensors = TensorFiles([layout.vae])
    vae = WanVAE(VAEConfig.from_state_dict(tensors.shapes()), device="meta", dtype=dtype)
    fill(vae, tensors, device=device, dtype=dtype, what="Wan 2.1 VAE")
    return vae.eval()


def load_text(layout: Layout, *, max_tokens: int, device: torch.device, dtype: torch.dtype) -> TextEncoder | None:
    """The text encoder with its tokenizer, or None when the folder has neither."""
    if not layout.text:
        return None
    if layout.tokenizer is None:
        raise WeightsError(f"{layout.name}: there is a text encoder but no tokenizer; put it into the folder tokenizer")
    tensors = TensorFiles(layout.text)
    config = layout.text_config or umt5_config_from_shapes(tensors.shapes())
    model = load_umt5(build_umt5(config), {key: tensors[key] for key in tensors}, device=device, dtype=dtype)
    return TextEncoder(model, load_tokenizer(layout.tokenizer), max_tokens=max_tokens, device=device)


def fingerprint(modules: Mapping[str, nn.Module]) -> str:
    """16 hexadecimal digits that tell models apart: names, shapes, dtypes and the first values of every parameter."""
    digest = hashlib.sha256()
    for prefix, module in sorted(modules.items()):
        for name, parameter in sorted(module.named_parameters()):
            head = parameter.detach().reshape(-1)[:16].float().cpu().numpy().tobytes()
            digest.update(f"{prefix}.{name} {tuple(parameter.shape)} {parameter.dtype}".encode() + head)
    return digest.hexdigest()[:16]
