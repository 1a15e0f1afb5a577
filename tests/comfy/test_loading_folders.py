"""Which models are offered, and what is said of folders and files that cannot be used."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import folder_paths
import pytest
import torch
from safetensors.torch import load_file, save_file
from utils.extra_config import load_extra_path_config

PACK = "lingbot_world_pack"
ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "lingbot_core" / "assets" / "tiny"


@pytest.fixture(autouse=True)
def as_in_a_node(pack: ModuleType) -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True)
def registered(pack: ModuleType) -> Iterator[list[str]]:
    """The folders registered as lingbot_world; what a test adds is taken away again."""
    part("nodes.loading")
    folders = folder_paths.folder_names_and_paths["lingbot_world"][0]
    before = list(folders)
    yield folders
    folders[:] = before


def part(name: str) -> ModuleType:
    return importlib.import_module(f"{PACK}.{name}")


def execute(node: str, name: str, weight_dtype: str = "as stored", preset: str = "auto") -> tuple[Any, ...]:
    return getattr(part("nodes.loading"), node).execute(name, weight_dtype, preset).args


def options(node: str) -> list[str]:
    return getattr(part("nodes.loading"), node).define_schema().inputs[0].options


def copied(folder: Path, *parts: str) -> Path:
    """Some parts of the embedded model; all without any."""
    folder.mkdir(parents=True)
    for name in parts or ("transformer", "vae", "text_encoder", "tokenizer", "world.json"):
        source = TINY / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    return folder


def fingerprint(node: str, name: str | None) -> str:
    cls = getattr(part("nodes.loading"), node)
    return cls.fingerprint_inputs(**{cls.define_schema().inputs[0].id: name, "weight_dtype": None, "preset": "auto"})


# What is listed


def test_the_embedded_model_comes_first_and_needs_no_folder():
    assert options("LoadWorldFolder") == ["tiny"]
    assert options("LoadWorldModel")[0] == "tiny"


def test_folders_and_files_are_listed_by_name(models):
    copied(models / "lingbot_world" / "my-world")
    copied(models / "lingbot_world" / "somebody" / "their-world")
    (models / "diffusion_models" / "wan").mkdir(parents=True)
    for name in ("world_fp8.safetensors", "wan/other.safetensors", "notes.txt"):
        (models / "diffusion_models" / name).write_bytes(b"")
    assert options("LoadWorldFolder") == ["tiny", "my-world/", "somebody/their-world/"]
    assert options("LoadWorldModel") == [
        *options("LoadWorldFolder"),
        "wan/other.safetensors",
        "world_fp8.safetensors",
    ]
    model, clip, vae = execute("LoadWorldFolder", "somebody/their-world/")
    assert model.model.world_name == "tiny"
    assert clip.tokenize("a harbour")
    assert vae.latent_channels == 16


def test_extra_model_paths_add_folders(tmp_path):
    copied(tmp_path / "store" / "their-world")
    alone = copied(tmp_path / "one" / "single-world")
    config = tmp_path / "extra_model_paths.yaml"
    config.write_text(f"mine:\n  base_path: {tmp_path}\n  lingbot_world: |\n    store\n    one/single-world\n")
    load_extra_path_config(str(config))
    # A registered folder may be a model itself.
    assert options("LoadWorldFolder") == ["tiny", "single-world/", "their-world/"]
    [model] = execute("LoadWorldModel", "single-world/")
    assert model.model.layout.transformer.files[0].is_relative_to(alone)


def test_extra_model_paths_read_before_the_pack_are_kept(monkeypatch, tmp_path):
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "lingbot_world", ([str(tmp_path)], set()))
    part("nodes.host.paths").register()
    assert folder_paths.get_folder_paths("lingbot_world") == [
        str(tmp_path),
        str(Path(folder_paths.models_dir) / "lingbot_world"),
    ]


# What is refused


@pytest.mark.parametrize("name", ["../tiny/", "/etc/passwd", "..\\secret", "gone/", "tiny/../tiny", "C:\\models", ""])
@pytest.mark.parametrize("node", ["LoadWorldModel", "LoadWorldFolder"])
def test_a_name_that_is_not_listed_is_refused_with_what_was_searched(node, name):
    with pytest.raises(Exception, match=r"there is no model .*; there are tiny.* Searched: .*lingbot_world"):
        execute(node, name)


def test_a_transformer_alone_says_which_parts_are_missing_and_how_to_go_on(models):
    folder = models / "lingbot_world" / "dit-only"
    copied(folder, "transformer", "world.json")
    with pytest.raises(Exception, match="has no VAE") as caught:
        execute("LoadWorldFolder", "dit-only/")
    message = str(caught.value)
    assert "has no VAE and no text encoder" in message
    assert str(folder) in message
    assert "LingBotLoadWorldModel" in message
    assert "CLIPLoader (type wan" in message
    assert "VAELoader" in message
    [model] = execute("LoadWorldModel", "dit-only/")
    assert model.model.preset.name == "tiny"


def test_the_experts_of_the_base_model_are_refused_by_name(models):
    folder = copied(models / "lingbot_world" / "base-cam", "vae")
    shutil.copytree(TINY / "transformer", folder / "low_noise_model")
    assert "base-cam/" in options("LoadWorldFolder")
    for node in ("LoadWorldFolder", "LoadWorldModel"):
        with pytest.raises(Exception, match="low_noise_model is an expert of the bidirectional Base model"):
            execute(node, "base-cam/")


def single_file(models: Path, name: str, *, without: str = "") -> Path:
    folder = models / "diffusion_models"
    folder.mkdir()
    weights = load_file(TINY / "transformer" / "diffusion_pytorch_model.safetensors")
    kept = {key: tensor for key, tensor in weights.items() if not without or without not in key}
    save_file(kept, folder / name)
    return folder / name


def test_a_plain_wan_file_is_refused_by_name(models):
    weights = single_file(models, "wan2.2_i2v.safetensors", without="cam")
    with pytest.raises(Exception, match="is a plain Wan transformer: patch_embedding_wancamctrl") as caught:
        execute("LoadWorldModel", weights.name)
    assert str(weights) in str(caught.value)


def test_a_file_that_says_no_recipe_asks_for_one(models):
    file = single_file(models, "some_world.safetensors")
    with pytest.raises(Exception, match=r"choose a preset: v1-fast, .*v2-causal-fast"):
        execute("LoadWorldModel", file.name)
    [model] = execute("LoadWorldModel", file.name, preset="v2-causal-fast")
    assert (model.model.preset.name, model.model.preset_reason) == ("v2-causal-fast", "chosen by the user")


def test_a_damaged_file_is_refused_by_name(models):
    file = single_file(models, "world.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(Exception, match=r"world\.safetensors cannot be read: it is truncated"):
        execute("LoadWorldModel", file.name, preset="tiny")
    file.write_bytes(b"not tensors")
    with pytest.raises(Exception, match=r"world\.safetensors cannot be read"):
        execute("LoadWorldModel", file.name, preset="tiny")


def test_a_file_of_another_part_is_refused_by_what_it_is(models):
    (models / "diffusion_models").mkdir()
    shutil.copy(TINY / "vae" / "diffusion_pytorch_model.safetensors", models / "diffusion_models" / "vae.safetensors")
    with pytest.raises(Exception, match="is a VAE, not a transformer"):
        execute("LoadWorldModel", "vae.safetensors")


def test_an_unknown_preset_or_dtype_lists_those_that_exist():
    with pytest.raises(Exception, match="there is no preset 'v3'; use one of v1-fast"):
        execute("LoadWorldModel", "tiny", preset="v3")
    with pytest.raises(Exception, match="weight dtype 'int4' is unknown; use as stored, bf16, fp8_e4m3fn"):
        execute("LoadWorldModel", "tiny", weight_dtype="int4")


# Layouts


def test_a_folder_in_the_manner_of_v1_loads_with_its_parts_beside_it(models):
    folder = models / "lingbot_world" / "lingbot-world-base-cam"
    folder.mkdir(parents=True)
    weights = load_file(TINY / "transformer" / "diffusion_pytorch_model.safetensors")
    (folder / "lingbot_world_fast").mkdir()
    shutil.copy(TINY / "transformer" / "config.json", folder / "lingbot_world_fast")
    # Without the metadata, which names the recipe of tiny.
    save_file(weights, folder / "lingbot_world_fast" / "diffusion_pytorch_model.safetensors")
    torch.save(load_file(TINY / "vae" / "diffusion_pytorch_model.safetensors"), folder / "Wan2.1_VAE.pth")
    torch.save(load_file(TINY / "text_encoder" / "model.safetensors"), folder / "models_t5_umt5-xxl-enc-bf16.pth")
    shutil.copytree(TINY / "tokenizer", folder / "google" / "umt5-xxl")
    model, clip, vae = execute("LoadWorldFolder", "lingbot-world-base-cam/")
    assert model.model.preset.name == "v1-fast"
    embedded = execute("LoadWorldFolder", "tiny")
    words = [c.encode_from_tokens(c.tokenize("a harbour")) for c in (clip, embedded[1])]
    assert torch.equal(*words)
    latents = torch.randn(1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(vae.decode(latents), embedded[2].decode(latents))


# What is loaded again


@pytest.mark.parametrize("node", ["LoadWorldModel", "LoadWorldFolder"])
def test_a_file_that_was_replaced_under_its_name_is_loaded_again(models, node):
    folder = copied(models / "lingbot_world" / "mine")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    seen = [fingerprint(node, "mine/")]
    assert fingerprint(node, "mine/") == seen[0]
    execute(node, "mine/")
    assert fingerprint(node, "mine/") == seen[0]
    about = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    seen.append(fingerprint(node, "mine/"))
    (folder / "world.json").write_text((folder / "world.json").read_text() + "\n")
    seen.append(fingerprint(node, "mine/"))
    file.unlink()
    seen.append(fingerprint(node, "mine/"))
    assert len(set(seen)) == 4
    (folder / "preview.png").write_bytes(b"")
    assert fingerprint(node, "mine/") == seen[-1]
    # Where there is nothing to be told, neither is there an error, which would have the node run every time.
    for name in ("gone/", "", None):
        assert fingerprint(node, name) == fingerprint(node, "no such model")
    assert fingerprint(node, "tiny") == fingerprint(node, "tiny") != fingerprint(node, None)


def test_another_vae_is_no_reason_to_load_the_transformer_again(models):
    folder = copied(models / "lingbot_world" / "mine")
    before = [fingerprint(node, "mine/") for node in ("LoadWorldModel", "LoadWorldFolder")]
    os.utime(folder / "vae" / "diffusion_pytorch_model.safetensors", ns=(0, 1))
    after = [fingerprint(node, "mine/") for node in ("LoadWorldModel", "LoadWorldFolder")]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]


def test_a_single_file_that_was_replaced_is_loaded_again(models):
    (models / "diffusion_models").mkdir()
    file = models / "diffusion_models" / "mine.safetensors"
    shutil.copy(TINY / "transformer" / "diffusion_pytorch_model.safetensors", file)
    before = fingerprint("LoadWorldModel", "mine.safetensors")
    assert fingerprint("LoadWorldModel", "mine.safetensors") == before
    os.utime(file, ns=(0, 1))
    assert fingerprint("LoadWorldModel", "mine.safetensors") != before
