"""umT5's tokenizer from its sentencepiece model alone, as ComfyUI's text encoder files carry it inside."""

from __future__ import annotations

from typing import Any

from ..errors import WeightsError


class SentencePieceTokenizer:
    """The part of a transformers tokenizer that TextEncoder uses.

    proto: the bytes of a ``spiece.model``. Raises WeightsError when they are something else.
    """

    def __init__(self, proto: bytes, where: str) -> None:
        import sentencepiece

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
        except RuntimeError as error:
            raise WeightsError(
                f"{where}: the sentencepiece model cannot be read: {error}; get the file again"
            ) from error
        end = self._processor.eos_id()
        self.eos_token_id: int | None = end if end >= 0 else None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """Token numbers of a text, the closing </s> included; never padded or cut."""
        return {"input_ids": [*self._processor.encode(text), self.eos_token_id]}
