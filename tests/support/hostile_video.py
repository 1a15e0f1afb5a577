"""Messages of the video socket as a client sends them, and what noise, bugs and strangers make of them."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

from video_server import VideoServer, camera, interaction, start

PING, STOP = {"type": "session.ping"}, {"type": "session.stop"}
VALID = [
    start(num_frames=9),
    start(
        size="48x32",
        fps=8,
        seconds=2,
        seed=1,
        extra_params={"camera_action_script": [[["w"], [], ["w", "j"]]] * 3, "translation_unit": 1},
    ),
    interaction({"prompt": "snow", **camera("velocity", (0, 0, 0.1))}, event_id="e", transition_chunks=2),
    interaction(camera("target")),
    PING,
    STOP,
]
ODD = [None, True, -1, 0, 2**63, 0.5, 1e308, "", "x", "\ud800", [], {}, [[]], {"a": {}}, "data:image/png;base64,AAAA"]


def changed(pick: random.Random, value: Any) -> Any:
    """The same with one thing in it another, gone, or new."""
    if isinstance(value, dict) and value and pick.random() < 0.9:
        name = pick.choice(list(value))
        match pick.randrange(4):
            case 0:
                return {key: entry for key, entry in value.items() if key != name}
            case 1:
                return {**value, name + "x": pick.choice(ODD)}
            case _:
                return {**value, name: changed(pick, value[name])}
    if isinstance(value, list) and value and pick.random() < 0.7:
        index = pick.randrange(len(value))
        return [*value[:index], changed(pick, value[index]), *value[index + pick.randrange(2) :]]
    return pick.choice(ODD)


def broken(pick: random.Random, text: str) -> str:
    at, other = pick.randrange(len(text)), pick.choice(['"', "{", "}", "[", ",", "NaN", "\\", "9" * 30, "\0", "\u20ac"])
    return text[:at] + other + text[at + pick.randrange(3) :] if pick.random() < 0.7 else text[:at]


async def hostile_visit(at: VideoServer, pick: random.Random, messages: int) -> Counter[str]:
    """One connection, before its start or in the middle of a video; returns what was answered, by type or code.

    After each message the connection answers a ping, unless the message has ended the video.
    """
    answers: Counter[str] = Counter()
    async with at.peer() as peer:
        if pick.random() < 0.5:
            await peer.send(start())
            await peer.until("video.start")
        for _ in range(messages):
            text = json.dumps(changed(pick, pick.choice(VALID)))
            await peer.send(broken(pick, text) if pick.random() < 0.3 else text)
            await peer.send(PING)
            while (message := await peer.get())["type"] not in ("session.pong", "session.done"):
                answers[message.get("code", message["type"])] += 1
            answers["messages"] += 1
            if message["type"] == "session.done":
                break
    return answers
