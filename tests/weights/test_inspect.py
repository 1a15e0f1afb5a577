"""``lingbot-world inspect``: full-size checkpoints are described from their headers alone."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from lingbot_core.cli import main

GIB = 2**30
PARAMETERS = 18_544_332_864


@pytest.fixture
def inspect(capsys):
    """Runs the verb; returns exit code, the JSON (or the text), and stderr."""

    def run(*arguments, text=False):
        code = main(["inspect", *map(str, arguments), *([] if text else ["--json"])])
        out, err = capsys.readouterr()
        return code, out if text or code else json.loads(out), err

    return run


@pytest.fixture(scope="module")
def full_size(checkpoints, tmp_path_factory):
    """v1 as published, 70 GB of holes: float32 shards, umT5-xxl and the VAE as safetensors, the tokenizer."""
    root = tmp_path_factory.mktemp("v1")
    layout = checkpoints.layout
    folder = root / "lingbot_world_fast"
    checkpoints.write_sparse_shards(folder, layout["lingbot_world_fast_cam"]["shapes"], 8)
    checkpoints.write_json(folder / "config.json", layout["lingbot_world_fast_cam"]["config"])
    checkpoints.write_sparse(root / "Wan2.1_VAE.safetensors", layout["wan21_vae_pth"]["shapes"])
    text = layout["umt5_xxl_enc_pth"]["shapes"]
    checkpoints.write_sparse(root / "models_t5_umt5-xxl-enc-bf16.safetensors", text, "BF16")
    checkpoints.write_parts(root / "small")
    shutil.move(root / "small" / "google", root / "google")
    shutil.rmtree(root / "small")
    return root


def test_the_published_model_is_described_at_full_size(full_size, inspect):
    code, found, _ = inspect(full_size)
    assert (code, found["loads"], found["missing"], found["control"]) == (0, True, {}, "cam")
    assert found["preset"] == "v1-fast"
    assert found["preset_reason"] == "the folder is called lingbot_world_fast"
    assert found["licence"].startswith("Apache-2.0")
    dit, vae, text = found["parts"]
    assert (dit["parameters"], dit["bytes"], dit["dtypes"]) == (PARAMETERS, 4 * PARAMETERS, {"F32": 4 * PARAMETERS})
    assert (dit["config"]["num_heads"], dit["config"]["num_layers"], len(dit["files"])) == (40, 40, 8)
    assert (vae["parameters"], text["parameters"]) == (126_892_531, 5_680_910_336)
    assert text["dtypes"] == {"BF16": 2 * 5_680_910_336}
    assert not any(part["problems"] for part in found["parts"])


def test_memory_follows_from_window_and_size(full_size, inspect):
    tokens = {"480p": 1560, "720p": 3600}
    for preset, frames in (("v1-fast", 7 * 3), ("v2-causal-fast", 18), ("v2-causal-pretrain", 2 * 7 * 4)):
        _, found, _ = inspect(full_size, "--preset", preset)
        for memory in found["memory"]:
            # 40 layers, keys and values, 5120 channels, two bytes; guidance keeps two caches.
            assert memory["bytes"]["kv_cache"] == frames * tokens[memory["size"]] * 40 * 2 * 5120 * 2
            assert memory["bytes"]["transformer"] == 2 * PARAMETERS
            assert memory["bytes"]["total"] == memory["bytes"]["weights"] + memory["bytes"]["session"]
        assert [(m["height"], m["width"]) for m in found["memory"]] == [(480, 832), (720, 1280)]


def test_the_text_names_everything_a_user_has_to_decide(full_size, inspect):
    code, text, _ = inspect(full_size, text=True)
    assert code == 0
    for wanted in (
        "LingBot-World v1 folder",
        "18.54e9 parameters, stored as F32 69.1 GiB",
        "v1-fast: the folder is called lingbot_world_fast",
        "Apache-2.0",
        "loads         yes",
        "memory 480p",
        "weights 45.5 GiB",
    ):
        assert wanted in text
    assert max(map(len, text.splitlines())) <= 110 or str(full_size) in text


def test_inspect_reads_no_tensors(full_size, inspect, monkeypatch):
    import lingbot_core.weights.files as files

    def refuse(*_, **__):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(files, "_read_into", refuse)
    assert inspect(full_size)[0] == 0


def test_a_transformer_alone_says_what_is_absent_and_where_to_put_it(checkpoints, inspect, tmp_path):
    root = tmp_path / "lingbot-world-v2-1.3b-causal-fast"
    shapes = {k: tuple(t.shape) for k, t in checkpoints.dit.items()}
    checkpoints.write_sparse_shards(root / "transformers", shapes, 2, "BF16")
    _, found, _ = inspect(root)
    assert found["loads"] is False
    assert set(found["missing"]) == {"VAE", "text encoder", "tokenizer"}
    assert all(str(root) in advice and "--" in advice for advice in found["missing"].values())
    assert "not for commercial use" in found["licence"]
    _, text, _ = inspect(root, text=True)
    assert "loads         no\n                missing: VAE\n" in text

    checkpoints.write_parts(tmp_path / "base")
    base = tmp_path / "base"
    given = ("--vae", base, "--text-encoder", base, "--tokenizer", base / "google" / "umt5-xxl")
    _, found, _ = inspect(root, *given)
    assert (found["loads"], found["missing"]) == (True, {})


@pytest.mark.parametrize(
    ("write", "what", "preset", "control"),
    [
        (lambda c, root: c.v1(root, c.act), "LingBot-World v1 folder", "v1-fast", "act"),
        (lambda c, root: c.v2(root), "LingBot-World v2 folder", "v2-causal-fast", "cam"),
        (lambda c, root: c.v2(root, "transformer_causal"), "LingBot-World v2 folder", "v2-causal-pretrain", "cam"),
        (lambda c, root: c.diffusers(root), "in the manner of diffusers", "v2-diffusers", "cam"),
        (lambda c, root: c.comfy(root, "world.safetensors", "model.diffusion_model."), "single file", None, "cam"),
        (lambda c, root: "tiny", "the embedded model", "tiny", "cam"),
    ],
)
def test_every_layout_is_recognised(write, what, preset, control, checkpoints, inspect, tmp_path):
    path = write(checkpoints, tmp_path)
    if control == "act":
        checkpoints.write_json(
            tmp_path / "lingbot_world_fast" / "config.json", {**checkpoints.config, "control_type": "act"}
        )
    code, found, _ = inspect(path)
    assert (code, found["loads"]) == (0, True)
    assert what in found["what"]
    assert (found["preset"], found["control"]) == (preset, control)
    if preset is None:
        assert "choose one with --preset: v1-fast" in found["preset_reason"]
        assert found["memory"] == []
        assert "yes, with a --preset" in inspect(path, text=True)[1]


def test_why_a_model_would_not_load_is_told(checkpoints, inspect, tmp_path):
    state = {name: tensor for name, tensor in checkpoints.dit.items() if not name.startswith("blocks.39.")}
    checkpoints.v1(tmp_path, state)
    code, found, _ = inspect(tmp_path)
    assert (code, found["loads"]) == (0, False)
    assert "config says num_layers = 40, the tensors say 39" in found["parts"][0]["problems"][0]
    shutil.rmtree(tmp_path / "lingbot_world_fast")
    checkpoints.v1(tmp_path, {k: v for k, v in checkpoints.dit.items() if k != "blocks.3.ffn.0.bias"})
    _, found, _ = inspect(tmp_path)
    assert found["parts"][0]["problems"] == ["1 tensors are missing, such as blocks.3.ffn.0.bias"]
    assert "blocks.3.ffn.0.bias" in inspect(tmp_path, text=True)[1]


@pytest.mark.parametrize(
    ("name", "what", "tensors"),
    [("Wan2.1_VAE.pth", "a VAE alone", 194), ("models_t5_umt5-xxl-enc-bf16.pth", "a text encoder alone", 242)],
)
def test_a_part_alone_is_recognised(name, what, tensors, checkpoints, inspect, tmp_path):
    checkpoints.write_parts(tmp_path)
    _, found, _ = inspect(tmp_path / name)
    assert (found["what"], found["loads"], found["parts"][0]["problems"]) == (what, None, [])
    state = checkpoints.vae if tensors == 194 else checkpoints.text
    assert found["parts"][0]["parameters"] == sum(math.prod(t.shape) for t in state.values())
    assert "complete      yes" in inspect(tmp_path / name, text=True)[1]


def test_what_is_refused_is_an_error_with_exit_code_2(checkpoints, inspect, tmp_path):
    shapes = {k: tuple(t.shape) for k, t in checkpoints.dit.items()}
    file = checkpoints.write_sparse(tmp_path / "high_noise_model" / "a.safetensors", shapes, "BF16")
    for path, message in ((file, "high_noise"), (tmp_path / "nothing", "does not exist"), (tmp_path, "Base model")):
        code, _, err = inspect(path)
        assert code == 2
        assert err.startswith("error: ")
        assert message in err
