"""What ``lingbot-world convert`` writes, in the loaders of a real ComfyUI."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path

import comfy.model_detection
import comfy.ops
import comfy.sd
import comfy.text_encoders.t5
import comfy.text_encoders.wan
import comfy.utils
import nodes
import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lingbot_core.cli import main
from lingbot_core.models.text import build_umt5, load_umt5, umt5_config_from_shapes
from lingbot_core.models.vae import VAEConfig, WanVAE
from lingbot_core.weights import convert

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "data"
PUBLISHED = json.loads((GOLDENS / "checkpoint_layout.json").read_text(encoding="utf-8"))
UMT5_XXL = json.loads(Path(comfy.text_encoders.wan.__file__).with_name("umt5_config_xxl.json").read_text())
WANT5 = "models_t5_umt5-xxl-enc-bf16"


def convert_to(models: Path, source: Path, *options: str) -> Path:
    """Runs the command and returns the one file that it made."""
    assert main(["convert", str(source), str(models), *options]) == 0
    [file] = models.rglob("*.safetensors")
    return file


def small_noise(shapes: dict[str, list[int]], dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (1 + values if name.endswith("gamma") else values).to(dtype)
        for name, shape in shapes.items()
        for values in [torch.empty(shape).uniform_(-0.03, 0.03, generator=generator)]
    }


def test_the_vae_of_full_size_loads_in_vaeloader_and_codes_as_ours(models, tmp_path, caplog):
    weights = small_noise(PUBLISHED["wan21_vae_pth"]["shapes"], torch.bfloat16)
    torch.save(weights, tmp_path / "Wan2.1_VAE.pth")
    file = convert_to(models, tmp_path / "Wan2.1_VAE.pth", "--only", "vae")
    assert file == models / "vae" / "wan_2.1_vae.safetensors"
    assert file.name in nodes.VAELoader.vae_list(nodes.VAELoader)

    with caplog.at_level(logging.DEBUG):
        [vae] = nodes.VAELoader().load_vae(file.name)
    assert not [record for record in caplog.messages if "Missing VAE keys" in record or "Leftover VAE keys" in record]
    assert type(vae.first_stage_model).__module__ == "comfy.ldm.wan.vae"
    loaded = vae.first_stage_model.state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name].to(loaded[name].dtype)) for name in weights)

    picture = torch.rand(1, 16, 24, 3, generator=torch.Generator().manual_seed(1))
    latents = vae.encode(picture)
    ours = WanVAE()
    ours.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    ours.eval().requires_grad_(False)
    expected = ours.encode(picture.permute(3, 0, 1, 2) * 2 - 1)
    latent_format = comfy.latent_formats.Wan21()
    torch.testing.assert_close(latent_format.process_in(latents)[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dim_mult", [(1, 2, 4, 4), (1, 2, 2, 4)])
def test_a_vae_that_vaeloader_cannot_load_is_told_when_it_is_converted(models, tmp_path, capsys, dim_mult):
    weights = WanVAE(VAEConfig(dim=8, dim_mult=dim_mult)).state_dict()
    save_file(weights, tmp_path / "small_vae.safetensors")
    file = convert_to(models, tmp_path / "small_vae.safetensors", "--only", "vae")
    told = "VAELoader cannot use it" in capsys.readouterr().err
    try:
        nodes.VAELoader().load_vae(file.name)
    except RuntimeError:
        assert told
    else:
        assert not told


@pytest.fixture
def full_size_text(tmp_path: Path) -> Path:
    """The published text encoder, 11 GB: a file of the right size that takes no room, because it is one hole."""
    offset, header = 0, {}
    for name, shape in PUBLISHED["umt5_xxl_enc_pth"]["shapes"].items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path = tmp_path / f"{WANT5}.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return path


def test_the_text_encoder_of_full_size_has_the_names_and_shapes_of_comfyuis_umt5(full_size_text, tmp_path, monkeypatch):
    usage = convert.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda folder: usage._replace(free=10**12))
    (tmp_path / "umt5-xxl").mkdir()
    (tmp_path / "umt5-xxl" / "spiece.model").write_bytes(b"words")
    [output] = convert.plan(full_size_text, tmp_path / "models", only="text").outputs
    planned = {tensor.name: tensor.shape for tensor in output.file.tensors}
    assert output.path == tmp_path / "models" / "text_encoders" / "umt5_xxl_bf16.safetensors"
    assert planned.pop("spiece_model") == (5,)

    model = comfy.text_encoders.t5.T5(UMT5_XXL, torch.bfloat16, "meta", comfy.ops.manual_cast)
    assert planned == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    state = {name: torch.empty(shape, device="meta") for name, shape in planned.items()}
    assert comfy.sd.detect_te_model(state) is comfy.sd.TEModel.T5_XXL


def test_comfyuis_t5_gives_the_hidden_states_of_the_reference_from_a_converted_file(models, tmp_path):
    golden = load_file(GOLDENS / "t5.safetensors")
    weights = {name.removeprefix("state_dict."): t for name, t in golden.items() if name.startswith("state_dict.")}
    torch.save(weights, tmp_path / f"{WANT5}.pth")
    converted = load_file(convert_to(models, tmp_path / f"{WANT5}.pth", "--only", "text", "--dtype", "fp32"))
    sizes = umt5_config_from_shapes({name: tensor.shape for name, tensor in converted.items()})
    config = UMT5_XXL | {
        name: sizes[name] for name in ("d_ff", "d_kv", "d_model", "num_heads", "num_layers", "vocab_size")
    }
    model = comfy.text_encoders.t5.T5(config, torch.float32, "cpu", comfy.ops.manual_cast)
    model.load_state_dict(converted)
    ids, mask = golden["in.ids"], golden["in.mask"]
    with torch.no_grad():
        states, _ = model(ids, mask)
        ours = load_umt5(build_umt5(sizes), converted)(ids, attention_mask=mask).last_hidden_state
    real = mask.bool()
    torch.testing.assert_close(states[real], golden["out.hidden"][real], atol=1e-4, rtol=0)
    torch.testing.assert_close(states[real], ours[real], atol=1e-4, rtol=0)


def test_cliploader_of_type_wan_reads_file_and_tokenizer_and_gives_our_states(models, tmp_path, monkeypatch):
    # ComfyUI knows a umT5-xxl by its 24 blocks of 10240; all other sizes come from a file beside its module.
    small = {"d_model": 32, "d_kv": 8, "num_heads": 4, "vocab_size": 300, "d_ff": 10240, "num_layers": 24}
    (tmp_path / "umt5_config_xxl.json").write_text(json.dumps(UMT5_XXL | small))
    monkeypatch.setattr(comfy.text_encoders.wan, "__file__", str(tmp_path / "wan.py"))
    model = build_umt5(small | {"feed_forward_proj": "gated-gelu"}, device="cpu")
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        scale = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        parameter.data.normal_(0, scale, generator=generator)
    source = tmp_path / "umt5"
    (source / "tokenizer").mkdir(parents=True)
    (source / "tokenizer" / "spiece.model").write_bytes(words := train_tokenizer())
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "encoder.embed_tokens.weight"}
    save_file(weights, source / "model.safetensors")
    file = convert_to(models, source / "model.safetensors", "--only", "text", "--dtype", "fp32")

    [clip] = nodes.CLIPLoader().load_clip(file.name, "wan")
    prompt = "a quiet harbour at dawn, boats"
    states = clip.encode_from_tokens(clip.tokenize(prompt))
    ids = sentencepiece.SentencePieceProcessor(model_proto=words, add_eos=True).encode(prompt)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).last_hidden_state
    assert states.shape == (1, 512, 32)
    torch.testing.assert_close(states[:, : len(ids)], expected, atol=1e-4, rtol=0)
    assert not states[:, len(ids) :].any()


def train_tokenizer() -> bytes:
    """A sentencepiece model with umT5's special tokens: pad 0, end 1, unknown 2."""
    text = re.split(" ", "a quiet harbour at dawn with small boats and gulls over the grey water")
    sentences = [" ".join(text[i % 14 :] + text[: i % 14]) for i in range(60)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, vocab_size=48, hard_vocab_limit=False,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def test_load_diffusion_model_refuses_the_transformer_instead_of_taking_it_for_a_wan(models, caplog):
    file = convert_to(models, Path("tiny"), "--only", "dit")
    sd = comfy.utils.load_torch_file(str(file))
    # By its names alone it is a Wan: the camera layers would be dropped with a line in the log.
    assert comfy.model_detection.detect_unet_config(sd, "", metadata=None)["image_model"] == "wan2.1"
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="Could not detect model type"):
        nodes.UNETLoader().load_unet(file.name, "default")
    assert "load it with the LingBot World nodes" in caplog.text
