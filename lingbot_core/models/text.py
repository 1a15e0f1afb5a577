"""umT5 text states for the DiT: cleaning, tokens, encoder, and the names its weights have in the wild.

The encoder itself is transformers' UMT5EncoderModel (4.50 to 5.x).
"""

from __future__ import annotations

import html
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputFileError, NumericsError, PromptError, WeightsError

MAX_TOKENS = 512

# Wan's own checkpoint names inside and outside the blocks -> transformers' names.
_OUTER = {
    "token_embedding.weight": "shared.weight",
    "norm.weight": "encoder.final_layer_norm.weight",
}
_INNER = {
    "norm1.weight": "layer.0.layer_norm.weight",
    "attn.q.weight": "layer.0.SelfAttention.q.weight",
    "attn.k.weight": "layer.0.SelfAttention.k.weight",
    "attn.v.weight": "layer.0.SelfAttention.v.weight",
    "attn.o.weight": "layer.0.SelfAttention.o.weight",
    "pos_embedding.embedding.weight": "layer.0.SelfAttention.relative_attention_bias.weight",
    "norm2.weight": "layer.1.layer_norm.weight",
    "ffn.gate.0.weight": "layer.1.DenseReluDense.wi_0.weight",
    "ffn.fc1.weight": "layer.1.DenseReluDense.wi_1.weight",
    "ffn.fc2.weight": "layer.1.DenseReluDense.wo.weight",
}
_TIED = "encoder.embed_tokens.weight"

# What of a configuration is used. Others may name code on a server (attn_implementation) or change the loading.
_CONFIG_FIELDS = frozenset(
    {
        "vocab_size",
        "d_model",
        "d_kv",
        "d_ff",
        "num_layers",
        "num_heads",
        "relative_attention_num_buckets",
        "relative_attention_max_distance",
        "feed_forward_proj",
        "layer_norm_epsilon",
        "dropout_rate",
    }
)


def clean_text(text: str) -> str:
    """Cleans a prompt as Wan does: mojibake and full-width forms repaired, HTML entities resolved twice, every run of
    white space one space."""
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


def load_tokenizer(folder: str | Path) -> Any:
    """Loads the umT5 tokenizer from a local folder; never asks a server, and never runs code that lies in the folder.

    Raises InputFileError, for a folder that asks for code of its own too.
    """
    folder = Path(folder)
    try:
        found = {path.name for path in folder.iterdir() if path.is_file()}
    except (FileNotFoundError, NotADirectoryError):
        raise InputFileError(
            f"there is no tokenizer folder {folder}; it is the folder google/umt5-xxl of the model's download"
        ) from None
    except OSError as error:
        raise InputFileError(
            f"the tokenizer folder {folder} cannot be read: {error.strerror}; change its permissions"
        ) from error
    if not found & {"tokenizer.json", "spiece.model"}:
        raise InputFileError(f"{folder} is not a tokenizer folder: it holds neither tokenizer.json nor spiece.model")
    for name in sorted(found):
        if name.endswith(".json") and name != "tokenizer.json":
            _refuse_code(folder / name)
    from transformers import AutoTokenizer

    try:
        # Without the explicit False transformers asks on the terminal whether code in the folder may run.
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # transformers raises a different type for every way in which a folder can be broken.
        raise InputFileError(f"the tokenizer in {folder} cannot be read: {error}") from error


def _refuse_code(file: Path) -> None:
    """Raises InputFileError when a configuration names classes of its own (``auto_map``) instead of transformers'."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # transformers will say what is wrong with it
    if isinstance(about, dict) and "auto_map" in about:
        raise InputFileError(
            f"{file} asks for code of its own (auto_map), which is never run; use umT5's tokenizer, the folder "
            "google/umt5-xxl of the model's download"
        )


def convert_umt5_keys(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Renames a umT5 encoder's keys to transformers' names; values are passed through.

    Takes Wan's ``.pth`` names or transformers' own. The tied copy of the embedding, the decoder of a whole umT5 and a
    packed tokenizer are left out. Unknown names pass through, for `load_umt5` to report.
    """
    converted: dict[str, Any] = {}
    for name, value in state_dict.items():
        if name == "spiece_model" or name.startswith(("decoder.", "lm_head.")):
            continue
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        if block and block[2] in _INNER:
            name = f"encoder.block.{block[1]}.{_INNER[block[2]]}"
        elif name == _TIED:
            if "shared.weight" in state_dict:
                continue
            name = "shared.weight"
        converted[_OUTER.get(name, name)] = value
    return converted


def umt5_config_from_shapes(shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the arguments of a UMT5Config from the encoder's names and shapes, in either naming.

    shapes: name -> shape, or name -> anything with a ``shape``. Raises WeightsError naming what is missing.
    """
    named = convert_umt5_keys(shapes)

    def size(name: str, axis: int) -> int:
        if name not in named:
            raise WeightsError(f"not a umT5 encoder: there is no tensor {name!r} (transformers' name)")
        shape: Sequence[int] = getattr(named[name], "shape", named[name])
        return int(shape[axis])

    attention = "encoder.block.0.layer.0.SelfAttention"
    buckets, heads = (size(f"{attention}.relative_attention_bias.weight", axis) for axis in (0, 1))
    inner = size(f"{attention}.q.weight", 0)
    if heads < 1 or inner % heads:
        raise WeightsError(f"not a umT5 encoder: {inner} attention features do not divide into {heads} heads")
    layers = {found[1] for name in named if (found := re.match(r"encoder\.block\.(\d+)\.", name))}
    return {
        "vocab_size": size("shared.weight", 0),
        "d_model": size("shared.weight", 1),
        "d_kv": inner // heads,
        "d_ff": size("encoder.block.0.layer.1.DenseReluDense.wi_0.weight", 0),
        "num_layers": len(layers),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "gated-gelu",
        "layer_norm_epsilon": 1e-6,
        "dropout_rate": 0.0,
    }


def build_umt5(
    config: Mapping[str, Any] | Any, *, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32
) -> Any:
    """Builds an empty UMT5EncoderModel for `load_umt5` to fill.

    config: the dict of `umt5_config_from_shapes` or of a config.json, of which the sizes alone are used, or a
    UMT5Config. On the default device (meta) this takes no memory and no time; on another one the parameters are
    allocated but not initialised. Raises WeightsError for values of which no encoder can be made.
    """
    from transformers import UMT5Config, UMT5EncoderModel

    try:
        if isinstance(config, Mapping):
            config = UMT5Config.from_dict({name: value for name, value in config.items() if name in _CONFIG_FIELDS})
        with torch.device("meta"):
            model = UMT5EncoderModel(config)
    except Exception as error:
        # transformers raises a different type for every value that can be wrong.
        reason = " ".join(str(error).split())[:200]
        raise WeightsError(f"no umT5 encoder can be made of this configuration: {reason}") from error
    # Some versions of transformers build the encoder with an embedding of its own, to be tied later.
    model.set_input_embeddings(model.shared)
    model = model.to(dtype=dtype).eval().requires_grad_(False)
    return model if torch.device(device).type == "meta" else model.to_empty(device=device)


def load_umt5(
    model: Any,
    state_dict: Mapping[str, Tensor],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Fills a model of `build_umt5` with weights in either naming and returns it.

    device, dtype: of the parameters afterwards; the model's own by default (the CPU for one on the meta device). The
    tensors of ``state_dict`` become the parameters where they already fit; nothing is copied then. Raises WeightsError
    naming missing, unexpected and misshapen tensors, before anything has changed.
    """
    weights = convert_umt5_keys(state_dict)
    own = {name: parameter for name, parameter in model.state_dict().items() if name != _TIED}
    problems = []
    if missing := sorted(own.keys() - weights.keys()):
        problems.append(f"missing {_some(missing)}")
    if unexpected := sorted(weights.keys() - own.keys()):
        problems.append(f"unexpected {_some(unexpected)}")
    if misshapen := [
        f"{name} {list(weights[name].shape)} instead of {list(own[name].shape)}"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]:
        problems.append(f"of the wrong shape {_some(misshapen)}")
    if problems:
        raise WeightsError("these weights do not fit the umT5 encoder: " + "; ".join(problems))

    if device is None:
        here = own["shared.weight"].device
        device = "cpu" if here.type == "meta" else here
    fitted = {name: tensor.to(device=device, dtype=dtype or own[name].dtype) for name, tensor in weights.items()}
    fitted[_TIED] = fitted["shared.weight"]
    model.load_state_dict(fitted, assign=True)
    model.set_input_embeddings(model.shared)
    return model.eval().requires_grad_(False)


def _some(names: list[str], limit: int = 5) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Encoded:
    """An encoded prompt.

    states: [L, dim], L = min(tokens, max_tokens); no padding. tokens: of the whole prompt, the closing </s> included.
    truncated: whether the end of the prompt was left out.
    """

    states: Tensor
    tokens: int
    truncated: bool


class TextEncoder:
    """Prompt in, umT5 states out.

    device: where the model runs and the states are returned; by default wherever its parameters are at that time.
    dtype: of the returned states; the model's own by default. The model is never moved. May be shared by threads.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_tokens: int = MAX_TOKENS,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise WeightsError("this tokenizer has no end token </s>; use the one that belongs to umT5")
        if max_tokens < 1:
            raise PromptError(f"max_tokens={max_tokens} must be at least 1")
        self.model = model
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.device = device
        self.dtype = dtype
        # Fast tokenizers change settings of their own during a call and fail when two threads are inside.
        self._lock = threading.Lock()

    @property
    def dim(self) -> int:
        """Features of a state."""
        return int(self.model.config.d_model)

    def count_tokens(self, prompt: str) -> int:
        """Tokens of the whole cleaned prompt, the closing </s> included; above max_tokens it will be truncated."""
        return len(self.tokens(prompt))

    @torch.no_grad()
    def encode(self, prompt: str) -> Encoded:
        """Encodes one prompt; an empty one gives the state of </s> alone.

        A prompt that is too long keeps its first max_tokens - 1 tokens and </s>. Raises PromptError (not text),
        WeightsError (tokenizer of another model), NumericsError (the encoder overflowed).
        """
        every = self.tokens(prompt)
        ids = every if len(every) <= self.max_tokens else [*every[: self.max_tokens - 1], every[-1]]
        return Encoded(self.states(ids), len(every), len(every) > self.max_tokens)

    @torch.no_grad()
    def states(self, ids: Sequence[int]) -> Tensor:
        """[L, dim] of L token numbers, the closing </s> included. Raises WeightsError and NumericsError as `encode`."""
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if max(ids) >= vocabulary:
            raise WeightsError(
                f"the tokenizer gave token {max(ids)} but this text encoder knows {vocabulary}; use the tokenizer that "
                "belongs to it"
            )
        device = self.device or next(self.model.parameters()).device
        tokens = torch.tensor([list(ids)], device=device)
        output = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        states: Tensor = output.last_hidden_state[0]
        if not torch.isfinite(states).all():
            raise NumericsError("the text encoder produced NaN or infinity; load it in bfloat16 or float32")
        return states.to(self.dtype or states.dtype)

    def tokens(self, prompt: str, *, clean: bool = True) -> list[int]:
        """Token numbers of the prompt, the closing </s> included, however long. Raises PromptError.

        clean: False for a piece of a prompt that was cleaned as a whole, whose outer spaces count.
        """
        if not isinstance(prompt, str):
            raise PromptError(f"a prompt must be text, not {type(prompt).__name__}")
        text = clean_text(prompt) if clean else prompt
        with self._lock:
            # Truncated by `encode` instead: the number of tokens beyond the limit is what the user needs to know.
            ids = list(self.tokenizer(text, padding=False, truncation=False, verbose=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        return ids if ids and ids[-1] == end else [*ids, end]
