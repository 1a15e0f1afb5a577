"""Text that can be written anywhere: files, logs, sockets."""

from __future__ import annotations


def as_text(text: str) -> str:
    r"""``text`` with escapes such as ``\ud83d`` in place of what UTF-8 cannot hold.

    That is half of a surrogate pair (an emoji cut in two), or a byte of a file's name that is no UTF-8. In JSON
    these escapes mean what they stand for.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
