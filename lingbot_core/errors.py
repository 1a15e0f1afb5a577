"""One family of exceptions for the whole pack.

Every error names the thing that is wrong and what to do about it in its message, and carries a stable
``code`` that sockets and scripts can rely on. Only the message is meant for people; it may be reworded.
"""

from __future__ import annotations

from .encodable import as_text


class LingBotError(Exception):
    """Base of every error this package raises on purpose.

    ``code`` is stable across releases and is what protocols send. The message can be written anywhere, whatever it
    quotes: a log that cannot write it would fail in place of what went wrong.
    """

    code = "internal"

    def __init__(self, message: object = "") -> None:
        super().__init__(as_text(str(message)))


class InputFileError(LingBotError):
    """A path is missing, unreadable, or not the kind of file it should be."""

    code = "bad_file"


class ImageError(LingBotError):
    """The start image cannot be used: too small, too large, unreadable, not finite."""

    code = "bad_image"


class CameraError(LingBotError):
    """Poses, intrinsics, keys or an action string are malformed."""

    code = "bad_camera"


class PromptError(LingBotError):
    """A prompt cannot be encoded."""

    code = "bad_prompt"


class PresetError(LingBotError):
    """A preset does not exist, or a value cannot be honoured by the chosen preset."""

    code = "bad_preset"


class LengthError(LingBotError):
    """A number of frames or chunks cannot be generated."""

    code = "bad_length"


class WeightsError(LingBotError):
    """A checkpoint is missing, truncated, of another model, or does not fit the code."""

    code = "bad_weights"


class AttentionError(LingBotError):
    """An attention backend was asked for that this device or build does not have."""

    code = "bad_attention"


class CacheError(LingBotError):
    """The K/V cache was driven out of order; always a bug in the caller, never in the user's input."""

    code = "cache_order"


class MemoryPlanError(LingBotError):
    """What was asked for does not fit into the memory that is free."""

    code = "out_of_memory"


class NumericsError(LingBotError):
    """The model produced NaN or infinity."""

    code = "not_finite"


class SessionError(LingBotError):
    """A session was asked for something its state does not allow (busy, failed, closed)."""

    code = "session_state"


class SessionBusyError(SessionError):
    """Another thread is inside this session right now."""

    code = "session_busy"


class ServerError(LingBotError):
    """A realtime server refused a message, or could not do what it asks; ``code`` is the server's own."""

    def __init__(self, code: str, message: object = "") -> None:
        super().__init__(f"{message} ({code})" if str(message) else code)
        self.code = code


class ServerGoneError(LingBotError):
    """A realtime server cannot be reached, went away, or does not speak the protocol."""

    code = "server_gone"


class HistoryError(LingBotError):
    """A recorded history does not belong to this model, image or recipe."""

    code = "bad_history"


class VideoError(LingBotError):
    """A video file could not be written or encoded."""

    code = "bad_video"
