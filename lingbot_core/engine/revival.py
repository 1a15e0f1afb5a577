"""A world from its history alone: whether it can be, and its frames and decoder without keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import HistoryError
from ..models.vae import DecoderState
from .condition import Condition
from .history import ChunkRecord, History, StartRecord
from .timing import undisturbed
from .world import World


def require_match(world: World, condition: Condition, start: StartRecord) -> None:
    """Raises HistoryError naming the first field in which a model or an image differ from those of a history."""
    here = {
        "model": (start.model, world.fingerprint),
        "height": (start.height, condition.height),
        "width": (start.width, condition.width),
        "image": (start.image, condition.digest),
    }
    for field, (recorded, now) in here.items():
        if recorded != now:
            raise HistoryError(
                f"this world was begun with {field}={recorded!r}, but here it is {now!r}; give the one it was begun "
                "with, or start a new world"
            )


def require_record(record: ChunkRecord, start: StartRecord, shape: Sequence[int]) -> None:
    """Raises HistoryError for a record whose tensors are not those of a chunk of this recipe. shape: of its latents."""
    if not isinstance(record, ChunkRecord):
        raise HistoryError(f"a chunk is taken over from its ChunkRecord, not from {type(record).__name__}")
    tensors = {"latents": record.latents}
    if start.preset.reuse_last_step_kv:
        if record.last_input is None:
            raise HistoryError(
                f"chunk {record.index} was made without reuse_last_step_kv and holds no input of its last step"
            )
        tensors["last_input"] = record.last_input
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(shape):
            raise HistoryError(
                f"chunk {record.index}: {name} of shape {list(tensor.shape)} must be {list(shape)} in this world"
            )
        if not torch.isfinite(tensor).all():
            raise HistoryError(f"chunk {record.index}: {name} hold NaN or infinity")


def decoder_after(world: World, history: History, chunks: int) -> DecoderState:
    """The decoder's state after the first ``chunks`` chunks, from as many latents before it as reach it."""
    state = DecoderState()
    needed = -(-world.vae.config.decoder_span // history.start.preset.chunk) + 1
    for record in history.chunks[:chunks][-needed:]:
        world.vae.decode(record.latents.to(world.device), state)
    return state


def frames_again(world: World, history: History, first: int = 0) -> Iterator[tuple[ChunkRecord, Tensor]]:
    """Decodes finished chunks from number ``first`` on, one at a time: the same frames as when they were made.

    Yields each record with its frames, float32 [3, T, height, width] in [-1, 1] on the compute device. Neither the
    transformer nor keys and values are needed.
    """
    with undisturbed(world.device):
        state = decoder_after(world, history, first)
    for record in history.chunks[first:]:
        with undisturbed(world.device):
            frames = world.vae.decode(record.latents.to(world.device), state)
        yield record, frames
