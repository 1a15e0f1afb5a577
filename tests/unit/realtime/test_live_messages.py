"""What a driver may say, field by field, and what strangers make of it."""

from __future__ import annotations

import json
import math
import random

import pytest

from lingbot_core.realtime.errors import MessageError
from lingbot_core.realtime.json_text import read_json
from lingbot_core.realtime.live_messages import (
    read_control,
    read_hello,
    read_prompt,
    read_record,
    read_rewind,
    read_seq,
    read_settings,
)
from lingbot_core.realtime.live_steering import LOOK_WAITING, SPEEDS

READERS = (read_control, read_hello, read_prompt, read_record, read_rewind, read_seq, read_settings)
FIELDS = ("seq", "press", "held", "axes", "look", "v", "client", "drive", "format", "prompt", "record", "chunks",
          "move", "turn", "keep_going", "force")  # fmt: skip


def test_a_control_is_read_as_it_was_meant():
    control = read_control({"seq": 3, "press": "Ww", "held": "wL", "axes": [1, -2, 0.5, 0, 0], "look": [400, -1]})
    assert (control.seq, control.press, control.held) == (3, "ww", frozenset("wl"))
    assert control.axes == (1.0, -1.0, 0.5, 0.0, 0.0)
    assert control.look == (LOOK_WAITING, -1.0)
    assert control.moves
    assert not read_control({"seq": 0}).moves


def test_a_hello_may_leave_out_all_but_its_name():
    hello = read_hello({"v": 1, "client": "me"})
    assert (hello.client, hello.drive, hello.format) == ("me", False, "jpeg")


@pytest.mark.parametrize("speed", [*SPEEDS, 1])
def test_speeds_may_be_what_they_may_be(speed):
    assert read_settings({"move": speed}).move == speed


@pytest.mark.parametrize("seq", [None, -1, 1.5, True, 2**60, "1"])
def test_a_number_that_cannot_come_back_is_none(seq):
    assert read_seq({"seq": seq}) is None


def test_whatever_comes_is_read_or_refused_in_words():
    pick = random.Random(4)

    def value(depth: int = 0):
        kinds = [
            lambda: pick.choice([None, True, False, 0, 1, -1, 2**53, 2**70, 1e308, -0.0, 0.1, 99]),
            lambda: "".join(pick.choice("wasdijklqe \u0000\ud800x\u4e16") for _ in range(pick.randrange(80))),
            lambda: [value(depth + 1) for _ in range(pick.randrange(6))] if depth < 3 else [],
            lambda: {pick.choice(FIELDS): value(depth + 1)} if depth < 3 else {},
        ]
        return pick.choice(kinds)()

    refusals: list[str] = []
    for _ in range(5000):
        message = {name: value() for name in pick.sample(FIELDS, pick.randrange(1, 8))}
        for read in READERS:
            try:
                made = read(message)
            except MessageError as error:
                refusals.append(str(error))
                continue
            if read is read_control:
                assert all(math.isfinite(number) for number in (*made.axes, *made.look))
    assert refusals
    assert all(0 < len(refusal) < 300 for refusal in refusals)


def test_half_a_message_is_refused():
    text = json.dumps({"type": "control", "seq": 5, "held": "w", "axes": [0, 0, 0, 0, 1]})
    for end in range(1, len(text)):
        with pytest.raises(MessageError):
            read_json(text[:end])
