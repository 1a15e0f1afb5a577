"""The measures, tried on pictures whose answer is known, and on the rendered truth itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from training.evaluate import alive, as_text, chunk_slices, compare, summary, switched
from training.measures import agrees, along_key, global_motion, gradient_energy, psnr, stretches
from training.walks import ONE_KEY, Walk, key_walk, mixed_walks, switch_walk, truth, wander

CHUNKS = 3


@pytest.fixture(scope="module")
def walks() -> list[tuple[Walk, torch.Tensor]]:
    return [(walk, truth(walk, 48, 80).float() / 255) for walk in (key_walk(2, key, CHUNKS) for key in ONE_KEY)]


def smooth_picture(scale: float = 1.0, x: float = 0.0, y: float = 0.0) -> torch.Tensor:
    """A pattern [3, 96, 160] with its points moved by (x, y) and drawn apart from the middle by ``scale``."""
    j, i = torch.meshgrid(torch.arange(96) - 47.5, torch.arange(160) - 79.5, indexing="ij")
    i, j = (i - x) / scale, (j - y) / scale
    return (0.5 + 0.2 * torch.sin(i / 6 + 1) * torch.cos(j / 5) + 0.2 * torch.sin(i / 17 - j / 9)).expand(3, -1, -1)


@pytest.mark.parametrize(("u", "v", "e"), [(3.0, 0.0, 0.0), (0.0, -4.0, 0.0), (0.0, 0.0, 0.02), (-1.5, 2.0, -0.015)])
def test_a_known_motion_is_measured(u, v, e):
    frames = torch.stack([smooth_picture(), smooth_picture(1 + e, u, v)])
    found = global_motion(frames)[0]
    torch.testing.assert_close(found, torch.tensor([u, v, e], dtype=torch.float64), atol=2e-3, rtol=2e-2)


def test_half_seconds_are_those_with_one_key_held():
    assert stretches(["w"] * 6) == [("w", slice(0, 8)), ("w", slice(8, 16))]
    assert stretches(["w", "d", "a", "a", "", "", "wd", "wd", "j", "j"]) == [("a", slice(4, 12)), ("j", slice(28, 36))]


def test_the_truth_agrees_with_itself_on_every_key(walks):
    judged = summary([compare(walk, frames, frames) for walk, frames in walks])
    assert judged["agreement"] == 1
    assert set(judged["agreement_per_key"]) == set("wsadjlik")
    assert all(share == pytest.approx(1) for share in judged["motion_share_per_key"].values())
    assert judged["psnr_per_chunk"] == [99.0] * CHUNKS
    assert judged["energy_per_chunk"] == pytest.approx([1.0] * CHUNKS)


def test_opposite_keys_and_a_still_picture_agree_never(walks):
    opposite = dict(zip("wsadjlik", "swdaljki", strict=True))
    reversed_keys = [
        compare(dataclasses.replace(walk, keys=tuple(opposite[k] for k in walk.keys)), frames, frames)
        for walk, frames in walks
    ]
    assert summary(reversed_keys)["agreement"] == 0
    still = [compare(walk, frames[:1].expand_as(frames), frames) for walk, frames in walks]
    assert summary(still)["agreement"] == 0
    assert all(abs(share) < 1e-4 for share in summary(still)["motion_share_per_key"].values())


def test_flicker_without_motion_agrees_never():
    generator = torch.Generator().manual_seed(1)
    # In a picture with enough to hold on to; in a bright and empty one flicker can pass for motion, either way.
    walk = key_walk(0, "j", CHUNKS)
    frames = truth(walk, 48, 80).float() / 255
    shown = (frames[:1] + 0.05 * torch.randn(len(frames), 3, 1, 1, generator=generator)).clamp(0, 1)
    assert summary([compare(walk, shown, frames)])["agreement"] <= 0.2


def test_half_of_the_motion_measures_as_half(walks):
    walk, _ = walks[ONE_KEY.index("l")]
    whole = torch.stack([smooth_picture(x=-3.0 * t) for t in range(25)])
    half = torch.stack([smooth_picture(x=-1.5 * t) for t in range(25)])
    share = summary([compare(walk, half, whole)])["motion_share_per_key"]["l"]
    assert share == pytest.approx(0.5, abs=0.03)


def test_blur_lowers_gradient_energy_and_psnr_is_that_of_the_error():
    picture = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    blurred = torch.nn.functional.avg_pool2d(picture, 3, 1, 1)
    assert gradient_energy(blurred) < 0.3 * gradient_energy(picture)
    assert psnr(picture, picture + 0.1) == pytest.approx(20, abs=1e-3)


def test_a_picture_that_goes_grey_or_to_noise_has_collapsed():
    frames = truth(wander(1, 3), 48, 80).float() / 255
    early, late = chunk_slices(3)[0], chunk_slices(3)[2]
    assert alive(frames, frames, early, late)["alive"]
    grey = frames.clone()
    grey[late] = frames[late].mean(dim=(2, 3), keepdim=True)
    assert not alive(grey, frames, early, late)["alive"]
    noise = frames.clone()
    noise[late] = torch.rand(noise[late].shape, generator=torch.Generator().manual_seed(0))
    assert not alive(noise, frames, early, late)["alive"]
    tinted = frames.clone()
    tinted[late] = (tinted[late] + torch.tensor([0.4, -0.3, 0.0]).view(3, 1, 1)).clamp(0, 1)
    assert not alive(tinted, frames, early, late)["alive"]


def test_a_switch_is_seen_when_the_colours_are_those_of_the_new_style():
    walk = switch_walk(0, 5, 3)
    assert walk.styles[0] != walk.styles[-1]
    new, old = truth(walk, 24, 40).float() / 255, truth(walk, 24, 40, styles=walk.styles[:1] * 5).float() / 255
    part = chunk_slices(5)[4]
    assert switched(new, old, new, part)["progress"] == pytest.approx(1)
    assert switched(new, old, new, part)["switched"]
    assert not switched(old, old, new, part)["switched"]


def test_mixed_walks_hold_every_key_and_stay_near_the_horizon():
    for scene in range(4):
        walks = mixed_walks(scene, 8)
        assert {key for walk in walks for key in walk.keys} == set("wsadjlik")
        for walk in walks:
            height = [(key == "i") - (key == "k") for key in walk.keys]
            assert max(abs(sum(height[:n])) for n in range(25)) <= 3


def test_the_table_marks_what_stays_below_must(walks):
    walk, frames = walks[0]
    text = as_text({"walks": summary([compare(walk, frames[:1].expand_as(frames), frames)])})
    assert "below must" in next(line for line in text.splitlines() if line.startswith("half seconds"))


def test_motion_along_a_key_has_its_sign():
    right = torch.tensor([[-2.0, 0.0, 0.0]] * 8)
    assert along_key(right, "d", 160) == 16
    assert along_key(right, "j", 160) == -16
    assert not agrees(0.1)
