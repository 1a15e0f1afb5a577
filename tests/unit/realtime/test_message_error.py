"""The error that becomes an answer."""

from __future__ import annotations

import pickle

import pytest

from lingbot_core.errors import LingBotError
from lingbot_core.realtime.errors import MessageError


def test_it_is_one_of_the_family_and_carries_its_code():
    error = MessageError("the model is loading; ask again", code="loading")
    assert isinstance(error, LingBotError)
    assert (error.code, str(error)) == ("loading", "the model is loading; ask again")
    assert MessageError("x").code == "malformed_payload"


def test_it_survives_a_queue_between_processes_and_halves_of_letters():
    error = pickle.loads(pickle.dumps(MessageError("half \ud83d", code="bad_camera")))
    assert (error.code, str(error)) == ("bad_camera", r"half \ud83d")


def test_one_code_does_not_leak_into_other_errors():
    with pytest.raises(MessageError) as caught:
        raise MessageError("a", code="session_busy")
    assert caught.value.code == "session_busy"
    assert LingBotError.code == "internal"
