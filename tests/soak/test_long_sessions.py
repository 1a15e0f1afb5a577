"""What only shows after a long time: memory that creeps, and state that drifts after many interruptions.

Not part of scripts/test; scripts/soak runs these. Each takes a minute or two.
"""

from __future__ import annotations

import gc
import random

import numpy as np
import psutil
import pytest
import torch

from lingbot_core.engine.image import prepare_image
from lingbot_core.engine.session import WorldSession
from lingbot_core.presets import Preset, TableSteps


class Cancel(BaseException):
    pass


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def tensor_bytes() -> int:
    """Bytes of all tensors that are alive."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_a_thousand_cancels_change_nothing_and_leak_nothing(small):
    straight = small.steps(small.start("partial-eviction"), 8)
    session = small.start("partial-eviction", rewind_depth=1)
    pick = random.Random(0)
    before = None
    for count in range(1000):
        stop = pick.randrange(2)

        def on_step(step: int, total: int, stop: int = stop) -> None:
            if step == stop:
                raise Cancel

        with pytest.raises(Cancel):
            small.step(session, on_step=on_step)
        if count % 125 == 124:
            expected = straight[len(session.history)]
            small.assert_same_chunk(small.step(session), expected)
        if count == 800:
            before = tensor_bytes(), session.nbytes, resident()
    assert len(session.history) == 8
    session.rewind(7)  # the chunk that the walk stood at when memory was measured
    assert before is not None
    assert abs(resident() / before[2] - 1) <= 0.05
    assert session.nbytes <= before[1] + session.history.nbytes


def test_a_thousand_chunks_with_a_window_keep_memory_flat_and_numbers_finite(small):
    preset = Preset("one step", chunk=3, selection=TableSteps((0,)), shift=5.0, window=9, sink=3)
    session = small.start(preset, rewind_depth=2)
    marks = []
    for index in range(1000):
        chunk = session.advance(small.controls(index, 3))
        assert torch.isfinite(chunk.frames).all()
        if index + 1 in (50, 500, 1000):
            marks.append((tensor_bytes() - session.history.nbytes, session.nbytes - session.history.nbytes, resident()))
            print(f"\n{index + 1} chunks: tensors {marks[-1][0]}, session {marks[-1][1]}, resident {marks[-1][2]}")
    assert session._derived.caches[0].slot_frames.count(2999) == 1
    assert len({mark[0] for mark in marks[1:]}) == 1
    assert len({mark[1] for mark in marks}) == 1
    # The interpreter's own heap settles during the first chunks; the history itself is a megabyte and a half.
    assert all(abs(mark[2] / marks[0][2] - 1) <= 0.05 for mark in marks)


def test_two_hundred_forks_and_rewinds_at_random_equal_the_straight_walk(small, recipe, monkeypatch):
    length = 20
    straight = small.steps(small.start(recipe), length)
    pick = random.Random(recipe)
    sessions = [small.start(recipe, rewind_depth=depth) for depth in (0, 1, 3)]
    done = dict.fromkeys(("advance", "rewind", "fork", "cancel", "fail"), 0)
    decode = small.world.vae.decode

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    def advance(session) -> None:
        expected = straight[len(session.history)]
        small.assert_same_chunk(small.step(session), expected)

    def cancel(session) -> None:
        def on_step(step: int, total: int) -> None:
            if step == total - 1:
                raise Cancel

        with pytest.raises(Cancel):
            small.step(session, on_step=on_step)

    def fail_and_resume(session) -> None:
        expected = straight[len(session.history)]
        monkeypatch.setattr(small.world.vae, "decode", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            small.step(session)
        monkeypatch.setattr(small.world.vae, "decode", decode)
        small.assert_same_chunk(session.resume(), expected)

    while done["rewind"] + done["fork"] < 200:
        index = pick.randrange(len(sessions))
        session = sessions[index]
        at = len(session.history)
        action = pick.choice(("advance", "advance", "advance", "rewind", "fork", "cancel", "fail"))
        if action in ("advance", "cancel", "fail") and at == length:
            action = "rewind"
        if action == "advance":
            advance(session)
        elif action == "cancel":
            cancel(session)
        elif action == "fail":
            fail_and_resume(session)
        elif action == "rewind":
            session.rewind(pick.randint(max(0, at - 4), at) if pick.random() < 0.8 else pick.randint(0, at))
        else:
            fork = session.fork(pick.randint(0, at) if pick.random() < 0.3 else None)
            victim = pick.randrange(len(sessions))
            if victim != index:
                sessions[victim].close()
            sessions[victim] = fork
        done[action] += 1
    for session in sessions:
        while len(session.history) < length:
            advance(session)
    small.assert_same_caches(sessions[0]._derived.caches, sessions[1]._derived.caches)
    print(f"\n{recipe}: {done}")


def test_a_long_walk_of_the_embedded_model_stays_finite(tiny_world):
    """Positions beyond 1024 latent frames through the real model, text encoder and window included."""
    picture = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    picture = prepare_image(picture, size=(32, 48))
    preset = tiny_world.preset.with_overrides(indices=[0])
    session = WorldSession.start(tiny_world, picture, "a quiet valley", preset=preset)
    poses = np.tile(np.eye(4), (3, 1, 1))
    for _ in range(350):
        chunk = session.advance(session.controls(poses))
        assert torch.isfinite(chunk.frames).all()
    assert session.carry.latents == 1050
    assert 0.01 < chunk.frames.std() < 1
