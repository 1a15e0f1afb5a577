"""The one error that answers a message which cannot be honoured."""

from __future__ import annotations

from typing import Literal

from ..errors import LingBotError

Code = Literal["malformed_payload", "missing_field", "bad_camera", "session_busy", "loading", "internal"]


class MessageError(LingBotError):
    """A message cannot be honoured; the connection stays open.

    ``code`` is one of the codes of the camera protocol. A handler answers with ``code`` and ``str(error)``, so the
    message never quotes more of the peer's bytes than a few words.
    """

    def __init__(self, message: object = "", *, code: Code = "malformed_payload") -> None:
        super().__init__(message)
        self.code = code
