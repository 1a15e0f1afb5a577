"""Every layout loads: the right files are found, and every parameter has the value that was stored."""

from __future__ import annotations

import shutil

import pytest
import torch

from lingbot_core.engine.world import World
from lingbot_core.errors import InputFileError, WeightsError
from lingbot_core.weights.candidates import candidates, transformer_candidates
from lingbot_core.weights.checkpoint import Checkpoint
from lingbot_core.weights.keys import TEXT, VAE, native_vae_names
from lingbot_core.weights.layout import find_layout
from lingbot_core.weights.load import Progress, load_dit, load_text, load_vae

CPU = torch.device("cpu")


def assert_same(module, expected, dtype=torch.float32):
    """Bitwise, and nothing but the expected parameters."""
    own = dict(module.named_parameters())
    assert own.keys() == expected.keys()
    for name, parameter in own.items():
        assert torch.equal(parameter, expected[name].to(dtype)), name


def in_hf_names(checkpoints):
    names = checkpoints.layout["diffusers_format"]["text_encoder"]["from_pth"]
    return {names[name][0]: tensor for name, tensor in checkpoints.text.items()}


LAYOUTS = {
    "v1": (lambda c, root: c.v1(root), "v1-fast"),
    "v1 transformer folder": (lambda c, root: c.v1(root) / "lingbot_world_fast", "v1-fast"),
    "v2": (lambda c, root: c.v2(root), "v2-causal-fast"),
    "v2 not distilled": (lambda c, root: c.v2(root, "transformer_causal"), "v2-causal-pretrain"),
    "diffusers": (lambda c, root: c.diffusers(root), "v2-diffusers"),
    "diffusers transformer file": (
        lambda c, root: c.diffusers(root) / "transformer" / "diffusion_pytorch_model.safetensors",
        "v2-diffusers",
    ),
    "ComfyUI": (lambda c, root: c.comfy(root), "v1-fast"),
    "ComfyUI, model.diffusion_model.": (lambda c, root: c.comfy(root, prefix="model.diffusion_model."), "v1-fast"),
    "ComfyUI, diffusion_model.": (lambda c, root: c.comfy(root, prefix="diffusion_model."), "v1-fast"),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_layout_loads_with_the_stored_values_and_points_to_its_preset(kind, checkpoints, tmp_path):
    write, preset = LAYOUTS[kind]
    layout = find_layout(write(checkpoints, tmp_path))
    assert layout.require_preset().name == preset
    assert layout.missing == {}
    stored = torch.bfloat16 if kind.startswith("ComfyUI") else torch.float32
    dit = load_dit(layout, device=CPU, dtype=torch.float32, attention="math", control="cam")
    assert_same(dit, {name: tensor.to(stored) for name, tensor in checkpoints.dit.items()})
    assert_same(load_vae(layout, device=CPU, dtype=torch.float32), checkpoints.vae)
    text = load_text(layout, max_tokens=512, device=CPU, dtype=torch.bfloat16)
    assert_same(text.model, in_hf_names(checkpoints), torch.bfloat16)


def files_of(part):
    return {file for path in part for file in (path.rglob("*") if path.is_dir() else [path])}


@pytest.mark.parametrize("kind", [*LAYOUTS, "beside a clone"])
def test_every_file_that_is_taken_is_among_the_candidates(kind, checkpoints, tmp_path):
    """The names alone, which nothing is opened for, have to say as much as a look into the files."""
    if kind == "beside a clone":
        whole = checkpoints.v1(tmp_path / "lingbot-world-base-cam")
        root = (whole / "lingbot_world_fast").rename(tmp_path / "lingbot-world-fast")
    else:
        root = LAYOUTS[kind][0](checkpoints, tmp_path)
    layout = find_layout(root)
    alone = set(transformer_candidates(root))
    assert files_of(layout.transformer.files) <= alone
    others = files_of([*layout.vae.files, *layout.text.files, layout.tokenizer])
    assert len(others) >= 3
    assert not others & alone
    if root.is_dir():
        assert others | alone <= set(candidates(root))


def test_candidates_are_named_without_opening_or_reaching_anything(tmp_path):
    assert (candidates(tmp_path / "gone"), transformer_candidates(tmp_path / "gone.safetensors")) == ([], [])
    model = tmp_path / "model"
    for name in ("a.safetensors", "world.json", "picture.png", ".git/b.safetensors", "vae/c.safetensors", "d/d.pth"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_bytes(b"no model")
    (model / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    (tmp_path / "wan_2.1_vae.safetensors").write_bytes(b"no model")
    (tmp_path / "other.safetensors").write_bytes(b"no model")
    own = {model / "a.safetensors", model / "world.json", model / "d/d.pth"}
    assert set(transformer_candidates(model)) == own
    assert set(candidates(model)) == own | {model / "vae/c.safetensors", tmp_path / "wan_2.1_vae.safetensors"}


def test_a_world_of_published_names_encodes_a_prompt_and_reports_its_progress(checkpoints, tmp_path):
    seen = []
    world = World.load(checkpoints.v1(tmp_path), device="cpu", progress=lambda done, total: seen.append((done, total)))
    assert (world.preset.name, world.dit.config.num_heads, world.dit.config.control) == ("v1-fast", 40, "cam")
    assert world.encode_text("a cat").shape[1] == 64
    stored = sum(t.nbytes for part in (checkpoints.dit, checkpoints.vae, checkpoints.text) for t in part.values())
    assert seen[-1] == (stored, stored)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == 1421 + 194 + 242


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_any_stored_dtype_is_cast_to_the_one_asked_for(dtype, suffix, checkpoints, tmp_path):
    state = {name: tensor.to(dtype) for name, tensor in checkpoints.vae.items()}
    checkpoint = Checkpoint(VAE, [checkpoints.write_file(tmp_path / f"vae.{suffix}", state)])
    for target in (torch.float32, torch.bfloat16, None):
        for name in ("encoder.conv1.weight", "decoder.middle.1.norm.gamma"):
            got = checkpoint.read(name, dtype=target)
            assert got.dtype == (target or dtype)
            assert torch.equal(got, state[name].to(target or dtype))


@pytest.mark.parametrize("piece", [1, 7, 64, 2**24])
def test_a_tensor_is_whole_whatever_the_pieces_it_is_read_in(piece, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr("lingbot_core.weights.files.PIECE", piece)
    checkpoint = Checkpoint(VAE, [checkpoints.write_file(tmp_path / "vae.safetensors", checkpoints.vae)])
    for name in ("decoder.conv1.weight", "conv2.bias"):
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(checkpoint.read(name, dtype=dtype), checkpoints.vae[name].to(dtype))


def test_act_control_is_recognised_by_its_input_features(checkpoints, tmp_path):
    checkpoints.v1(tmp_path, checkpoints.act)
    (tmp_path / "lingbot_world_fast" / "config.json").unlink()
    layout = find_layout(tmp_path)
    dit = load_dit(layout, device=CPU, dtype=torch.float32, attention="math", control="act")
    assert dit.config.control == "act"
    assert_same(dit, checkpoints.act)


def test_parts_may_be_given_by_paths_of_their_own(checkpoints, tmp_path):
    model = tmp_path / "lingbot-world-v2-1.3b-causal-fast"
    checkpoints.write_shards(model / "transformers", checkpoints.dit)
    layout = find_layout(model)
    assert layout.require_preset().name == "v2-causal-fast"
    assert (layout.vae, layout.text, layout.tokenizer) == (None, None, None)
    assert set(layout.missing) == {VAE, TEXT, "tokenizer"}
    assert all(str(model) in advice for advice in layout.missing.values())
    with pytest.raises(WeightsError, match=r"there is no VAE: put Wan2\.1_VAE\.pth .* or give it with --vae"):
        World.load(model, device="cpu")

    base = tmp_path / "elsewhere"
    checkpoints.write_parts(base)
    for given in (base, None):
        world = World.load(
            model,
            vae=given or base / "Wan2.1_VAE.pth",
            text_encoder=given or base / "models_t5_umt5-xxl-enc-bf16.pth",
            tokenizer=base / "google" / "umt5-xxl",
            device="cpu",
        )
        assert_same(world.vae, checkpoints.vae)
        assert world.encode_text("a cat").shape[1] == 64
    assert World.load(model, vae=base / "Wan2.1_VAE.pth", device="cpu").text is None


def test_parts_are_found_beside_a_clone_of_the_fast_repository(checkpoints, tmp_path):
    checkpoints.write_shards(tmp_path / "lingbot-world-fast", checkpoints.dit)
    checkpoints.write_parts(tmp_path / "lingbot-world-base-cam")
    layout = find_layout(tmp_path / "lingbot-world-fast")
    assert layout.missing == {}
    assert layout.require_preset().name == "v1-fast"


def test_a_text_encoder_in_shards_and_a_vae_in_its_own_folder_are_read(checkpoints, tmp_path):
    checkpoints.write_shards(tmp_path / "text", checkpoints.hf_text, count=4)
    checkpoint = Checkpoint(TEXT, sorted((tmp_path / "text").glob("*.safetensors")))
    assert set(checkpoint) == set(in_hf_names(checkpoints))
    root = checkpoints.diffusers(tmp_path / "model")
    layout = find_layout(root, vae=root / "vae", text_encoder=tmp_path / "text")
    assert_same(load_vae(layout, device=CPU, dtype=torch.float32), checkpoints.vae)
    assert len(layout.text.files) == 4


def test_a_whole_checkpoint_gives_each_part_from_behind_its_prefix(checkpoints, tmp_path):
    state = {f"model.diffusion_model.{name}": tensor for name, tensor in checkpoints.dit.items()}
    state |= {f"vae.{name}": tensor for name, tensor in checkpoints.vae.items()}
    state |= {f"text_encoders.umt5xxl.transformer.{name}": tensor for name, tensor in checkpoints.hf_text.items()}
    file = checkpoints.write_file(tmp_path / "all.safetensors", state)
    layout = find_layout(file, vae=file, text_encoder=file)
    assert_same(load_dit(layout, device=CPU, dtype=torch.float32, attention="math"), checkpoints.dit)
    assert_same(load_vae(layout, device=CPU, dtype=torch.float32), checkpoints.vae)
    assert set(layout.text.open()) == set(in_hf_names(checkpoints))


def test_the_rule_for_the_vae_names_of_diffusers_agrees_with_the_published_map(checkpoints):
    published = checkpoints.layout["diffusers_format"]["vae"]["from_pth"]
    assert native_vae_names(published.values()) == {new: old for old, new in published.items()}


def test_the_cache_of_the_hub_is_read_through_its_links(checkpoints, tmp_path):
    blobs = tmp_path / "blobs"
    checkpoints.diffusers(blobs)
    for file in ("transformer/config.json", "model_index.json"):
        (blobs / file).unlink()
    snapshot = tmp_path / "models--robbyant--lingbot-world-v2-14b-causal-fast-diffusers" / "snapshots" / "0123abc"
    for file in [path for path in blobs.rglob("*") if path.is_file()]:
        link = snapshot / file.relative_to(blobs)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    layout = find_layout(snapshot)
    assert layout.missing == {}
    assert layout.require_preset().name == "v2-diffusers"
    assert "lingbot-world-v2-14b-causal-fast-diffusers" in layout.preset_reason


def test_a_linked_transformer_folder_keeps_the_meaning_of_its_name(checkpoints, tmp_path):
    checkpoints.v1(tmp_path / "real")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "lingbot_world_fast").symlink_to(tmp_path / "real" / "lingbot_world_fast")
    assert find_layout(tmp_path / "base").require_preset().name == "v1-fast"


def test_of_two_transformers_the_distilled_one_is_taken_and_the_other_named(checkpoints, tmp_path):
    checkpoints.v2(tmp_path)
    shutil.copytree(tmp_path / "transformers", tmp_path / "transformer_causal")
    layout = find_layout(tmp_path)
    assert layout.require_preset().name == "v2-causal-fast"
    assert any("transformer_causal" in note for note in layout.notes)
    assert find_layout(tmp_path / "transformer_causal").require_preset().name == "v2-causal-pretrain"


def test_the_less_compressed_of_two_text_encoders_is_taken(checkpoints, tmp_path):
    file = checkpoints.comfy(tmp_path)
    half = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in checkpoints.hf_text.items()}
    checkpoints.write_file(tmp_path / "text_encoders" / "umt5_xxl_fp8_e4m3fn.safetensors", half)
    assert find_layout(file).text.files[0].name == "umt5_xxl_fp16.safetensors"


def test_progress_can_be_left_out(checkpoints, tmp_path):
    layout = find_layout(checkpoints.comfy(tmp_path))
    assert load_vae(layout, device=CPU, dtype=torch.float32, progress=Progress()) is not None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "does not exist"),
        ("model/lingbot_world_fast/diffusion_pytorch_model-00002-of-00003.safetensors", "one of several shards"),
        ("model/lingbot_world_fast/config.json", "not a file of tensors"),
        ("model/google", r"no transformer found; .*; give the folder or the file of a LingBot-World model"),
        ("empty", r"empty/transformer: there is no \*\.safetensors file in it .* download the model again, .* or give"),
    ],
)
def test_paths_that_are_no_model_say_what_to_give(path, message, checkpoints, tmp_path):
    checkpoints.v1(tmp_path / "model")
    (tmp_path / "empty" / "transformer").mkdir(parents=True)
    with pytest.raises((InputFileError, WeightsError), match=message):
        find_layout(tmp_path / path)
