"""The one error that answers a message which cannot be honoured."""

from __future__ import annotations

from typing import Literal

from ..errors import LingBotError

Code = Literal[
    "malformed_payload",
    "missing_field",
    "bad_camera",
    "session_busy",
    "loading",
    "internal",
    # The video socket has more to say:
    "unsupported",  # the loaded model or this server cannot honour a field
    "out_of_order",
    "event_id_conflict",
    "interaction_failed",
    "start_timeout",
    "stalled",
    # And a live world:
    "driver_taken",  # somebody else drives
    "not_driving",  # who watches cannot steer
    "flooded",  # messages were dropped
    "prompt_failed",
    "replay_failed",
]


class MessageError(LingBotError):
    """A message cannot be honoured; the connection stays open.

    ``code`` is one of the codes of the protocols. A handler answers with ``code`` and ``str(error)``, so the
    message never quotes more of the peer's bytes than a few words.
    """

    def __init__(self, message: object = "", *, code: Code = "malformed_payload") -> None:
        super().__init__(message)
        self.code: Code = code
