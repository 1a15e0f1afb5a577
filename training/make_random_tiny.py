"""Writes a tiny model with fixed random weights: the real structure and code path, smaller than the embedded one.

    python -m training.make_random_tiny FOLDER

It has learnt nothing; what it shows is texture. Tests take it where a model has to be untrained, noisy or quick.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lingbot_core.models.dit import CausalWanDiT, DiTConfig
from lingbot_core.models.text import build_umt5
from lingbot_core.models.vae import VAEConfig, WanVAE

SEED = 20260129
DIT = DiTConfig(dim=128, ffn_dim=256, num_layers=4, num_heads=2, freq_dim=64, text_dim=64)
VAE = VAEConfig(dim=16, num_res_blocks=1)
TEXT = {
    "vocab_size": 259,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "gated-gelu",
    "layer_norm_epsilon": 1e-6,
    "dropout_rate": 0.0,
    "tie_word_embeddings": True,
    "is_encoder_decoder": False,
    "use_cache": False,
}
ABOUT = {
    "name": "tiny",
    "preset": "tiny",
    "native_area": 96 * 160,
    "trained": False,
    "note": "random weights made by training/make_random_tiny.py; the picture is texture, not a world",
}


def random_weights(module: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Keeps the variance of activations about constant; norms are 1, biases 0, modulation rows small."""
    weights = {}
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        if name.endswith(("gamma", "norm_q.weight", "norm_k.weight", "norm3.weight", "layer_norm.weight")):
            value = torch.ones(shape)
        elif "modulation" in name:
            value = torch.randn(shape, generator=generator) * 0.3
        elif len(shape) < 2:
            value = torch.zeros(shape)
        else:
            # A causal convolution sees zeros in two of its three frames at first; count one.
            fan_in = math.prod(shape[1:]) if len(shape) < 5 else shape[1] * math.prod(shape[3:])
            gain = 0.3 if "cam_scale" in name or "cam_shift" in name else 1.0
            value = torch.randn(shape, generator=generator) * gain / math.sqrt(fan_in)
        weights[name] = value.half().contiguous()
    return weights


def tokenizer_files(folder: Path) -> None:
    """A byte-level tokenizer with umT5's special tokens: any text, no vocabulary to learn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)


def main(folder: Path) -> None:
    """Writes world.json, transformer, vae, text_encoder and tokenizer below ``folder``."""
    generator = torch.Generator().manual_seed(SEED)
    for name in ("transformer", "vae", "text_encoder", "tokenizer"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    dit = random_weights(CausalWanDiT(DIT, device="meta"), generator)
    save_file(dit, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    about_dit = {"num_heads": DIT.num_heads, "text_len": DIT.text_len, "control_type": DIT.control}
    write_json(folder / "transformer" / "config.json", about_dit)
    vae = random_weights(WanVAE(VAE, device="meta"), generator)
    # Latents of about unit size and pictures that fill the range: a random decoder is timid.
    vae["decoder.head.2.weight"] *= 0.6
    save_file(vae, folder / "vae" / "diffusion_pytorch_model.safetensors")
    text = random_weights(build_umt5(TEXT), generator)
    save_file(text, folder / "text_encoder" / "model.safetensors")
    write_json(folder / "text_encoder" / "config.json", TEXT)
    tokenizer_files(folder / "tokenizer")
    write_json(folder / "world.json", ABOUT)


def write_json(path: Path, data: dict[str, object]) -> None:
    """Indented, with a closing newline."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("name the folder to write to: python -m training.make_random_tiny FOLDER")
    main(Path(sys.argv[1]))
