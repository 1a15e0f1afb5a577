"""The tokenizer that belongs to a text encoder: a folder, a file, or bytes inside the text encoder's own file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import WeightsError
from ..models.spiece import SentencePieceTokenizer
from ..models.text import load_tokenizer
from .files import open_file

# Tensors of bytes. ComfyUI's text encoders carry their sentencepiece model under the first name; the second one is
# ours, for text encoders that have a tokenizer.json alone.
SPIECE, JSON = "spiece_model", "tokenizer_json"
FILES = {SPIECE: "spiece.model", JSON: "tokenizer.json"}
_ALONE = (".model", ".json")
UMT5_VOCABULARY = 256384
END = "</s>"


def inside(files: Sequence[Path]) -> Path | None:
    """The first of a text encoder's files that carries a tokenizer. Raises WeightsError."""
    return next((file for file in files if open_file(file).entries.keys() & FILES.keys()), None)


def locate(path: Path, name: str) -> Path | None:
    """The file that holds a tokenizer of this kind: in a folder, a file of its own, or a file of tensors.

    name: SPIECE or JSON. Raises WeightsError.
    """
    if path.is_dir():
        path /= FILES[name]
    if not path.is_file():
        return None
    if path.suffix in _ALONE:
        return path if path.suffix == Path(FILES[name]).suffix else None
    return path if name in open_file(path).entries else None


def read_bytes(file: Path, name: str) -> bytes:
    """What a file of `locate` holds. Raises WeightsError."""
    if file.suffix in _ALONE:
        try:
            return file.read_bytes()
        except OSError as error:
            raise WeightsError(f"{file} cannot be read: {error.strerror}") from error
    return open_file(file).read(name).contiguous().view(torch.uint8).numpy().tobytes()


def size_of(file: Path, name: str) -> int:
    """Its length. Raises WeightsError."""
    return file.stat().st_size if file.suffix in _ALONE else open_file(file).entries[name].nbytes


def read_tokenizer(path: Path) -> Any:
    """From a folder, a spiece.model, a tokenizer.json, or a text encoder's file that carries one of them.

    Raises InputFileError, WeightsError.
    """
    if path.is_dir():
        return load_tokenizer(path)
    if locate(path, SPIECE):
        return SentencePieceTokenizer(read_bytes(path, SPIECE), str(path))
    if locate(path, JSON):
        return _from_json(read_bytes(path, JSON), str(path))
    raise WeightsError(f"{path} carries no tokenizer ({SPIECE} or {JSON}); give the folder of its tokenizer")


def _from_json(data: bytes, where: str) -> Any:
    """A tokenizer.json alone; the settings beside it in a folder only name the special tokens, which umT5 fixes."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    try:
        backend = Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:
        # tokenizers raises a bare Exception for what it cannot parse.
        raise WeightsError(f"{where}: the tokenizer.json cannot be read: {error}; get the file again") from error
    if backend.token_to_id(END) is None:
        raise WeightsError(f"{where}: the tokenizer has no end token {END}; use the one that belongs to umT5")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
