"""LingBotMemoryEstimate: bytes before anything is allocated."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import comfy.model_management
import pytest
import torch

PACK = "lingbot_world_pack"
SIZE = {"width": 160, "height": 96}


@pytest.fixture(autouse=True)
def as_in_a_node(pack: ModuleType) -> Iterator[None]:
    with torch.inference_mode():
        yield


def part(name: str) -> ModuleType:
    return importlib.import_module(f"{PACK}.{name}")


@pytest.fixture(scope="module")
def model(pack: ModuleType) -> Any:
    with torch.inference_mode():
        return part("nodes.loading").LoadWorldModel.execute("tiny", "as stored", "auto").args[0]


def estimate(model: Any, **inputs: Any) -> tuple[str, int, int]:
    return part("nodes.loading").EstimateMemory.execute(model, **{**SIZE, "chunks": 4, **inputs}).args


def test_it_says_what_the_library_says_and_loads_nothing(model):
    comfy.model_management.unload_all_models()
    vae = part("nodes.host.vae").native_vae(part("lingbot_core.weights.layout").find_layout("tiny"))
    report, total, session = estimate(model, vae=vae)
    world = part("lingbot_core.engine.world").World.load("tiny", device="cpu")
    expected = world.estimate(world.preset, SIZE["height"], SIZE["width"], chunks=4)
    assert session == expected.session
    assert total == expected.total - expected.text_encoder + schedule(model)
    assert not comfy.model_management.loaded_models()
    assert report.splitlines()[0] == "tiny at 160x96, preset tiny"
    assert "4 chunks: 45 frames, 2.8 s at 16 fps" in report
    assert report.splitlines()[-1] == "It fits."


def test_the_cache_is_bytes_of_keys_and_values_for_every_frame_that_is_remembered(model):
    config = model.model.diffusion_model.config
    tokens = (SIZE["height"] // 16) * (SIZE["width"] // 16)
    frame = 2 * config.num_layers * tokens * config.dim * 4

    def cache(**inputs: Any) -> int:
        return part("nodes.host.estimate").forecast(model, **SIZE, **inputs).needed.kv_cache

    window = model.model.preset.window
    assert cache(chunks=4, window=0) == 12 * frame
    assert cache(chunks=400, window=0) == 1200 * frame
    assert cache(chunks=400) == cache(chunks=4) == window * frame
    assert cache(chunks=4, window=6, sink=3) == 6 * frame
    assert cache(chunks=4, preset="v2-causal-fast") == 18 * frame


def test_weights_of_another_dtype_are_counted_without_loading_them(model):
    sizes = {kind: part("nodes.host.estimate").forecast(model, **SIZE, chunks=1, weight_dtype=kind).needed.transformer
             for kind in ("as loaded", "bf16", "fp8_e4m3fn")}  # fmt: skip
    assert sizes["bf16"] == 2 * sum(p.numel() for p in model.model.diffusion_model.parameters())
    for kind in ("bf16", "fp8_e4m3fn"):
        [loaded] = part("nodes.loading").LoadWorldModel.execute("tiny", kind, "auto").args
        # The scales, and what a layer notes of them, are some bytes for each matrix.
        extra = loaded.model_size() - schedule(loaded) - sizes[kind]
        assert 0 <= extra <= 256 * sum(p.ndim == 2 for p in model.model.diffusion_model.parameters())
    assert sizes["as loaded"] == model.model_size()


def schedule(model: Any) -> int:
    """ComfyUI counts the table that each of its models has beside its weights."""
    return sum(b.nbytes for b in model.model.model_sampling.buffers())


@pytest.mark.parametrize(
    ("free", "total", "verdict"),
    [
        (10**12, 10**12, "It fits."),
        (0, 10**12, "It fits once ComfyUI has unloaded other models"),
        (0, 0, "It does not fit. Use a smaller window, a smaller picture or fewer chunks."),
    ],
)
def test_the_verdict_compares_with_what_comfyui_says_is_there(model, monkeypatch, free, total, verdict):
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda device: free)
    monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda device: total)
    assert estimate(model)[0].splitlines()[-1].startswith(verdict)


def test_a_world_beside_streamed_weights_is_said_to_be_slower(model, monkeypatch):
    _, total, session = estimate(model)
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda device: 0)
    monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda device: (total + session) // 2)
    assert "streams them from main memory" in estimate(model)[0]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"width": 161}, "161x96 is no size of a world: sides are multiples of 16"),
        ({"width": 16 * 10**6}, "is no size of a world"),
        ({"window": 4, "sink": 3}, "window=4 cannot hold its sink"),
        ({"preset": "v9"}, "there is no preset 'v9'"),
        ({"vae": "vae"}, "which is no VAE of ComfyUI"),
    ],
)
def test_values_that_cannot_be_are_refused(model, inputs, message):
    with pytest.raises(Exception, match=message):
        estimate(model, **inputs)


def test_another_model_is_refused():
    with pytest.raises(Exception, match="not a LingBot World model"):
        estimate("model")


def test_every_input_and_output_of_the_loading_nodes_is_explained(pack):
    for node in part("nodes.loading").NODES:
        schema = node.define_schema()
        assert schema.node_id.startswith("LingBot")
        assert schema.search_aliases
        assert schema.description
        assert all(part_.tooltip for part_ in (*schema.inputs, *schema.outputs))
