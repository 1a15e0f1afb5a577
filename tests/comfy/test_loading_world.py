"""The transformer as a MODEL of a real ComfyUI: the same world as lingbot_core's, LoRA, precision, memory, refusals."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import comfy.ldm.modules.attention
import comfy.memory_management
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import nodes
import numpy as np
import pytest
import torch
from comfy.cli_args import args
from comfy.quant_ops import QuantizedTensor
from comfy_api.torch_helpers import set_torch_compile_wrapper
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

PACK = "lingbot_world_pack"
SIZE = (96, 160)


@pytest.fixture(autouse=True)
def as_in_a_node(pack: ModuleType):
    """ComfyUI runs nodes like this."""
    with torch.inference_mode():
        yield
    comfy.model_management.unload_all_models()


def part(name: str) -> ModuleType:
    return importlib.import_module(f"{PACK}.{name}")


def execute(node: str, **inputs: Any) -> tuple[Any, ...]:
    return getattr(part("nodes.loading"), node).execute(**inputs).args


def tiny() -> tuple[Any, Any, Any]:
    return execute("LoadWorldFolder", folder="tiny", weight_dtype="as stored", preset="auto")


def tiny_model(**inputs: Any) -> Any:
    chosen = {"model_name": "tiny", "weight_dtype": "as stored", "preset": "auto", **inputs}
    [model] = execute("LoadWorldModel", **chosen)
    return model


@pytest.fixture(scope="module")
def vae(pack: ModuleType) -> Any:
    with torch.inference_mode():
        return part("nodes.host.vae").native_vae(part("lingbot_core.weights.layout").find_layout("tiny"))


def host(model: Any, vae: Any, clip: Any = None) -> Any:
    found = part("nodes.host.worlds").host_world(model, vae, clip)
    comfy.model_management.load_models_gpu(found.patchers)
    return found


def first_chunk(world: Any, *, prompt_states: Tensor | None = None) -> Tensor:
    """Latents of one chunk that walks forward."""
    picture = np.random.default_rng(0).integers(0, 255, (*SIZE, 3), dtype=np.uint8)
    if prompt_states is None:
        prompt_states = torch.randn(5, world.dit.config.text_dim, generator=torch.Generator().manual_seed(1))
    session = part("lingbot_core.engine.session").WorldSession.start(
        world, picture, "a harbour", seed=3, prompt_states=prompt_states
    )
    poses = np.tile(np.eye(4), (12, 1, 1))
    poses[:, 2, 3] = np.arange(12) * 0.1
    return session.advance(session.controls(poses)).latents


def core_world() -> Any:
    return part("lingbot_core.engine.world").World.load("tiny", device="cpu")


@pytest.fixture(scope="module")
def plain(pack: ModuleType) -> Tensor:
    """What the library makes without ComfyUI."""
    with torch.inference_mode():
        return first_chunk(core_world())


def test_a_world_of_sockets_is_the_world_of_the_library(pack):
    model, clip, vae = tiny()
    found = host(model, vae, clip)
    expected = core_world()
    assert found.world.fingerprint == expected.fingerprint
    assert (found.world.preset, found.world.area, found.world.name) == (expected.preset, expected.area, expected.name)
    prompt = "A stone (old) harbour &amp; a boat"
    states = found.world.encode_text("a harbour")
    assert torch.equal(states, expected.encode_text("a harbour"))
    assert found.world.encode_prompt(prompt).states.shape[1] == expected.text.dim
    mine, theirs = (first_chunk(world, prompt_states=states) for world in (found.world, expected))
    assert torch.equal(mine, theirs)


def test_both_loaders_give_the_same_transformer(vae):
    folder, _, _ = tiny()
    single = tiny_model()
    assert type(single) is comfy.model_patcher.CoreModelPatcher
    assert host(single, vae).world.fingerprint == host(folder, vae).world.fingerprint


def test_the_class_of_the_patcher_is_looked_up_when_a_model_is_loaded(monkeypatch):
    class Later(comfy.model_patcher.ModelPatcher):
        pass

    monkeypatch.setattr(comfy.model_patcher, "CoreModelPatcher", Later)
    model = tiny_model()
    assert type(model) is Later
    load, arguments = model.cached_patcher_init
    again = load(*arguments, disable_dynamic=True)
    assert type(again) is comfy.model_patcher.ModelPatcher
    assert again.model is not model.model
    assert again.model.marks == model.model.marks


def test_layers_that_have_no_weights_before_they_are_loaded_are_filled(vae, plain, monkeypatch):
    """What ComfyUI's layers are like with DynamicVRAM."""
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    model = tiny_model()
    monkeypatch.undo()
    layer = model.model.diffusion_model.blocks[0].ffn[0]
    assert layer.comfy_need_lazy_init_bias
    assert layer.weight_comfy_model_dtype == torch.float32
    assert torch.equal(first_chunk(host(model, vae).world), plain)


# LoRA


@pytest.fixture
def lora(base_folder: Path, models: Path) -> str:
    """Changes a few matrices, in the two spellings of names that LoRA files have."""
    folder = base_folder / "models" / "loras"
    folder.mkdir()
    generator = torch.Generator().manual_seed(5)
    shapes = {name: p.shape for name, p in tiny_model().model.diffusion_model.named_parameters()}
    weights = {}
    for name in ("blocks.0.self_attn.q", "blocks.1.ffn.0", "blocks.0.cam_scale_layer", "time_embedding.0"):
        rows, columns = shapes[f"{name}.weight"]
        weights[f"diffusion_model.{name}.lora_A.weight"] = torch.randn(4, columns, generator=generator) * 0.3
        weights[f"diffusion_model.{name}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) * 0.3
    save_file(weights, folder / "style.safetensors")
    return "style.safetensors"


def test_a_lora_changes_the_chunk_and_leaves_no_trace_when_it_is_gone(lora, vae, plain, caplog):
    model = tiny_model()
    fingerprint = host(model, vae).world.fingerprint
    with caplog.at_level(logging.WARNING):
        [patched] = nodes.LoraLoaderModelOnly().load_lora_model_only(model, lora, 1.0)
    assert "NOT LOADED" not in caplog.text
    assert len(patched.patches) == 4
    changed = host(patched, vae)
    assert changed.world.fingerprint != fingerprint
    result = first_chunk(changed.world)
    assert not torch.allclose(result, plain, atol=1e-2)

    # Merged by hand: what the LoRA means.
    merged = host(tiny_model(), vae)
    weights = dict(merged.world.dit.named_parameters())
    for key, [(strength, adapter, _, _, _)] in patched.patches.items():
        up, down = adapter.weights[0], adapter.weights[1]
        weights[key.removeprefix("diffusion_model.")].add_(strength * (up @ down))
    torch.testing.assert_close(result, first_chunk(merged.world), atol=1e-4, rtol=1e-4)

    again = host(model, vae)
    assert torch.equal(first_chunk(again.world), plain)
    assert again.world.fingerprint == fingerprint


def test_the_mark_of_a_lora_depends_on_what_it_does_alone(lora, vae):
    def mark(strength: float) -> str:
        [patched] = nodes.LoraLoaderModelOnly().load_lora_model_only(tiny_model(), lora, strength)
        return part("nodes.host.worlds").host_world(patched, vae).world.fingerprint

    assert mark(0.5) == mark(0.5)
    assert mark(0.5) != mark(0.6)


# Precision


def test_bfloat16_is_kept_and_computed_in_float32_on_the_cpu(vae):
    model = tiny_model(weight_dtype="bf16")
    dit = model.model.diffusion_model
    assert {p.dtype for p in dit.parameters()} == {torch.bfloat16}
    assert model.model_size() < 0.6 * tiny_model().model_size()
    found = host(model, vae)
    assert found.world.cache_dtype == torch.float32
    result = first_chunk(found.world)

    rounded = core_world()
    for parameter in rounded.dit.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
    torch.testing.assert_close(result, first_chunk(rounded), atol=1e-4, rtol=1e-4)


def test_fp8_scales_the_large_matrices_and_stays_close(vae):
    model = tiny_model(weight_dtype="fp8_e4m3fn")
    dit = model.model.diffusion_model
    kept = dict(dit.named_parameters())
    scaled = {name for name, p in kept.items() if isinstance(p.data, QuantizedTensor) or isinstance(p, QuantizedTensor)}
    assert "blocks.0.self_attn.q.weight" in scaled
    assert all(name.startswith("blocks.") and kept[name].ndim == 2 for name in scaled)
    assert not any(name.startswith(("time_", "head.", "patch_")) for name in scaled)
    reference = core_world()
    exact = dict(reference.dit.named_parameters())
    found = host(model, vae)
    for name in scaled:
        wide = dit.get_parameter(name).dequantize().float()
        # Three bits of mantissa, over the whole range of a matrix but for its smallest values.
        error = (wide - exact[name]).abs()
        assert bool((error <= exact[name].abs() / 16 + exact[name].abs().max() / 448 / 256).all()), name
        exact[name].copy_(wide)
    torch.testing.assert_close(first_chunk(found.world), first_chunk(reference), atol=1e-4, rtol=1e-4)


def test_a_lora_on_fp8_is_taken_off_bitwise(lora, vae):
    model = tiny_model(weight_dtype="fp8_e4m3fn")
    before = first_chunk(host(model, vae).world)
    [patched] = nodes.LoraLoaderModelOnly().load_lora_model_only(model, lora, 1.0)
    assert not torch.allclose(first_chunk(host(patched, vae).world), before, atol=1e-2)
    assert torch.equal(first_chunk(host(model, vae).world), before)


def converted(models: Path) -> Path:
    """The embedded transformer as a single file."""
    assert part("lingbot_core.cli").main(["convert", "tiny", str(models), "--only", "dit"]) == 0
    [file] = (models / "diffusion_models").glob("*.safetensors")
    return file


def rewritten(file: Path, name: str, spelling: str) -> Path:
    """The file with its blocks' matrices in scaled fp8, as ComfyUI's files have it; unscaled for 'plain'."""
    with safe_open(file, "pt") as source:
        metadata = dict(source.metadata())
        weights = {key: source.get_tensor(key) for key in source.keys()}  # noqa: SIM118 (it is no mapping)
    layers = {}
    for key in [k for k, t in weights.items() if k.startswith("blocks.") and t.ndim == 2]:
        layer = key.removesuffix(".weight")
        scale = weights[key].float().abs().max() / 448 if spelling != "plain" else torch.tensor(1.0)
        weights[key] = (weights[key].float() / scale).to(torch.float8_e4m3fn)
        if spelling == "new":
            weights[f"{layer}.weight_scale"] = scale
            layers[layer] = {"format": "float8_e4m3fn"}
        elif spelling == "old":
            weights[f"{layer}.scale_weight"] = scale.reshape(1)
    if spelling == "new":
        metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": layers})
    elif spelling == "old":
        weights["scaled_fp8"] = torch.empty(2, dtype=torch.float8_e4m3fn)
    save_file(weights, file.with_name(name), metadata)
    return file.with_name(name)


@pytest.mark.parametrize("spelling", ["new", "old"])
def test_scaled_fp8_files_stay_fp8_and_compute_as_multiplied_out(models, vae, spelling):
    file = rewritten(converted(models), "scaled.safetensors", spelling)
    model = tiny_model(model_name=file.name)
    weight = model.model.diffusion_model.blocks[0].self_attn.q.weight
    assert isinstance(weight, QuantizedTensor)
    wide = tiny_model(model_name=file.name, weight_dtype="bf16")
    assert wide.model.diffusion_model.blocks[0].self_attn.q.weight.dtype == torch.bfloat16

    multiplied = core_world()
    checkpoint = part("lingbot_core.weights.layout").find_layout(file).transformer.open()
    for name, parameter in multiplied.dit.named_parameters():
        parameter.copy_(checkpoint.read(name, dtype=torch.float32))
    result = first_chunk(host(model, vae).world)
    torch.testing.assert_close(result, first_chunk(multiplied), atol=1e-4, rtol=1e-4)


def test_a_scale_for_each_row_becomes_one_for_the_whole_matrix(models, vae):
    """ComfyUI's layers have one scale; nothing stays wide for it."""
    file = rewritten(converted(models), "rows.safetensors", "new")
    weights = load_file(file)
    name = "blocks.0.ffn.0.weight_scale"
    rows = weights["blocks.0.ffn.0.weight"].shape[0]
    weights[name] = weights[name] * torch.linspace(0.5, 2.0, rows)
    with safe_open(file, "pt") as source:
        metadata = source.metadata()
    save_file(weights, file, metadata)
    model = tiny_model(model_name=file.name)
    loaded = model.model.diffusion_model.blocks[0].ffn[0].weight
    expected = weights["blocks.0.ffn.0.weight"].float() * weights[name][:, None]
    error = (loaded.dequantize().float() - expected).abs()
    assert bool((error <= expected.abs() / 16 + expected.abs().max() / 448 / 256).all())
    assert torch.isfinite(first_chunk(host(model, vae).world)).all()


def test_a_file_converted_to_fp8_is_what_the_loader_makes_of_its_source(models, vae):
    assert part("lingbot_core.cli").main(["convert", "tiny", str(models), "--dtype", "fp8", "--only", "dit"]) == 0
    [file] = (models / "diffusion_models").glob("*.safetensors")
    converted, loaded = tiny_model(model_name=file.name), tiny_model(weight_dtype="fp8_e4m3fn")
    ours, theirs = (dict(model.model.diffusion_model.named_parameters()) for model in (converted, loaded))
    scaled = [
        name for name, p in theirs.items() if isinstance(p.data, QuantizedTensor) or isinstance(p, QuantizedTensor)
    ]
    assert len(scaled) == 84
    for name in scaled:
        assert torch.equal(ours[name].dequantize(), theirs[name].dequantize()), name
    # The rest of the file is in bfloat16.
    torch.testing.assert_close(
        first_chunk(host(converted, vae).world), first_chunk(host(loaded, vae).world), atol=0.1, rtol=0.1
    )


def test_an_unscaled_fp8_file_loads(models, vae):
    file = rewritten(converted(models), "plain.safetensors", "plain")
    assert torch.isfinite(first_chunk(host(tiny_model(model_name=file.name), vae).world)).all()


def test_the_compute_dtype_that_a_node_sets_is_used_for_its_clone_alone(vae, plain):
    model = tiny_model()
    other = model.clone()
    other.set_model_compute_dtype(torch.bfloat16)
    found = host(other, vae)
    assert found.world.cache_dtype == torch.bfloat16
    changed = first_chunk(found.world)
    assert not torch.equal(changed, plain)
    assert (changed - plain).abs().mean() < 0.1 * plain.abs().mean()
    again = host(model, vae)
    assert again.world.cache_dtype == torch.float32
    assert torch.equal(first_chunk(again.world), plain)


# Memory


def test_unloading_gives_memory_back_and_a_later_run_is_the_same(vae, plain):
    model = tiny_model()
    host(model, vae)
    assert model.loaded_size() == model.model_size()
    model.partially_unload(model.offload_device, model.model_size())
    comfy.model_management.unload_all_models()
    assert model.loaded_size() == 0
    assert not comfy.model_management.loaded_models()
    assert torch.equal(first_chunk(host(model, vae).world), plain)


def test_nothing_keeps_a_model_or_the_copy_of_a_vae_alive():
    model, clip, vae = tiny()
    found = host(model, vae, clip)
    first_chunk(found.world, prompt_states=found.world.encode_text("a harbour"))
    comfy.model_management.unload_all_models()
    alive = [weakref.ref(x) for x in (model.model, model, found.world.vae, vae, clip.cond_stage_model)]
    del model, clip, vae, found
    gc.collect()
    assert [x() for x in alive] == [None] * len(alive)


def test_the_copy_of_a_vae_is_made_once():
    _, _, vae = tiny()
    make = part("nodes.host.vae").world_vae
    assert make(vae)[0] is make(vae)[0]
    assert make(tiny()[2])[0] is not make(vae)[0]


def test_a_model_streamed_from_main_memory_gives_the_same(vae, plain):
    """What low VRAM does: layers stay where they are and are cast when they are used."""
    model = tiny_model()
    model.partially_load(model.load_device, 1)
    assert model.model.model_lowvram
    found = part("nodes.host.worlds").host_world(model, vae)
    comfy.model_management.load_models_gpu(found.patchers[1:])
    assert torch.equal(first_chunk(found.world), plain)


# What nodes do to a MODEL on its way


def test_a_torch_compile_node_is_applied_while_a_forward_runs_and_gone_after(vae, plain):
    model = tiny_model()
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    compiled = model.clone()
    set_torch_compile_wrapper(compiled, backend=backend, keys=["diffusion_model.blocks.0"])
    result = first_chunk(host(compiled, vae).world)
    assert calls
    torch.testing.assert_close(result, plain, atol=1e-5, rtol=1e-5)
    assert type(model.model.diffusion_model.blocks[0]).__name__ == "Block"


def test_an_attention_override_of_a_node_is_used_for_its_clone_alone(vae, plain):
    model = tiny_model()
    calls = []

    def count(original, *args, **kwargs):
        calls.append(args[0].shape)
        return original(*args, **kwargs)

    other = model.clone()
    other.model_options["transformer_options"]["optimized_attention_override"] = count
    torch.testing.assert_close(first_chunk(host(other, vae).world), plain, atol=1e-3, rtol=1e-3)
    used = len(calls)
    assert used
    first_chunk(host(model, vae).world)
    assert len(calls) == used


def test_an_attention_flag_of_comfyui_is_obeyed(vae, plain, monkeypatch):
    calls = []

    def attention(*arguments, **options):
        calls.append(options["heads"])
        return comfy.ldm.modules.attention.attention_pytorch(*arguments, **options)

    monkeypatch.setattr(args, "use_pytorch_cross_attention", True)
    monkeypatch.setattr(comfy.ldm.modules.attention, "optimized_attention", attention)
    torch.testing.assert_close(first_chunk(host(tiny_model(), vae).world), plain, atol=1e-5, rtol=1e-5)
    assert calls


def test_a_changed_sampling_shift_is_refused(vae):
    model = tiny_model().clone()
    model.add_object_patch("model_sampling", model.get_model_object("model_sampling"))
    with pytest.raises(Exception, match="ModelSamplingSD3"):
        part("nodes.host.worlds").host_world(model, vae)


def test_a_patch_without_effect_is_named_in_the_log(vae, caplog):
    model = tiny_model().clone()
    model.set_model_attn1_patch(lambda *_: None)
    with caplog.at_level(logging.WARNING):
        part("nodes.host.worlds").host_world(model, vae)
    assert "no effect in a world: patches" in caplog.text


# Refusals


def test_ksampler_says_what_to_connect_instead():
    model = tiny_model()
    empty = {"samples": torch.zeros(1, 16, 1, 12, 20)}
    words = [[torch.zeros(1, 4, 64), {}]]
    with pytest.raises(Exception, match=r"KSampler cannot run it\. Connect it to LingBotStartWorld"):
        nodes.KSampler().sample(model, 0, 2, 1.0, "euler", "simple", words, words, empty)
    assert not comfy.model_management.loaded_models()


def test_a_plain_wan_model_is_refused_by_name(vae):
    config = {
        "image_model": "wan2.1", "model_type": "t2v", "dim": 64, "ffn_dim": 64, "num_heads": 2, "num_layers": 1,
        "patch_size": (1, 2, 2), "freq_dim": 32, "in_dim": 16, "out_dim": 16, "dtype": torch.float32,
    }  # fmt: skip
    wan = comfy.model_base.WAN21(comfy.supported_models.WAN21_T2V(config))
    device = torch.device("cpu")
    model = comfy.model_patcher.ModelPatcher(wan, device, device)
    with pytest.raises(Exception, match=r"plain Wan model.*connect the MODEL output of LingBotLoadWorldModel"):
        part("nodes.host.worlds").host_world(model, vae)


def test_what_is_no_model_is_refused_by_name(vae):
    with pytest.raises(Exception, match="the MODEL is str, not a LingBot World model"):
        part("nodes.host.worlds").host_world("model", vae)
