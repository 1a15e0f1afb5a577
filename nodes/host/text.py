"""Prompts between ComfyUI and a world: CONDITIONING into text states, CLIP as a world's text encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.model_management
from torch import Tensor

from ...lingbot_core.errors import PromptError
from ...lingbot_core.models.text import MAX_TOKENS, Encoded, clean_text

_FOREIGN = {768: "Stable Diffusion 1.5", 1024: "Stable Diffusion 2", 1280: "a CLIP-G model", 2048: "SDXL"}
_ADVICE = "encode the prompt with CLIPLoader (type wan, umt5_xxl) or LingBotLoadWorldFolder, and CLIPTextEncode"


def states_of(conditioning: Any, dim: int | None = None) -> Tensor:
    """Text states [L, text_dim] of a CONDITIONING: the rows up to its last token, 512 at most, one at least.

    dim: the width that the model takes, where it is known. Raises PromptError for the conditioning of other models,
    naming both widths, and for several prompts joined into one.
    """
    if not isinstance(conditioning, (list, tuple)) or not conditioning:
        raise PromptError(f"the conditioning is {type(conditioning).__name__}, and empty or unknown; {_ADVICE}")
    if len(conditioning) > 1:
        raise PromptError(
            f"the conditioning joins {len(conditioning)} prompts, and a world has one at a time; connect one "
            "CLIPTextEncode, or change the prompt between chunks"
        )
    states, about = conditioning[0][0], conditioning[0][1]
    if not isinstance(states, Tensor) or states.ndim != 3 or states.shape[0] != 1:
        shown = list(states.shape) if isinstance(states, Tensor) else type(states).__name__
        raise PromptError(f"the conditioning has states of shape {shown}, [1, tokens, width] is expected; {_ADVICE}")
    width = states.shape[2]
    pooled = about.get("pooled_output") if isinstance(about, dict) else None
    if (dim is not None and width != dim) or (dim is None and width in _FOREIGN) or pooled is not None:
        wanted = f"{dim} wide" if dim is not None else "4096 wide (umT5-xxl)"
        like = f", as for {_FOREIGN[width]}" if width in _FOREIGN else ""
        extra = " and has a pooled output" if pooled is not None else ""
        raise PromptError(f"the conditioning is {width} wide{extra}{like}; this model takes one {wanted}: {_ADVICE}")
    return true_rows(states[0])


def true_rows(states: Tensor) -> Tensor:
    """[L, dim] without the rows of zeros that ComfyUI pads with; rows beyond 512 are not what the model knows."""
    kept = states[:MAX_TOKENS]
    used = kept.ne(0).any(dim=1).nonzero()
    length = int(used[-1]) + 1 if len(used) else 1
    return kept[:length]


class ClipText:
    """A native CLIP with the interface of a world's text encoder.

    dim: the width that the model takes; None accepts any. resident: patchers of the world that is running. Encoding
    may make ComfyUI move them off the GPU to make room; they are loaded again afterwards, because the engine goes on.
    Raises PromptError for what is no CLIP.
    """

    def __init__(self, clip: Any, *, dim: int | None = None, resident: Sequence[Any] = ()) -> None:
        if not hasattr(clip, "cond_stage_model"):
            raise PromptError(f"the CLIP input got {type(clip).__name__}, which is no CLIP of ComfyUI; {_ADVICE}")
        self.clip = clip
        self.resident = tuple(resident)
        self.model = clip.cond_stage_model
        self._dim = dim

    @property
    def dim(self) -> int:
        """Features of a state."""
        if self._dim is None:
            self._dim = int(self._encode("").shape[-1])
        return self._dim

    def encode(self, prompt: str) -> Encoded:
        """See TextEncoder.encode; the prompt is cleaned as Wan does, and ComfyUI's (word:1.2) weights work.

        Raises PromptError for what is no text, and for a CLIP of another model.
        """
        if not isinstance(prompt, str):
            raise PromptError(f"a prompt must be text, not {type(prompt).__name__}")
        states = self._encode(clean_text(prompt))
        length = max(1, int(states.ne(0).any(dim=1).sum()))
        return Encoded(true_rows(states), length, length > MAX_TOKENS)

    def _encode(self, text: str) -> Tensor:
        """All rows, padding and surplus included."""
        conditioning = self.clip.encode_from_tokens_scheduled(self.clip.tokenize(text))
        if self.resident:
            comfy.model_management.load_models_gpu(list(self.resident))
        states_of(conditioning, self._dim)
        return conditioning[0][0][0].detach().float()
