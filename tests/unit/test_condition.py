"""The image condition: streamed, stopped when steady, shared, and always that of the whole clip."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lingbot_core.engine.condition import ImageCondition
from lingbot_core.engine.image import PreparedImage
from lingbot_core.models.vae import EncoderState

LENGTH = 40


@pytest.fixture(scope="module")
def whole(small) -> torch.Tensor:
    """[image, zeros, zeros, ...] encoded in one call: 40 latent frames."""
    video = torch.zeros(3, 4 * LENGTH - 3, 16, 32)
    video[:, 0] = small.condition.image.pixels
    return small.world.vae.encode(video)


@pytest.fixture
def fresh(small) -> ImageCondition:
    return ImageCondition(small.world.vae, small.condition.image)


@pytest.fixture
def encodes(small, monkeypatch) -> list[int]:
    """One entry, the number of frames, for every call of the encoder."""
    calls: list[int] = []
    encode = small.world.vae.encode
    monkeypatch.setattr(
        small.world.vae, "encode", lambda video, state=None: calls.append(video.shape[1]) or encode(video, state)
    )
    return calls


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_streamed_latents_are_bitwise_those_of_the_whole_clip(fresh, whole, chunk):
    parts = [fresh.latents(first, chunk) for first in range(0, LENGTH - chunk + 1, chunk)]
    streamed = torch.cat(parts, dim=1)
    assert streamed.dtype == torch.float32
    assert torch.equal(streamed[4:], whole[:, : streamed.shape[1]])


def test_the_mask_is_one_on_latent_frame_zero_alone(fresh):
    first, later = fresh.latents(0, 3), fresh.latents(3, 3)
    assert first.shape == later.shape == (20, 3, 2, 4)
    assert (first[:4, 0] == 1).all()
    assert (first[:4, 1:] == 0).all()
    assert (later[:4] == 0).all()


def test_latents_may_be_asked_for_in_any_order(fresh, whole):
    for first, count in ((6, 3), (0, 3), (3, 5), (6, 1), (0, 40), (37, 3)):
        assert torch.equal(fresh.latents(first, count)[4:], whole[:, first : first + count])


def test_the_encoder_runs_as_far_as_asked_for_and_no_further(fresh, encodes):
    fresh.latents(0, 3)
    assert encodes == [1, 4, 4]
    assert fresh.encoded == 3
    assert fresh.steady_from is None
    fresh.latents(0, 3)
    fresh.latents(1, 1)
    assert len(encodes) == 3
    fresh.latents(5, 1)
    assert len(encodes) == 6


def test_the_encoder_stops_when_its_state_is_steady_and_every_later_latent_is_the_last(fresh, whole, encodes):
    assert torch.equal(fresh.latents(0, LENGTH)[4:], whole)
    steady = fresh.steady_from
    assert steady is not None
    assert 12 < steady < LENGTH - 1
    assert len(encodes) == fresh.encoded == steady + 1
    held = fresh.nbytes
    far = fresh.latents(10**6, 2)
    assert torch.equal(far[4:], whole[:, -2:])
    assert len(encodes) == steady + 1
    assert fresh.nbytes == held == (steady + 1) * 16 * 2 * 4 * 4  # the encoder's caches are gone


def test_it_does_not_stop_before_the_latents_are_constant(fresh, whole):
    """Not one latent earlier than the whole clip's own latents allow."""
    fresh.latents(0, LENGTH)
    changes = [i for i in range(1, LENGTH) if not torch.equal(whole[:, i], whole[:, i - 1])]
    assert fresh.steady_from >= max(changes)
    assert len(changes) > 8


def test_threads_that_ask_at_once_get_the_same_and_nothing_is_encoded_twice(fresh, whole, encodes):
    ready = threading.Barrier(4)

    def ask(worker: int) -> list[tuple[int, torch.Tensor]]:
        ready.wait(30)
        return [(first, fresh.latents(first, 3)) for first in range(worker, 24, 1 + worker)]

    with ThreadPoolExecutor(4) as pool:
        for answers in pool.map(ask, range(4)):
            for first, got in answers:
                assert torch.equal(got[4:], whole[:, first : first + 3])
    assert len(encodes) == fresh.encoded <= 26


def test_two_sessions_that_share_an_image_encode_it_once(small, walks, encodes):
    chunks = walks["window"].chunks[:2]
    encodes.clear()
    condition = ImageCondition(small.world.vae, small.condition.image)
    sessions = [small.start(image=condition) for _ in range(2)]
    for expected in chunks:
        for session in sessions:
            small.assert_same_chunk(small.step(session), expected)
    assert encodes == [1, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("call", [0, 1, 3])
def test_a_failed_encode_is_simply_done_again(fresh, whole, small, failing, call):
    failing(small.world.vae, "encode", RuntimeError("out of memory")).arm(call)
    with pytest.raises(RuntimeError, match="out of memory"):
        fresh.latents(0, 6)
    assert fresh.encoded == call
    assert torch.equal(fresh.latents(0, 9)[4:], whole[:, :9])


def test_a_ctrl_c_while_waiting_for_the_encoder_loses_no_latent(fresh, whole, monkeypatch):
    """On a GPU the host waits when it compares the states: that is where a Ctrl-C arrives."""

    def interrupted(state: EncoderState, other: EncoderState) -> bool:
        raise KeyboardInterrupt

    fresh.latents(0, 5)
    with monkeypatch.context() as patch:
        patch.setattr(EncoderState, "equals", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fresh.latents(0, 8)
    assert torch.equal(fresh.latents(0, 12)[4:], whole[:, :12])


def test_latents_depend_on_the_picture(small, fresh):
    other = PreparedImage(-small.condition.image.pixels, 16, 32, 16, 32, "area", digest="other")
    assert not torch.equal(ImageCondition(small.world.vae, other).latents(0, 1), fresh.latents(0, 1))
    assert (fresh.digest, fresh.height, fresh.width) == ("a picture of noise", 16, 32)


def test_work_done_under_a_callers_autograd_needs_none(fresh):
    with torch.enable_grad():
        assert not fresh.latents(0, 2).requires_grad
