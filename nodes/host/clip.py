"""Text encoders of a model's folder as ComfyUI's CLIP.

umT5-xxl is loaded by ComfyUI itself, as CLIPLoader with type wan does. Its class has the sizes of xxl built in, so any
other umT5, the embedded one among them, is ours behind the same interface: CLIPTextEncode works with it, weights such
as (word:1.2) included, and for plain prompts it gives bitwise the states of lingbot_core's own text encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.sd
import comfy.supported_models_base
import torch
from comfy.sd1_clip import ClipTokenWeightEncoder, escape_important, token_weights, unescape_important
from torch import Tensor, nn

from ...lingbot_core.errors import WeightsError
from ...lingbot_core.models.text import TextEncoder, clean_text
from ...lingbot_core.weights.layout import Layout
from ...lingbot_core.weights.load import load_text, text_config
from ...lingbot_core.weights.tokenizer import SPIECE, locate, read_bytes

KEY = "umt5xxl"
"""Under which name tokens travel; the one that ComfyUI uses for umT5."""

_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 256384}


def native_clip(layout: Layout, *, max_tokens: int, disable_dynamic: bool = False) -> comfy.sd.CLIP:
    """A layout's text encoder as CLIP. max_tokens: of a prompt. Raises WeightsError."""
    layout.require("text encoder", "tokenizer")
    assert layout.text is not None
    assert layout.tokenizer is not None
    checkpoint = layout.text.open()
    sizes = text_config(checkpoint, layout.text.config)
    if any(sizes[name] != size for name, size in _XXL.items()):
        return _own(layout, max_tokens)
    words = locate(layout.tokenizer, SPIECE)
    if words is None:
        raise WeightsError(
            f"{layout.tokenizer} has no spiece.model, which ComfyUI needs for umT5-xxl; put the folder google/umt5-xxl "
            "of the model's download there, or use CLIPLoader with umt5_xxl_fp16.safetensors"
        )
    # Multiplied out in float32, a scaled fp8 file would be four times its size.
    dtype = torch.bfloat16 if checkpoint.scaled else None
    weights = {name: checkpoint.read(name, dtype=dtype) for name in checkpoint}
    weights["spiece_model"] = torch.frombuffer(bytearray(read_bytes(words, SPIECE)), dtype=torch.uint8)
    return comfy.sd.load_text_encoder_state_dicts(
        [weights], clip_type=comfy.sd.CLIPType.WAN, disable_dynamic=disable_dynamic
    )


def _own(layout: Layout, max_tokens: int) -> comfy.sd.CLIP:
    # It is small. On the CPU it needs no room on the GPU, and its numbers are the same on every machine.
    cpu = torch.device("cpu")
    encoder = load_text(layout, max_tokens=max_tokens, device=cpu, dtype=torch.float32)
    target = comfy.supported_models_base.ClipTarget(
        lambda **_: PromptTokenizer(encoder), lambda **_: TextStates(encoder)
    )
    options = {"load_device": cpu, "offload_device": cpu, "initial_device": cpu, "dtype": torch.float32}
    return comfy.sd.CLIP(target, model_options=options)


class PromptTokenizer:
    """What ComfyUI calls a tokenizer: text -> {KEY: [[(token, weight), ...]]}, padded to what the model reads."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder

    def tokenize_with_weights(
        self, text: str, return_word_ids: bool = False, **_: Any
    ) -> dict[str, list[list[tuple[Any, ...]]]]:
        """Parts in brackets weigh more, as everywhere in ComfyUI. Prompts that are too long lose their end."""
        weighed = token_weights(escape_important(clean_text(text)), 1.0)
        parts = [(unescape_important(part), weight) for part, weight in weighed if part]
        # In one piece, so that a plain prompt has the tokens that it has elsewhere.
        if all(weight == 1.0 for _, weight in parts):
            parts = [("".join(part for part, _ in parts), 1.0)]
        end = self._encoder.tokenizer.eos_token_id
        tokens = [(token, weight) for part, weight in parts for token in self._encoder.tokens(part, clean=False)[:-1]]
        limit = self._encoder.max_tokens
        tokens = [*tokens[: limit - 1], (end, 1.0)]
        tokens += [(0, 1.0)] * (limit - len(tokens))
        return {KEY: [[(*token, 0) for token in tokens] if return_word_ids else tokens]}

    def untokenize(self, tokens: Sequence[tuple[Any, ...]]) -> list[tuple[tuple[Any, ...], str]]:
        """Each token with its text."""
        return [(token, self._encoder.tokenizer.decode([token[0]])) for token in tokens]

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing that would be saved beside the weights."""
        return {}


class TextStates(nn.Module, ClipTokenWeightEncoder):
    """What ComfyUI calls a cond_stage_model: tokens -> states [1, max_tokens, dim], zero beyond the last token."""

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        self.transformer = encoder.model
        self.dtypes = {torch.float32}
        self._encoder = encoder

    def encode_token_weights(self, token_weight_pairs: Any) -> tuple[Tensor, None]:
        """See ClipTokenWeightEncoder; takes what the tokenizer gives."""
        return super().encode_token_weights(token_weight_pairs[KEY])

    def encode(self, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, None]:
        """States of each list of tokens, which ends with its first end token; there is no pooled output."""
        end = self._encoder.tokenizer.eos_token_id
        return torch.cat([self._states(list(ids), end) for ids in tokens]), None

    def _states(self, ids: list[int], end: int) -> Tensor:
        states = self._encoder.states(ids[: ids.index(end) + 1])
        return nn.functional.pad(states, (0, 0, 0, len(ids) - len(states))).unsqueeze(0)

    def gen_empty_tokens(self, special_tokens: Any, length: int) -> list[int]:
        """An empty prompt, from which weights are measured."""
        return [self._encoder.tokenizer.eos_token_id, *[0] * (length - 1)]

    special_tokens: Any = None

    def set_clip_options(self, options: Any) -> None:
        """There are no layers to choose from."""

    def reset_clip_options(self) -> None:
        """See set_clip_options."""

    def load_sd(self, weights: Any) -> Any:
        """For ComfyUI's loaders."""
        return self.load_state_dict(weights, strict=False)
