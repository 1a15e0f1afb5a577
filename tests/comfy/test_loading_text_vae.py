"""CLIP, CONDITIONING and VAE: ComfyUI's own nodes work with ours, and ours with ComfyUI's."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import comfy.latent_formats
import comfy.ldm.wan.vae2_2
import comfy.model_management
import comfy.sd
import comfy.supported_models_base
import comfy.text_encoders.wan
import nodes
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PACK = "lingbot_world_pack"
ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = json.loads((ROOT / "tests" / "goldens" / "data" / "checkpoint_layout.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def as_in_a_node(pack: ModuleType) -> Iterator[None]:
    with torch.inference_mode():
        yield
    comfy.model_management.unload_all_models()


def part(name: str) -> ModuleType:
    return importlib.import_module(f"{PACK}.{name}")


@pytest.fixture(scope="module")
def tiny(pack: ModuleType) -> tuple[Any, Any, Any]:
    with torch.inference_mode():
        return part("nodes.loading").LoadWorldFolder.execute("tiny", "as stored", "auto").args


@pytest.fixture(scope="module")
def encoder(pack: ModuleType) -> Any:
    """The library's own text encoder of the embedded model."""
    load, layout = part("lingbot_core.weights.load"), part("lingbot_core.weights.layout").find_layout("tiny")
    length = load.dit_config(layout.transformer.open(), layout.transformer.config).text_len
    return load.load_text(layout, max_tokens=length, device=torch.device("cpu"), dtype=torch.float32)


# Text


@pytest.mark.parametrize("prompt", ["", "a harbour", "Ｆｕｌｌ &amp; 雾中的港口 \n 🙂", "x" * 2000])
def test_cliptextencode_gives_the_states_of_the_library_and_zeros_after_them(tiny, encoder, prompt):
    length = tiny[0].model.diffusion_model.config.text_len
    [conditioning] = nodes.CLIPTextEncode().encode(tiny[1], prompt)
    expected = encoder.encode(prompt).states
    [[states, about]] = conditioning
    assert states.shape == (1, length, encoder.dim)
    assert torch.equal(states[0, : len(expected)], expected)
    assert not states[0, len(expected) :].any()
    assert about["pooled_output"] is None
    assert torch.equal(part("nodes.host.text").states_of(conditioning, encoder.dim), expected)


def test_words_in_brackets_weigh_more_as_everywhere_in_comfyui(tiny, encoder):
    clip = tiny[1]
    plain, strong = (clip.encode_from_tokens(clip.tokenize(text)) for text in ("a red boat", "a (red:1.5) boat"))
    changed = (plain != strong).any(dim=2)[0].nonzero().flatten()
    [ids] = clip.tokenize("a (red:1.5) boat").values()
    weighted = [place for place, (_, weight) in enumerate(ids[0]) if weight != 1.0]
    assert changed.tolist() == weighted
    empty = clip.encode_from_tokens(clip.tokenize(""))
    expected = (plain[0, weighted] - empty[0, weighted]) * 1.5 + empty[0, weighted]
    torch.testing.assert_close(strong[0, weighted], expected)
    # A bracket that is meant as one.
    assert torch.equal(
        clip.encode_from_tokens(clip.tokenize(r"a \(red\) boat"))[0, :13], encoder.encode("a (red) boat").states[:13]
    )


def test_a_clip_of_ours_can_be_cloned_moved_and_unloaded(tiny):
    clip = tiny[1]
    before = clip.encode_from_tokens(clip.tokenize("a harbour"))
    comfy.model_management.unload_all_models()
    assert torch.equal(clip.clone().encode_from_tokens(clip.tokenize("a harbour")), before)


def test_clip_as_a_worlds_text_encoder_counts_and_cuts_as_the_library_does(tiny, encoder):
    text = part("nodes.host.text").ClipText(tiny[1])
    assert text.dim == encoder.dim
    for prompt in ("a harbour", "x" * 127):
        mine, theirs = text.encode(prompt), encoder.encode(prompt)
        assert torch.equal(mine.states, theirs.states)
        assert (mine.tokens, mine.truncated) == (theirs.tokens, theirs.truncated)
    with pytest.raises(Exception, match="a prompt must be text, not int"):
        text.encode(3)


def test_a_running_world_is_loaded_again_after_a_prompt_was_encoded(tiny, monkeypatch):
    calls: list[list[Any]] = []
    load = comfy.model_management.load_models_gpu

    def record(models: list[Any], **how: Any) -> None:
        calls.append(list(models))
        load(models, **how)

    monkeypatch.setattr(comfy.model_management, "load_models_gpu", record)
    found = part("nodes.host.worlds").host_world(tiny[0], tiny[2], tiny[1])
    found.world.encode_text("a harbour")
    assert calls == [[tiny[1].patcher], found.patchers]


SMALL_XXL = {"d_model": 32, "d_kv": 8, "num_heads": 4, "vocab_size": 300, "d_ff": 10240, "num_layers": 24}
"""ComfyUI knows a umT5-xxl by 24 blocks of 10240; its other sizes come from a file beside its module."""


def small_wan_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Of ComfyUI's own class for umT5, made small."""
    from comfy.text_encoders import t5

    path = Path(comfy.text_encoders.wan.__file__).with_name("umt5_config_xxl.json")
    config = json.loads(path.read_text(encoding="utf-8")) | SMALL_XXL
    (tmp_path / "umt5_config_xxl.json").write_text(json.dumps(config))
    monkeypatch.setattr(comfy.text_encoders.wan, "__file__", str(tmp_path / "wan.py"))
    model = t5.T5(config, torch.float32, "cpu", comfy.ops.manual_cast)
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(p.shape, generator=generator) * 0.05 for name, p in model.state_dict().items()}


def small_wan_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    state = small_wan_weights(tmp_path, monkeypatch)
    state["spiece_model"] = torch.frombuffer(bytearray(sentencepiece_model()), dtype=torch.uint8)
    return comfy.sd.load_text_encoder_state_dicts([state], clip_type=comfy.sd.CLIPType.WAN)


WORDS = "a quiet harbour at dawn with small boats and gulls over the grey water"


def sentencepiece_model() -> bytes:
    import io

    import sentencepiece

    text = WORDS.split(" ")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(text[i % 14 :] + text[: i % 14]) for i in range(60)]), model_writer=out,
        vocab_size=48, hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    return out.getvalue()


def test_the_native_wan_clip_works_as_it_is(tmp_path, monkeypatch, tiny):
    clip = small_wan_clip(tmp_path, monkeypatch)
    [conditioning] = nodes.CLIPTextEncode().encode(clip, "a quiet harbour")
    states = part("nodes.host.text").states_of(conditioning, 32)
    [[ids]] = clip.tokenize("a quiet harbour").values()
    assert len(states) == [token for token, _ in ids].index(1) + 1
    encoded = part("nodes.host.text").ClipText(clip).encode("a quiet harbour")
    assert torch.equal(encoded.states, states.float())
    assert (encoded.tokens, encoded.truncated) == (len(states), False)
    long = part("nodes.host.text").ClipText(clip).encode("boats " * 520)
    assert (len(long.states), long.truncated) == (512, True)
    assert long.tokens > 512
    # A world of another width.
    world = part("nodes.host.worlds").host_world(tiny[0], tiny[2], clip).world
    with pytest.raises(Exception, match="is 32 wide; this model takes one 64 wide"):
        world.encode_text("a harbour")


def test_an_xxl_text_encoder_of_a_folder_is_loaded_by_comfyui_itself(tmp_path, monkeypatch):
    clip_module = part("nodes.host.clip")
    monkeypatch.setattr(clip_module, "_XXL", SMALL_XXL)
    weights = small_wan_weights(tmp_path, monkeypatch)
    folder = tmp_path / "text_encoder"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    words = tmp_path / "words"
    words.mkdir()
    find = part("lingbot_core.weights.layout").find_layout
    (words / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(Exception, match=r"words has no spiece\.model, which ComfyUI needs"):
        clip_module.native_clip(find("tiny", text_encoder=folder, tokenizer=words), max_tokens=512)
    (words / "spiece.model").write_bytes(sentencepiece_model())
    clip = clip_module.native_clip(find("tiny", text_encoder=folder, tokenizer=words), max_tokens=512)
    assert type(clip.cond_stage_model).__mro__[1] is comfy.text_encoders.wan.WanT5Model
    loaded = clip.cond_stage_model.umt5xxl.transformer.state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name].to(loaded[name].dtype)) for name in weights)
    [[ids]] = clip.tokenize("a quiet harbour").values()
    assert [token for token, _ in ids][:4].count(2) == 0


@pytest.mark.parametrize(
    ("conditioning", "message"),
    [
        (
            [[torch.ones(1, 77, 2048), {"pooled_output": torch.ones(1, 1280)}]],
            "2048 wide and has a pooled output.*SDXL",
        ),
        ([[torch.ones(1, 77, 768), {}]], "768 wide, as for Stable Diffusion 1.5"),
        ([[torch.ones(1, 256, 4096), {"pooled_output": torch.ones(1, 768)}]], "4096 wide and has a pooled output"),
        ([[torch.ones(1, 4, 64), {}], [torch.ones(1, 4, 64), {}]], "joins 2 prompts"),
        ([[torch.ones(2, 4, 64), {}]], r"states of shape \[2, 4, 64\]"),
        ([], "empty or unknown"),
        ("words", "is str"),
    ],
)
def test_conditioning_of_other_models_is_refused_by_its_widths(conditioning, message):
    with pytest.raises(Exception, match=f"{message}.*CLIPTextEncode"):
        part("nodes.host.text").states_of(conditioning)


def test_what_is_no_clip_is_refused_by_its_kind(tiny):
    # An input of any type, such as a reroute of an older graph, lets it through.
    with pytest.raises(Exception, match="the CLIP input got Tensor, which is no CLIP of ComfyUI; encode the prompt"):
        part("nodes.host.worlds").host_world(tiny[0], tiny[2], torch.zeros(1))


def test_a_zeroed_conditioning_is_one_row_of_zeros(tiny):
    [conditioning] = nodes.CLIPTextEncode().encode(tiny[1], "a harbour")
    [zeroed] = nodes.ConditioningZeroOut().zero_out(conditioning)
    states = part("nodes.host.text").states_of(zeroed)
    assert states.shape == (1, 64)
    assert not states.any()


# VAE


def library_vae() -> Any:
    load, layout = part("lingbot_core.weights.load"), part("lingbot_core.weights.layout").find_layout("tiny")
    return load.load_vae(layout, device=torch.device("cpu"), dtype=torch.float32)


def test_vaedecode_and_vaeencode_work_with_the_vae_of_a_folder(tiny):
    vae, ours = tiny[2], library_vae()
    latents = torch.randn(16, 3, 6, 10, generator=torch.Generator().manual_seed(0))
    native = comfy.latent_formats.Wan21().process_out(latents.unsqueeze(0))
    [images] = nodes.VAEDecode().decode(vae, {"samples": native})
    frames = ours.decode(latents)
    assert images.shape == (9, 48, 80, 3)
    torch.testing.assert_close(images, frames.permute(1, 2, 3, 0) / 2 + 0.5, atol=1e-4, rtol=0)
    [encoded] = nodes.VAEEncode().encode(vae, images)
    expected = ours.encode(images.permute(3, 0, 1, 2) * 2 - 1)
    torch.testing.assert_close(
        comfy.latent_formats.Wan21().process_in(encoded["samples"])[0], expected, atol=1e-3, rtol=0
    )


def test_a_world_decodes_and_encodes_bitwise_as_the_library(tiny):
    copy, patcher = part("nodes.host.vae").world_vae(tiny[2])
    comfy.model_management.load_models_gpu([patcher])
    ours = library_vae()
    latents = torch.randn(16, 3, 6, 10, generator=torch.Generator().manual_seed(0))
    assert torch.equal(copy.decode(latents), ours.decode(latents))
    video = torch.rand(3, 5, 48, 80, generator=torch.Generator().manual_seed(1)) * 2 - 1
    assert torch.equal(copy.encode(video), ours.encode(video))
    shared = {p.data_ptr() for p in copy.parameters()} & {p.data_ptr() for p in tiny[2].first_stage_model.parameters()}
    assert not shared


def test_the_encoder_is_float32_and_the_decoder_as_comfyui_loaded_it(tiny):
    vae = part("nodes.host.vae").native_vae(part("lingbot_core.weights.layout").find_layout("tiny"))
    vae.first_stage_model.to(torch.bfloat16)
    copy, _ = part("nodes.host.vae").world_vae(vae)
    kinds = {name.split(".")[0]: p.dtype for name, p in copy.named_parameters()}
    assert kinds == {
        "encoder": torch.float32, "conv1": torch.float32, "decoder": torch.bfloat16, "conv2": torch.bfloat16,
    }  # fmt: skip
    latents = torch.randn(16, 2, 6, 10, generator=torch.Generator().manual_seed(0))
    assert (copy.decode(latents) - library_vae().decode(latents)).abs().mean() < 0.02
    assert copy.encode(torch.zeros(3, 1, 48, 80)).dtype == torch.float32


def test_a_copy_built_of_comfyuis_operations_computes_the_same(tiny, monkeypatch):
    """What a GPU gets; there the weights may stay in main memory until a layer runs."""
    vae = part("nodes.host.vae").native_vae(part("lingbot_core.weights.layout").find_layout("tiny"))
    monkeypatch.setattr(comfy.model_management, "is_device_cpu", lambda device: False)
    copy, _ = part("nodes.host.vae").world_vae(vae)
    assert isinstance(copy.encoder.conv1, comfy.ops.disable_weight_init.Conv3d)
    for layer in copy.modules():
        if hasattr(layer, "comfy_cast_weights"):
            layer.comfy_cast_weights = True
    latents = torch.randn(16, 2, 6, 10, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(copy.decode(latents), library_vae().decode(latents), atol=1e-4, rtol=0)


def small_noise(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (1 + values if name.endswith("gamma") else values)
        for name, shape in shapes.items()
        for values in [torch.empty(shape).uniform_(-0.03, 0.03, generator=generator)]
    }


def test_the_native_vae_of_full_size_works_as_it_is(models):
    (models / "vae").mkdir()
    weights = small_noise(PUBLISHED["wan21_vae_pth"]["shapes"])
    save_file(weights, models / "vae" / "wan_2.1_vae.safetensors")
    [vae] = nodes.VAELoader().load_vae("wan_2.1_vae.safetensors")
    copy, patcher = part("nodes.host.vae").world_vae(vae)
    comfy.model_management.load_models_gpu([patcher])
    assert copy.config == part("lingbot_core.models.vae").VAEConfig()
    latents = torch.randn(16, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    frames = copy.decode(latents)
    native = vae.decode(comfy.latent_formats.Wan21().process_out(latents.unsqueeze(0)))
    torch.testing.assert_close(native[0], frames.permute(1, 2, 3, 0) / 2 + 0.5, atol=1e-4, rtol=0)


def test_a_folder_with_a_vae_of_diffusers_names_gives_comfyuis_vae(tmp_path):
    keys = part("lingbot_core.weights.keys")
    weights = small_noise(PUBLISHED["diffusers_format"]["vae"]["shapes"])
    (tmp_path / "vae").mkdir()
    save_file(weights, tmp_path / "vae" / "diffusion_pytorch_model.safetensors")
    layout = part("lingbot_core.weights.layout").find_layout("tiny", vae=tmp_path / "vae")
    vae = part("nodes.host.vae").native_vae(layout)
    loaded = vae.first_stage_model.state_dict()
    native = keys.native_vae_names(weights)
    assert loaded.keys() == set(native.values())
    assert all(torch.equal(loaded[name], weights[stored]) for stored, name in native.items())


def wan22_vae() -> Any:
    vae = object.__new__(comfy.sd.VAE)
    shape = {"dim": 8, "z_dim": 48, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": []}
    vae.first_stage_model = comfy.ldm.wan.vae2_2.WanVAE(**shape, temperal_downsample=[False, True, True])
    vae.latent_channels, vae.latent_dim = 48, 3
    return vae


def image_vae() -> Any:
    vae = object.__new__(comfy.sd.VAE)
    vae.first_stage_model = torch.nn.Linear(1, 1)
    vae.latent_channels, vae.latent_dim = 4, 2
    return vae


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (wan22_vae, "a Wan 2.2 VAE of 48 latent channels"),
        (image_vae, "an image VAE of 4 latent channels"),
        (lambda: "vae", "got str, which is no VAE"),
    ],
)
def test_other_vaes_are_refused_by_name(tiny, make, message):
    with pytest.raises(Exception, match=f"{message}.*wan_2.1_vae"):
        part("nodes.host.worlds").host_world(tiny[0], make())


def test_an_image_vae_of_vaeloader_is_refused(models):
    """One that ComfyUI really loads: a small AutoencoderKL as Stable Diffusion's."""
    from comfy.ldm.models.autoencoder import AutoencoderKL

    config = {
        "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
        "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
    }  # fmt: skip
    (models / "vae").mkdir()
    save_file(AutoencoderKL(ddconfig=config, embed_dim=4).state_dict(), models / "vae" / "sd.safetensors")
    [vae] = nodes.VAELoader().load_vae("sd.safetensors")
    with pytest.raises(Exception, match=r"an image VAE of 4 latent channels \(AutoencoderKL\)"):
        part("nodes.host.vae").world_vae(vae)


def test_weights_of_the_embedded_vae_are_those_of_the_file(tiny):
    [file] = (ROOT / "lingbot_core" / "assets" / "tiny" / "vae").glob("*.safetensors")
    stored, loaded = load_file(file), tiny[2].first_stage_model.state_dict()
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], stored[name].to(loaded[name].dtype)) for name in stored)
