"""Messages as a client sends them, and what noise, bugs and strangers make of them."""

from __future__ import annotations

import random

import msgpack
import numpy as np

from lingbot_core.realtime.cameras import read_cameras
from lingbot_core.realtime.codec import pack, unpack
from lingbot_core.realtime.errors import MessageError
from lingbot_core.realtime.pictures import read_picture

# First bytes of every kind, with lengths that promise far more than follows.
_CLAIMS = [
    b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xdc\xff\xff", b"\xde\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xd8\xff", b"\xc1", b"\x91" * 20, b"\x81\xa1a" * 20,
]  # fmt: skip
_SHAPES = [[10**9], [-1], [2**63], [0, 10**9], [1] * 40, [3, 4, 4], [], [1.5], "3", None, [True], [2**40, 2**40]]
_DTYPES = ["|O", "<f8,<i4", "(1000000000,)f4", "<M8[s]", "<U4", "|S4", "|V8", "<c16", ">f4", "f16", "", 7, None, b"<f8"]


def valid_messages() -> list[bytes]:
    """Messages that unpack."""
    poses = np.tile(np.eye(4), (9, 1, 1))
    cameras = {"poses": poses, "intrinsics": np.full((9, 4), 500.0)}
    lists = {"poses": poses[:2].tolist(), "intrinsics": [500, 500, 416, 240]}
    picture = np.arange(16 * 16 * 3, dtype=np.uint32).astype(np.uint8).reshape(16, 16, 3)
    return [
        pack({"endpoint": "infer", "session_id": "a", "image": picture, "prompt": "a valley", "cameras": cameras}),
        pack({"camera": lists, "extra_body": {"seed": np.int64(3), "fps": 16.0, "frames_per_chunk": 1}}),
        pack({"endpoint": "reset", "session_id": None, "more": [True, -5, 2**40, 2.5, b"\x00\xff", {"": []}]}),
        pack(
            {"cameras": {"poses": poses.astype(">f4"), "intrinsics": np.float32([500, 500, 1, 1])}, "image": b"\x89PNG"}
        ),
    ]


def mutated(pick: random.Random, message: bytes) -> bytes:
    """The message with a few things wrong, in its bytes or in what it says of its arrays; some stay valid."""
    if pick.random() < 0.4:
        message = _lie(pick, message)
    data = bytearray(message)
    for _ in range(pick.choice((0, 1, 1, 2))):
        at = pick.randrange(len(data) + 1)
        match pick.randrange(6):
            case 0:
                del data[at:]
            case 1:
                data[at : at + 1] = bytes([pick.randrange(256)])
            case 2:
                data[at : at + 5] = pick.choice(_CLAIMS)
            case 3:
                data[at:at] = pick.choice(_CLAIMS)
            case 4:
                del data[at : at + pick.randint(1, 8)]
            case _:
                data += pick.randbytes(pick.randint(1, 8))
    return bytes(data)


def _lie(pick: random.Random, message: bytes) -> bytes:
    def change(pairs: list) -> dict:
        fields = dict(pairs)
        if fields and pick.random() < 0.2:
            del fields[pick.choice(list(fields))]
        if b"shape" in fields and pick.random() < 0.5:
            fields[b"shape"] = pick.choice(_SHAPES)
        if b"dtype" in fields and pick.random() < 0.5:
            fields[b"dtype"] = pick.choice(_DTYPES)
        if b"data" in fields and pick.random() < 0.2:
            fields[b"data"] = pick.choice([b"", b"\0" * 7, [1.0], None, "text", 3, float("nan")])
        return fields

    changed = msgpack.unpackb(message, object_pairs_hook=change)
    try:
        return msgpack.packb(changed)
    except OverflowError:
        return message


def take(data: bytes) -> str:
    """Reads a message as a server would, and says how that ended: "read", or the code of the answer."""
    try:
        message = unpack(data)
        if "cameras" in message or "camera" in message:
            read_cameras(message)
        if "image" in message:
            read_picture(message["image"])
    except MessageError as error:
        answer = error
    else:
        return "read"
    assert 0 < len(str(answer)) < 600, answer
    return answer.code
