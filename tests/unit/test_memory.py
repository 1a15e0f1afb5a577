"""What a session will take, known before anything is allocated."""

from __future__ import annotations

import psutil
import pytest
import torch

from lingbot_core.engine import memory
from lingbot_core.engine.memory import GIB, encode_bytes, estimate, free_bytes, require_free
from lingbot_core.errors import MemoryPlanError
from lingbot_core.models.dit import DiTConfig
from lingbot_core.models.kv_cache import KVCache
from lingbot_core.models.vae import DecoderState, EncoderState, VAEConfig, WanVAE
from lingbot_core.presets import Preset, get_preset

CPU = torch.device("cpu")
SMALL = DiTConfig(dim=64, ffn_dim=96, num_layers=3, num_heads=2, freq_dim=32, text_dim=24, text_len=16)
SMALL_VAE = VAEConfig(dim=4, num_res_blocks=1)


def of(preset: Preset, **changes: object):
    settings = {"height": 64, "width": 96, "chunks": 5, "dtype": torch.float32, **changes}
    return estimate(SMALL, SMALL_VAE, preset, **settings)


@pytest.mark.parametrize("name", ["v1-fast", "v2-causal-fast", "v2-causal-pretrain"])
def test_keys_and_values_are_counted_to_the_byte(name):
    preset = get_preset(name)
    shape = memory._dit_on_meta(SMALL).cache_shape(8, 12)
    cache = KVCache(
        shape, window=preset.window, sink=preset.sink, capacity=5 * preset.chunk, dtype=torch.bfloat16, device=CPU
    )
    branches = 2 if name == "v2-causal-pretrain" else 1
    assert of(preset, cache_dtype=torch.bfloat16).kv_cache == branches * cache.nbytes


def test_a_real_vaes_running_states_have_the_predicted_bytes():
    vae = WanVAE(SMALL_VAE)
    encoder, decoder = EncoderState(), DecoderState()
    with torch.inference_mode():
        vae.encode(torch.zeros(3, 9, 64, 96), encoder)
        vae.decode(torch.zeros(16, 3, 8, 12), decoder)
    # While it decodes, the state before the chunk is kept beside the new one.
    assert of(get_preset("v1-fast")).vae_states == encoder.nbytes + 2 * decoder.nbytes


def test_full_size_weights_and_cache_follow_from_the_published_sizes():
    needed = estimate(
        DiTConfig(), VAEConfig(), get_preset("v2-causal-fast"), height=480, width=832, chunks=1, dtype=torch.bfloat16
    )
    assert needed.transformer == 2 * 18_544_332_864
    assert needed.vae == 4 * 126_892_531
    assert needed.kv_cache == 18 * 1560 * 40 * 2 * 5120 * 2  # window, tokens, layers, keys and values, width, bytes


def test_depth_of_rewinding_and_a_text_encoder_cost_what_they_hold():
    preset = get_preset("v2-causal-fast")
    plain, deep = of(preset), of(preset, rewind_depth=2, text_encoder=1000)
    frame = memory._dit_on_meta(SMALL).cache_shape(8, 12).frame_bytes(torch.float32)
    assert deep.kv_cache - plain.kv_cache == 2 * preset.chunk * frame
    assert deep.weights - plain.weights == 1000
    assert deep.total == deep.weights + deep.session


def test_only_without_a_window_do_more_chunks_need_more():
    assert of(get_preset("v1-fast"), chunks=9).kv_cache > of(get_preset("v1-fast"), chunks=5).kv_cache
    assert of(get_preset("v2-diffusers"), chunks=9).kv_cache == of(get_preset("v2-diffusers"), chunks=5).kv_cache


def test_a_session_that_does_not_fit_is_refused_with_the_figures_and_the_way_out(monkeypatch):
    needed = of(get_preset("v1-fast"))
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed.session - 1)
    with pytest.raises(MemoryPlanError, match=r"needs 0\.0 GiB on cpu .* K/V cache .* smaller picture"):
        require_free(needed, CPU)
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed.session)
    require_free(needed, CPU)
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    require_free(needed, CPU)


def test_free_memory_of_the_host_counts_the_file_cache_as_free():
    free = free_bytes(CPU)
    assert free is None or abs(free - psutil.virtual_memory().available) < GIB


def test_encoding_a_start_image_takes_at_least_what_its_encoder_holds(tiny_world):
    height, width = 32, 48
    state = EncoderState()
    tiny_world.vae.encode(torch.zeros(3, 9, height, width), state)
    small = encode_bytes(tiny_world.vae.config, height, width)
    assert small > 2 * state.nbytes
    assert encode_bytes(tiny_world.vae.config, 2 * height, width) == 2 * small
