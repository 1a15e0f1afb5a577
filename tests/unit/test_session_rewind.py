"""Rewind, fork and replay: whatever way a session came to a chunk, the chunk is bitwise that of a straight walk."""

from __future__ import annotations

import math

import pytest
import torch

from lingbot_core.camera.rays import camera_rays
from lingbot_core.engine.chunk import replay_commit
from lingbot_core.errors import HistoryError
from lingbot_core.models.dit import ChunkContext
from lingbot_core.models.kv_cache import KVCache


class Cancel(BaseException):
    pass


def cancel(step: int, total: int) -> None:
    raise Cancel


def test_the_recorded_walks_evict_and_keep_their_sink(walks):
    """Without this, the tests below would not see an eviction."""
    assert sorted(walks["window"].caches[-1][0].slot_frames) == [0, 1, 2, 15, 16, 17, 18, 19, 20]
    partial = [sorted(caches[0].slot_frames) for caches in walks["partial-eviction"].caches]
    assert partial[3] == list(range(16))
    assert partial[4] == [*range(6), *range(8, 20)]
    assert partial[6] == [*range(6), *range(16, 28)]
    assert walks["whole-past"].caches[-1][0].slot_frames == tuple(range(21))


@pytest.mark.parametrize("rewind_depth", [0, 2])
def test_rewinding_and_going_on_equals_the_straight_walk(small, walks, recipe, rewind_depth):
    walk = walks[recipe]
    session = small.start(recipe, rewind_depth=rewind_depth)
    small.steps(session, walks.LENGTH)
    # One and two chunks back, then beyond a depth of 2 into the sink's time, then to the very beginning.
    for cut in (walks.LENGTH - 1, walks.LENGTH - 2, 2, 0):
        session.rewind(cut)
        assert session.state == "ready"
        assert len(session.history) == cut
        assert session.carry.latents == cut * walk.session.history.start.preset.chunk
        if cut:
            small.assert_same_caches(session._derived.caches, walk.caches[cut - 1])
        for expected in walk.chunks[cut : cut + 2]:
            small.assert_same_chunk(small.step(session), expected)
        small.assert_same_caches(session._derived.caches, walk.caches[len(session.history) - 1])


@pytest.mark.parametrize("cut", [0, 2, 5, 7])
def test_a_fork_equals_the_straight_walk_and_leaves_the_original_alone(small, walks, recipe, cut):
    walk = walks[recipe]
    before = [cache.clone() for cache in walk.session._derived.caches]
    history = walk.session.history
    fork = walk.session.fork(cut)
    assert fork.history.chunks == history.chunks[:cut]
    if cut:
        small.assert_same_caches(fork._derived.caches, walk.caches[cut - 1])
    if cut < walks.LENGTH:
        small.assert_same_chunk(small.step(fork), walk.chunks[cut])
        small.assert_same_caches(fork._derived.caches, walk.caches[cut])
    small.assert_same_caches(walk.session._derived.caches, before)
    assert walk.session.history is history
    fork.close()
    assert walk.session.state == "ready"


@pytest.mark.parametrize("rewind_depth", [0, 3])
def test_the_original_goes_on_unchanged_after_a_fork_went_elsewhere(small, walks, rewind_depth):
    walk = walks["window"]
    session = small.start("window", rewind_depth=rewind_depth)
    small.steps(session, 4)
    fork = session.fork(3)
    fork.set_prompt("elsewhere", states=torch.ones(2, 20))
    elsewhere = fork.advance(small.controls(3, 3))
    assert not torch.equal(elsewhere.latents, walk.chunks[3].latents)
    for expected in walk.chunks[4:6]:
        small.assert_same_chunk(small.step(session), expected)


@pytest.mark.parametrize("way", ["rewind", "fork"])
def test_snapshots_of_a_path_that_was_left_are_never_used_again(small, way):
    """Back to chunk 3, elsewhere from there, and back again to a chunk that both paths have."""

    def elsewhere(session) -> list:
        session.set_prompt("elsewhere", states=small.states(2))
        return [session.advance(small.controls(index, 3)) for index in (3, 4)]

    plain = small.start("window")
    small.steps(plain, 3)
    expected = elsewhere(plain)
    session = small.start("window", rewind_depth=4)
    small.steps(session, 6)
    if way == "fork":
        session = session.fork(3)
    else:
        session.rewind(3)
    for chunk, wanted in zip(elsewhere(session), expected, strict=True):
        small.assert_same_chunk(chunk, wanted)
    session.rewind(4)
    small.assert_same_chunk(session.advance(small.controls(4, 3)), expected[1])


def test_a_fork_of_a_fork_and_a_fork_after_a_rewind_equal_the_straight_walk(small, walks):
    walk = walks["partial-eviction"]
    first = walk.session.fork(6)
    second = first.fork(5)
    small.assert_same_chunk(small.step(second), walk.chunks[5])
    second.rewind(4)
    third = second.fork()
    for session in (third, second):
        small.assert_same_chunk(small.step(session), walk.chunks[4])


def test_a_forks_storage_is_its_own(small, walks, recipe):
    def pointers(session) -> set[int]:
        buffers = (t for cache in session._derived.caches for t in (*cache._keys, *cache._values))
        undo = (
            t for cache in session._derived.caches for record in cache._undo for t in (*record.keys, *record.values)
        )
        return {t.untyped_storage().data_ptr() for t in (*buffers, *undo)}

    session = small.start(recipe, rewind_depth=2)
    small.steps(session, 5)
    assert not pointers(session) & pointers(session.fork())


@pytest.mark.parametrize("rewind_depth", [0, 2])
def test_rewind_and_fork_after_a_cancel_equal_the_straight_walk(small, walks, recipe, rewind_depth):
    walk = walks[recipe]
    session = small.start(recipe, rewind_depth=rewind_depth)
    small.steps(session, 5)
    with pytest.raises(Cancel):
        small.step(session, on_step=cancel)
    fork = session.fork()
    small.assert_same_chunk(small.step(fork), walk.chunks[5])
    session.rewind(4)
    small.assert_same_caches(session._derived.caches, walk.caches[3])
    for expected in walk.chunks[4:6]:
        small.assert_same_chunk(small.step(session), expected)


def test_within_the_rewind_depth_nothing_is_replayed_or_decoded_again(small, walks, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the model ran")

    walk = walks["window"]
    session = small.start("window", rewind_depth=2)
    small.steps(session, 6)
    with monkeypatch.context() as patch:
        for owner, name in ((small.world.dit, "forward"), (small.world.dit, "remember"), (small.world.vae, "decode")):
            patch.setattr(owner, name, refuse)
        session.rewind(4)
        fork = session.fork()
    for one in (session, fork):
        small.assert_same_chunk(small.step(one), walk.chunks[4])


def test_beyond_the_snapshots_the_decoder_is_rebuilt_from_its_span_alone(small, monkeypatch):
    length = 14
    session = small.start("window")
    chunks = small.steps(session, length)
    decoded = []
    decode = small.world.vae.decode
    monkeypatch.setattr(small.world.vae, "decode", lambda latents, state: decoded.append(0) or decode(latents, state))
    session.rewind(length - 1)
    span = math.ceil(small.world.vae.config.decoder_span / 3) + 1
    assert span < length - 1
    assert len(decoded) == span
    small.assert_same_chunk(small.step(session), chunks[-1])


def test_replaying_every_commit_rebuilds_the_cache_slot_by_slot(small, walks, recipe):
    """The replay is written out here, from the history alone."""
    walk = walks[recipe]
    start, dit = walk.session.history.start, small.world.dit
    states = {"a": walk.session._derived.prompts._states["a"], "b": walk.session._derived.prompts._states["b"]}
    caches = [
        KVCache(
            dit.cache_shape(start.height // 8, start.width // 8),
            window=start.preset.window,
            sink=start.preset.sink,
            dtype=torch.float32,
            device=small.world.device,
        )
        for _ in walk.session._derived.caches
    ]
    for record, expected in zip(walk.session.history.chunks, walk.caches, strict=True):
        first, frames = record.index * start.preset.chunk, start.preset.chunk
        rays = camera_rays(record.controls.relative, start.intrinsics, start.height, start.width)
        texts = [states[record.prompt], walk.session._derived.prompts._negative_states]
        contexts = []
        with torch.inference_mode():
            for cache, text in zip(caches, texts, strict=False):
                cache.begin(first, frames)
                contexts.append(
                    ChunkContext(
                        first,
                        small.condition.latents(first, frames),
                        dit.encode_camera(rays),
                        dit.rope(first, frames, start.height // 8, start.width // 8, small.world.device),
                        dit.encode_prompt(text),
                        cache,
                    )
                )
        replay_commit(dit, start.preset, contexts, record.latents, record.last_input)
        for cache in caches:
            cache.end()
        small.assert_same_caches(caches, expected)


def test_going_back_needs_chunks_that_exist(small, walks):
    session = walks["window"].session
    for wrong in (-1, 8):
        with pytest.raises(HistoryError, match=f"{wrong} chunks were asked for; this history has 7"):
            session.rewind(wrong)
        with pytest.raises(HistoryError, match="this history has 7"):
            session.fork(wrong)
    assert session.state == "ready"


def test_rewinding_to_the_end_changes_nothing(small, walks):
    session = walks["window"].session.fork()
    session.set_prompt("next", states=torch.ones(2, 20))
    session.rewind(7)
    assert session.prompt == "next"


def test_rewinding_takes_back_the_prompt(small, walks):
    session = walks["window"].session.fork()
    assert session.prompt == "b"
    session.rewind(4)
    assert session.prompt == "b"
    session.rewind(3)
    assert session.prompt == "a"


def test_a_fork_keeps_the_prompt_that_was_set_for_the_next_chunk(small, walks):
    session = walks["window"].session.fork()
    session.set_prompt("next", states=torch.ones(2, 20))
    assert session.fork().prompt == "next"
    assert session.fork(6).prompt == "b"
