"""A loaded world: the embedded model, what is shared and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from lingbot_core.engine.condition import ImageCondition
from lingbot_core.engine.image import prepare_image, read_image
from lingbot_core.engine.session import WorldSession
from lingbot_core.engine.world import World
from lingbot_core.errors import AttentionError, InputFileError, PresetError, PromptError, WeightsError
from lingbot_core.presets import PRESETS

DAY = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "day.png"


@pytest.fixture(scope="module")
def picture() -> np.ndarray:
    return read_image(DAY)


def test_the_embedded_model_walks_from_a_picture_to_frames(tiny_world, picture):
    """Real code path from a text prompt on; a fork and the original then go the same way."""
    image = prepare_image(picture, size=(48, 80))
    session = WorldSession.start(tiny_world, image, "a quiet valley", seed=1, rewind_depth=1)
    start = session.history.start
    assert start.preset is tiny_world.preset is PRESETS["tiny"]
    assert (start.height, start.width) == (48, 80)
    assert start.model == tiny_world.fingerprint
    forward = np.tile(np.eye(4), (9, 1, 1))
    forward[:, 2, 3] = np.linspace(0, 1, 9)
    chunk = session.advance(session.controls(forward))
    assert chunk.frames.shape == (3, 9, 48, 80)
    assert torch.isfinite(chunk.frames).all()
    assert 0.05 < chunk.frames.std() < 1
    fork = session.fork()
    chunks = []
    for one in (session, fork):
        one.set_prompt("a storm")
        chunks.append(one.advance(one.controls(forward[:3] + 0)))
    assert torch.equal(chunks[0].frames, chunks[1].frames)
    assert chunks[0].frames.shape == (3, 12, 48, 80)
    assert [record.prompt for record in session.history.chunks] == ["a quiet valley", "a storm"]


def test_loading_twice_gives_the_same_model_and_fingerprint(tiny_world):
    again = World.load("tiny", device="cpu", dtype="float32")
    assert again.fingerprint == tiny_world.fingerprint
    ours, theirs = again.dit.state_dict(), tiny_world.dit.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len(again.fingerprint) == 16


def test_fingerprints_tell_weights_and_precision_apart(small, act_world, tiny_world):
    seen = {small.world.fingerprint, act_world.fingerprint, tiny_world.fingerprint}
    seen.add(World.load("tiny", device="cpu", dtype="bfloat16").fingerprint)
    assert len(seen) == 4
    assert dataclasses.replace(small.world, fingerprint="").fingerprint == small.world.fingerprint


def test_dtype_and_preset_are_honoured():
    world = World.load("tiny", preset="v1-fast", device="cpu", dtype="bfloat16")
    assert world.preset is PRESETS["v1-fast"]
    assert world.preset_reason == "chosen by the user"
    assert {p.dtype for p in world.dit.parameters()} == {torch.bfloat16}
    assert world.cache_dtype == torch.bfloat16
    # The VAE, and with it the condition, stays exact.
    assert {p.dtype for p in world.vae.parameters()} == {torch.float32}
    custom = PRESETS["v1-fast"].with_overrides(shift=3.0)
    assert World.load("tiny", preset=custom, device="cpu").preset is custom


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "/nowhere/at/all"}, InputFileError, "'/nowhere/at/all' does not exist"),
        ({"preset": "v9"}, PresetError, "there is no preset 'v9'"),
        ({"dtype": "int8"}, WeightsError, "dtype 'int8' is unknown; use auto, float32, bfloat16, float16"),
        ({"attention": "sage"}, AttentionError, "there is no attention backend 'sage'"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        World.load(**{"device": "cpu", **options})


def test_a_world_without_a_text_encoder_takes_states_only(small):
    with pytest.raises(PromptError, match="small cam was loaded without a text encoder; give prompt_states"):
        small.world.encode_prompt("a")
    with pytest.raises(PromptError, match="give prompt_states"):
        WorldSession.start(small.world, small.condition, "a")


def test_a_prompt_is_encoded_to_the_length_that_the_transformer_takes(tiny_world):
    encoded = tiny_world.encode_prompt("x" * 2000)
    assert encoded.truncated
    assert encoded.states.shape == (tiny_world.dit.config.text_len, tiny_world.dit.config.text_dim)
    assert torch.equal(tiny_world.encode_text("a"), tiny_world.encode_prompt("a").states)


def test_a_picture_becomes_a_condition_of_the_worlds_own_area(tiny_world, picture):
    condition = tiny_world.condition(picture)
    assert isinstance(condition, ImageCondition)
    assert (condition.height, condition.width) == (96, 160)
    assert tiny_world.condition(condition) is condition
    prepared = prepare_image(picture, size=(64, 64))
    other = tiny_world.condition(prepared)
    assert (other.height, other.width) == (64, 64)
    assert condition.digest == tiny_world.condition(picture).digest != other.digest


def test_a_world_cannot_be_changed(small):
    with pytest.raises(dataclasses.FrozenInstanceError):
        small.world.preset = PRESETS["v1-fast"]
