"""Chunks whose camera stands still may see less: which frames, when, and that a replay sees the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from lingbot_core import World, WorldSession
from lingbot_core.camera.controls import KeyMotion
from lingbot_core.camera.keys import PER_LATENT
from lingbot_core.engine.controls_file import _preset_to_json, _start
from lingbot_core.engine.steering import stands_still
from lingbot_core.errors import PresetError
from lingbot_core.models.kv_cache import CacheShape, KVCache
from lingbot_core.presets import get_preset

SHAPE = CacheShape(layers=1, heads=1, head_dim=2, frame_tokens=3)
IMAGE = np.full((32, 48, 3), 90, dtype=np.uint8)


@pytest.fixture(scope="module")
def world() -> World:
    return World.load("tiny")


def begin(world: World, **overrides: int) -> WorldSession:
    return WorldSession.start(world, IMAGE, "a field", preset=world.preset.with_overrides(**overrides))


def step(session: WorldSession, held: str) -> torch.Tensor:
    return session.advance(session.controls(KeyMotion((held,) * 3, PER_LATENT))).latents


@pytest.mark.parametrize(("window", "sink", "limit"), [(None, 0, 6), (12, 3, 9), (7, 1, 5), (12, 3, 12)])
def test_the_sink_and_the_newest_frames_are_seen(window, sink, limit):
    cache = KVCache(SHAPE, window=window, sink=sink, dtype=torch.float32, device=torch.device("cpu"))
    for chunk in range(6):
        cache.begin(3 * chunk, 3)
        for buffer in cache.buffers(0):
            for offset, slot in enumerate(cache.open_slots.tolist()):
                buffer.split(3)[slot].fill_(3 * chunk + offset)
        slots = cache.latest(limit)
        held = sorted(cache.slot_frames)
        if len(held) <= limit:
            assert slots is None
        else:
            keys, values = cache.view(0, slots)
            expected = held[:sink] + held[len(held) - (limit - sink) :]
            assert sorted(keys.split(3)[i][0, 0, 0].item() for i in range(limit)) == expected
            assert torch.equal(keys, values)
        cache.end()


def test_only_a_camera_that_stands_still_counts(world):
    session = begin(world)
    assert stands_still(session.controls(KeyMotion(("", "", ""), PER_LATENT)))
    for held in (("", "", "w"), ("", "j", "")):
        assert not stands_still(session.controls(KeyMotion(held, PER_LATENT)))


def test_moving_chunks_see_everything_and_still_ones_less(world):
    whole, less = begin(world), begin(world, still_window=6)
    for held in ("w", "w", "wl"):
        assert torch.equal(step(whole, held), step(less, held))
    assert not torch.equal(step(whole, ""), step(less, ""))


def test_a_replay_sees_what_was_seen(world):
    session = begin(world, still_window=6)
    for held in ("w", "", "", "", "w"):
        step(session, held)
    condition = world.condition(IMAGE)
    again = WorldSession.from_history(world, condition, session.history, prompt_states=session.prompt_states.positive)
    again.resume()
    for held in ("", "w", ""):
        assert torch.equal(step(session, held), step(again, held))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tiny", 2, "at least 3"),
        ("tiny", 9, "no effect"),
        ("tiny", 2.5, "whole number"),
        ("v2-diffusers", 11, "least 12"),
    ],
)
def test_windows_that_make_no_sense_are_refused(name, value, words):
    with pytest.raises(PresetError, match=words):
        get_preset(name).with_overrides(still_window=value)


def test_zero_is_off_and_the_label_says_when_it_is_on():
    preset = get_preset("v1-fast")
    assert preset.with_overrides(still_window=0) == preset
    assert preset.with_overrides(still_window=9).label == "v1-fast (still_window=9)"


def test_records_from_before_there_was_one_are_read(world):
    session = begin(world)
    start = session.history.start
    fields = {name: getattr(start, name) for name in start.__dataclass_fields__}
    old = json.loads(json.dumps(_preset_to_json(start.preset)))
    del old["still_window"]
    assert _start({**fields, "preset": old, "intrinsics": list(start.intrinsics)}, "a record").preset == start.preset
