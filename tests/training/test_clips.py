"""Training clips: their controls are those of a session that holds the same keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lingbot_core.camera import PER_VIDEO, CameraCarry, KeyMotion, to_controls, walk
from training.clips import FADE_FRAMES, PRESETS, Clips, fades, held_states, sample_clips, walk_clips
from training.scene import STRIDE
from training.styles import PHRASES, STYLES, palettes, style_of


@pytest.fixture(scope="module")
def clips() -> Clips:
    return sample_clips(3, 64, latents=9)


def in_key_units(poses: np.ndarray) -> np.ndarray:
    """Poses of a scene with lengths in units of the key steps."""
    out = np.array(poses)
    out[..., :3, 3] /= STRIDE
    return out


def test_controls_are_those_of_to_controls_for_the_same_keys(clips):
    assert clips.from_rest.any()
    assert not clips.from_rest.all()
    assert set(clips.preset) == {0, 1}
    for b in range(len(clips)):
        steps = PRESETS[clips.preset[b]]
        carry = CameraCarry(in_key_units(clips.before[b]), 0)
        for chunk in range(3):
            part = slice(3 * chunk, 3 * chunk + 3)
            controls, carry = to_controls(
                KeyMotion(tuple(clips.keys(b)[part]), steps),
                latents=3,
                unit=steps.move_per_latent,
                first_delta="from_rest" if clips.from_rest[b] else "identity",
                carry=carry,
            )
            np.testing.assert_allclose(clips.relative[b, part], controls.relative, atol=1e-9)
            np.testing.assert_allclose(in_key_units(clips.latent[b, part][-1]), carry.pose, atol=1e-9)


def test_video_frames_pass_through_every_latent_and_step_evenly(clips):
    assert clips.c2w.shape == (64, 33, 4, 4)
    np.testing.assert_allclose(clips.c2w[:, 4::4], clips.latent[:, 1:], atol=1e-12)
    b = int(np.flatnonzero((clips.preset == 0) & ~clips.from_rest)[0])
    frames = [keys for keys in clips.keys(b)[1:] for _ in range(4)]
    walked = walk(in_key_units(clips.latent[b, 0]), frames, PER_VIDEO, per_latent=False)
    np.testing.assert_allclose(in_key_units(clips.c2w[b, 1:].numpy()), walked, atol=1e-9)


def test_a_first_press_from_rest_is_seen_within_the_first_latent_after_the_picture():
    clips = walk_clips(
        np.zeros((2, 4)),
        held_states([["w", "", ""]] * 2),
        np.zeros(2, int),
        np.array([True, False]),
        np.zeros((2, 1), int),
        [[""], [""]],
    )
    travelled = clips.c2w[:, :, 2, 3] - clips.c2w[:, :1, 2, 3]
    np.testing.assert_allclose(travelled[0, :6] / STRIDE, [0, 0.05, 0.1, 0.15, 0.2, 0.2], atol=1e-5)
    np.testing.assert_allclose(travelled[1], 0, atol=1e-12)
    np.testing.assert_allclose(clips.relative[0, 0, :3, 3], [0, 0, 1], atol=1e-5)


def test_many_clips_hold_keys_look_far_up_and_rest():
    clips = sample_clips(1, 512, latents=15)
    held = clips.held.mean(axis=(0, 1))
    assert (held > 0.03).all()
    assert 0.03 < (~clips.held.any(axis=2)).mean() < 0.3
    pitch = np.degrees(np.arcsin(-clips.latent[..., 1, 2]))
    assert pitch.max() > 60
    assert pitch.min() < -60
    assert (np.abs(pitch) < 35).mean() > 0.8
    again = sample_clips(1, 512, latents=15)
    assert torch.equal(again.c2w, clips.c2w)
    assert again.prompts == clips.prompts


def test_prompts_say_the_style_of_their_chunk_and_change_with_it():
    clips = sample_clips(2, 600, latents=15)
    switched = (clips.style[:, 0] != clips.style[:, -1]).float().mean()
    assert 0.33 < switched < 0.47
    texts = [(text, int(style)) for row, styles in zip(clips.prompts, clips.style, strict=True)
             for text, style in zip(row, styles, strict=True)]  # fmt: skip
    empty = sum(not text for text, _ in texts) / len(texts)
    assert 0.05 < empty < 0.15
    assert all(style_of(text) == style for text, style in texts if text)
    assert all(len(phrase.split()) <= 6 for name in STYLES for phrase in PHRASES[name])


def test_a_new_style_fades_in_over_the_first_frames_of_its_chunk():
    table = palettes()
    made = fades(torch.tensor([[0, 2, 2]]), 3)
    assert made.shape[:2] == (1, 33)
    assert torch.equal(made[0, 8], table[0])
    torch.testing.assert_close(made[0, 9 + FADE_FRAMES // 2 - 1], (table[0] + table[2]) / 2)
    torch.testing.assert_close(made[0, 9 + FADE_FRAMES - 1], table[2])
    torch.testing.assert_close(made[0, 32], table[2])
