"""What a caller does with what went in or came out cannot change a session, nor can settings of the process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lingbot_core.camera.controls import Controls
from lingbot_core.engine.noise import InjectedNoise
from lingbot_core.engine.session import WorldSession
from lingbot_core.errors import CameraError, HistoryError, LengthError, PromptError, SessionError


def test_latents_that_were_handed_out_are_not_the_historys(small, walks):
    session = walks.fork("window", 3)
    chunk = small.step(session)
    with torch.inference_mode():
        chunk.latents.zero_()
        chunk.frames.zero_()
    small.assert_same_chunk(small.step(session), walks["window"].chunks[4])
    session.rewind(4)
    small.assert_same_chunk(small.step(session), walks["window"].chunks[4])


def test_text_states_may_be_changed_after_they_were_given(small, walks):
    given = small.states(0).clone()
    session = small.start(prompt_states=given)
    given.zero_()
    small.assert_same_chunk(small.step(session), walks["window"].chunks[0])
    fork = session.fork(0)
    small.assert_same_chunk(small.step(fork), walks["window"].chunks[0])


def test_a_prompt_with_the_text_of_the_negative_one_does_not_replace_it(small, walks):
    session = small.start("guided")
    negative = session.history.start.negative_prompt
    session.set_prompt(negative, states=small.states(1))
    session.set_prompt("a")
    small.assert_same_chunk(small.step(session), walks["guided"].chunks[0])


def test_states_of_prompts_that_made_no_chunk_are_not_kept_for_ever(small):
    session = small.start()
    before = session.nbytes
    for number in range(100):
        session.set_prompt(f"spare {number}", states=small.states(1))
    assert session.nbytes - before <= 34 * small.states(1).nbytes
    session.set_prompt("a")
    assert session.prompt == "a"


def test_given_states_that_were_not_kept_are_asked_for_again_and_never_replaced(small):
    session = small.start()
    session.set_prompt("keep", states=small.states(1))
    for number in range(20):
        session.set_prompt(f"spare {number}", states=small.states(1))
    session.set_prompt("keep")  # chosen again: now one of the latest
    for number in range(31):
        session.set_prompt(f"other {number}", states=small.states(1))
    session.set_prompt("keep")
    for number in range(40):
        session.set_prompt(f"third {number}", states=small.states(1))
    with pytest.raises(PromptError, match=r"text states given for 'keep' .* give them again"):
        session.set_prompt("keep")
    with pytest.raises(PromptError, match="give them again"):
        session.fork().set_prompt("keep")
    session.set_prompt("keep", states=small.states(1))
    assert session.prompt == "keep"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_the_process_does_not_matter(small, walks, dtype):
    states = small.states(0)
    torch.set_default_dtype(dtype)
    try:
        session = small.start(prompt_states=states)
        chunk = small.step(session)
    finally:
        torch.set_default_dtype(torch.float32)
    small.assert_same_chunk(chunk, walks["window"].chunks[0])


def test_autocast_around_a_session_does_not_matter(small, walks):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        session = small.start()
        chunk = small.step(session)
    small.assert_same_chunk(chunk, walks["window"].chunks[0])


def test_states_that_are_not_finite_or_no_tensor_are_refused(small):
    bad = small.states(0).clone()
    bad[0, 0] = float("nan")
    with pytest.raises(PromptError, match="hold NaN or infinity"):
        small.start(prompt_states=bad)
    session = small.start()
    with pytest.raises(PromptError, match="must be a floating point tensor"):
        session.set_prompt("b", states=[[1.0]])  # type: ignore[arg-type]
    assert session.state == "ready"


def test_injected_noise_of_another_shape_is_refused_and_changes_nothing(small, walks):
    session = walks.fork("window", 4)
    shape = (16, 3, 2, 4)
    for initial, renoise in ((torch.zeros(16, 3, 2, 5), ()), (torch.zeros(shape), (torch.zeros(1, 1, 1, 1),) * 3)):
        with pytest.raises((SessionError, LengthError), match="injected noise"):
            small.step(session, noise=InjectedNoise(initial, renoise))
    with pytest.raises(SessionError, match="injected noise of step 0 must be"):
        small.step(session, noise=InjectedNoise(np.zeros(shape)))  # type: ignore[arg-type]
    small.assert_same_chunk(small.step(session), walks["window"].chunks[4])


def test_controls_that_are_no_rigid_motion_are_refused(small):
    session = small.start()
    sheared = np.tile(np.eye(4), (3, 1, 1))
    sheared[1, 0, 1] = 0.5
    with pytest.raises(CameraError, match="controls: relative"):
        session.advance(Controls(sheared, np.eye(4)))
    with pytest.raises(CameraError, match="advance takes Controls, not NoneType"):
        session.advance(None)  # type: ignore[arg-type]
    assert session.state == "ready"


@pytest.mark.parametrize("chunks", ["1", 1.5, None, True])
def test_a_number_of_chunks_must_be_a_whole_number(small, walks, chunks):
    session = walks.fork("window", 3)
    with pytest.raises(HistoryError, match="must be a whole number"):
        session.rewind(chunks)
    assert len(session.history) == 3


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"translation_unit": "clip"}, CameraError),
        ({"fps": "16"}, SessionError),
        ({"chunks": "3"}, LengthError),
        ({"rewind_depth": 1.5}, LengthError),
    ],
)
def test_settings_of_another_type_are_named(small, options, error):
    with pytest.raises(error, match=next(iter(options))):
        WorldSession.start(small.world, small.condition, "a", prompt_states=small.states(0), **options)


def test_a_preset_may_be_given_by_its_name(small):
    session = WorldSession.start(
        small.world, small.condition, "a", preset="v2-diffusers", prompt_states=small.states(0)
    )
    assert session.history.start.preset.sink == 9
