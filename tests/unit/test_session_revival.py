"""Sessions from a history alone, sessions that gave their caches back, and chunks taken over from other sessions."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from lingbot_core.engine.condition import ImageCondition
from lingbot_core.engine.session import WorldSession
from lingbot_core.errors import CameraError, HistoryError, PromptError, SessionBusyError, SessionError


def revived(small, source: WorldSession, chunks: int, **options: object) -> WorldSession:
    states = source.prompt_states
    return WorldSession.from_history(
        small.world,
        small.condition,
        source.history.first(chunks),
        prompt_states=states.positive,
        negative_states=states.negative,
        **options,
    )


def test_a_session_from_a_history_goes_on_as_the_first_one_would_have(small, walks, recipe):
    walk = walks[recipe]
    session = revived(small, walk.session, 4)
    assert session.state == "failed"
    with pytest.raises(SessionError, match="call resume"):
        small.step(session)
    assert session.resume() is None
    small.assert_same_caches(session._derived.caches, walk.caches[3])
    for expected in walk.chunks[4:]:
        small.assert_same_chunk(small.step(session), expected)
    small.assert_same_caches(session._derived.caches, walk.caches[-1])


def test_a_session_from_an_empty_history_is_a_fresh_one(small, walks):
    session = revived(small, walks["window"].session, 0)
    session.resume()
    for expected in walks["window"].chunks[:2]:
        small.assert_same_chunk(small.step(session), expected)


def test_nothing_is_allocated_before_resume(small, walks):
    session = revived(small, walks["window"].session, 4, rewind_depth=2)
    assert session.cache_nbytes == 0
    session.resume()
    assert session.cache_nbytes > 0
    assert session.rewind_depth == 2


@pytest.mark.parametrize(
    ("field", "change"),
    [("model", {"model": "another"}), ("image", {"image": "another"}), ("height", {"height": 64})],
)
def test_a_history_of_another_model_or_image_is_refused_by_name(small, walks, field, change):
    history = walks["window"].session.history
    other = replace(history, start=replace(history.start, **change))
    with pytest.raises(HistoryError, match=f"begun with {field}="):
        WorldSession.from_history(small.world, small.condition, other, prompt_states={"a": small.states(0)})


def test_states_of_a_prompt_that_are_missing_are_asked_for(small, walks):
    session = WorldSession.from_history(small.world, small.condition, walks["window"].session.history.first(2))
    with pytest.raises(PromptError):
        session.resume()
    assert session.state == "failed"


def test_release_frees_all_tensors_of_the_caches_and_the_encoder(small, recipe):
    condition = ImageCondition(small.world.vae, small.condition.image)
    session = small.start(recipe, image=condition, rewind_depth=1)
    small.steps(session, 2)
    derived = session._derived
    tensors = [t for cache in derived.caches for t in (*cache._keys, *cache._values)]
    tensors += [t for _, state in derived.decoders for t in state.slots if t is not None]
    tensors += [t for t in (*derived.decoder.slots, *condition._state.slots) if t is not None]
    tensors += [*derived.prompts._current[1].keys, *condition._latents]
    references = [weakref.ref(t) for t in tensors]
    assert session.cache_nbytes > 0
    del tensors
    session.release()
    gc.collect()
    assert [r for r in references if r() is not None] == []
    assert session.cache_nbytes == 0
    assert condition.nbytes == 0
    assert len(session.history) == 2


def test_a_released_session_is_rebuilt_bitwise(small, walks, recipe):
    walk = walks[recipe]
    session = walks.fork(recipe, 5)
    session.release()
    session.release()
    with pytest.raises(SessionError, match="nothing is lost"):
        small.step(session)
    assert session.resume() is None
    small.assert_same_caches(session._derived.caches, walk.caches[4])
    for expected in walk.chunks[5:]:
        small.assert_same_chunk(small.step(session), expected)


def test_a_released_session_can_be_rewound_and_forked(small, walks):
    session = walks.fork("window", 5)
    session.release()
    fork = session.fork(4)
    session.rewind(3)
    for twin, first in ((session, 3), (fork, 4)):
        for expected in walks["window"].chunks[first:]:
            small.assert_same_chunk(small.step(twin), expected)


def test_releasing_one_session_leaves_another_of_the_same_image_alone(small, walks):
    condition = ImageCondition(small.world.vae, small.condition.image)
    first, second = small.start("window", image=condition), small.start("window", image=condition)
    small.steps(first, 2)
    first.release()
    for expected in walks["window"].chunks[:4]:
        small.assert_same_chunk(small.step(second), expected)


def test_noise_of_the_reference_is_drawn_again_after_a_release(small):
    whole = small.steps(small.start("window", noise="reference", chunks=3), 3)
    session = small.start("window", noise="reference", chunks=3)
    small.steps(session, 2)
    session.release()
    assert getattr(session._noise, "_clip", None) is None
    session.resume()
    small.assert_same_chunk(small.step(session), whole[2])


def test_a_failed_decode_survives_a_release(small, walks, failing):
    session = walks.fork("window", 2)
    decode = failing(small.world.vae, "decode", RuntimeError("no room"))
    decode.arm()
    with pytest.raises(RuntimeError, match="no room"):
        small.step(session)
    session.release()
    small.assert_same_chunk(session.resume(), walks["window"].chunks[2])
    small.assert_same_chunk(small.step(session), walks["window"].chunks[3])


def test_a_running_session_is_not_released(small):
    session = small.start("window")

    def busy(step, total):
        with pytest.raises(SessionBusyError, match="release it when"):
            session.release()

    small.step(session, on_step=busy)
    assert session.state == "ready"


def test_adopted_chunks_are_bitwise_those_that_were_made(small, walks, recipe):
    walk = walks[recipe]
    session = walks.fork(recipe, 1)
    session.set_prompt("b", states=small.states(1))
    shown = []
    for record, expected in zip(walk.session.history.chunks[1:5], walk.chunks[1:5], strict=True):
        small.assert_same_chunk(session.adopt(record, on_frames=shown.append), expected)
    assert len(shown) == 4
    small.assert_same_caches(session._derived.caches, walk.caches[4])
    small.assert_same_chunk(small.step(session), walk.chunks[5])


def test_adopting_runs_no_denoising(small, walks, failing):
    session = walks.fork("window", 1)
    failing(small.world.dit, "forward", AssertionError("denoised")).arm()
    session.adopt(walks["window"].session.history.chunks[1])
    assert len(session.history) == 2


def test_a_failed_adoption_is_finished_by_resume(small, walks, failing):
    session = walks.fork("window", 1)
    failing(small.world.vae, "decode", RuntimeError("no room")).arm()
    with pytest.raises(RuntimeError, match="no room"):
        session.adopt(walks["window"].session.history.chunks[1])
    small.assert_same_chunk(session.resume(), walks["window"].chunks[1])
    small.assert_same_chunk(small.step(session), walks["window"].chunks[2])


def test_only_a_record_of_this_place_and_recipe_is_adopted(small, walks):
    session, records = walks.fork("window", 1), walks["window"].session.history.chunks
    nan = torch.full_like(records[1].latents, torch.nan)
    wrong = {
        "cannot follow": records[2],
        "shape": replace(records[1], latents=records[1].latents[:, :2]),
        "NaN": replace(records[1], latents=nan),
        "ChunkRecord": object(),
    }
    for message, record in wrong.items():
        with pytest.raises(HistoryError, match=message):
            session.adopt(record)
    with pytest.raises(CameraError, match="takes 3 per chunk"):
        session.adopt(replace(records[1], controls=small.controls(1, 4)))
    with pytest.raises(HistoryError, match="reuse_last_step_kv"):
        walks.fork("reuse-last-step", 1).adopt(records[1])
    small.assert_same_chunk(small.step(session), walks["window"].chunks[1])
