"""What a session can work out again from its history: K/V caches, prompts' keys and values, the decoder's state."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from ..camera.controls import Controls
from ..camera.rays import action_rays, camera_rays
from ..models.dit import CausalWanDiT, ChunkContext
from ..models.graphs import RecordedDiT
from ..models.kv_cache import KVCache
from ..models.vae import SPATIAL_STRIDE, DecoderState
from .chunk import replay_commit
from .condition import Condition
from .history import ChunkRecord, History, StartRecord
from .prompts import Prompts
from .revival import decoder_after
from .steering import stands_still
from .streams import SecondStream
from .transfer import to_device
from .world import World


class Derived:
    """Caches of one session. Whether they match its history is the session's business to know.

    rewind_depth: chunks whose overwritten keys and values, and whose decoder states, are kept for going back at once.
    caches: taken over from a fork; None makes empty ones; an empty list leaves that to the first ``replay``.
    """

    def __init__(
        self,
        world: World,
        condition: Condition,
        start: StartRecord,
        prompts: Prompts,
        *,
        rewind_depth: int,
        caches: list[KVCache] | None = None,
    ) -> None:
        self._world, self._condition, self._start = world, condition, start
        self.prompts = prompts
        self.rewind_depth = rewind_depth
        self.latent_size = (start.height // SPATIAL_STRIDE, start.width // SPATIAL_STRIDE)
        self.caches = self._empty_caches() if caches is None else caches
        self.recorded = RecordedDiT(world.dit) if world.records else None
        self._second, self._only = SecondStream(world.device), SecondStream(torch.device("cpu"))
        self.decoder = DecoderState()
        self.decoders: deque[tuple[int, DecoderState]] = deque(maxlen=rewind_depth)  # (chunks before it, state)

    @property
    def nbytes(self) -> int:
        """Bytes of everything held here."""
        return self._cache_bytes() + self.prompts.nbytes

    @property
    def cache_nbytes(self) -> int:
        """Bytes of everything that ``release`` gives back, but for the condition, which others may use, too."""
        return self._cache_bytes() + self.prompts.cross_nbytes

    def _cache_bytes(self) -> int:
        states = {id(s): s for s in (self.decoder, *(s for _, s in self.decoders))}
        recorded = 0 if self.recorded is None else self.recorded.nbytes
        return sum(c.nbytes for c in self.caches) + sum(s.nbytes for s in states.values()) + recorded

    def first_frame(self, chunks: int) -> int:
        """Absolute latent frame after ``chunks`` chunks."""
        return chunks * self._start.preset.chunk

    # Keys and values

    @property
    def dit(self) -> CausalWanDiT | RecordedDiT:
        """What runs this session's passes."""
        return self.recorded or self._world.dit

    def contexts(self, index: int, controls: Controls, prompt: str) -> list[ChunkContext]:
        """Everything the forwards of chunk ``index`` share, for each branch; makes room in the caches."""
        dit, device, preset = self._world.dit, self._world.device, self._start.preset
        first = self.first_frame(index)
        crosses = [self.prompts.cross(prompt)]
        if preset.guided:
            crosses.append(self.prompts.negative(self._start.negative_prompt))
        condition = self._condition.latents(first, preset.chunk).to(device)
        rays = self._rays(controls)
        rope = dit.rope(first, preset.chunk, *self.latent_size, device)
        for cache in self.caches:
            cache.begin(first, preset.chunk)
        if self.recorded is None:
            camera = dit.encode_camera(rays)
        else:
            camera = self.recorded.encode_camera(rays, steady=all(cache.steady for cache in self.caches))
        limit = preset.still_window if stands_still(controls) else None
        return [
            ChunkContext(first, condition, camera, rope, cross, cache, None if limit is None else cache.latest(limit))
            for cross, cache in zip(crosses, self.caches, strict=True)
        ]

    def encode_ahead(self, index: int) -> None:
        """Encodes what chunk ``index`` will ask of the start image, while the device has nothing more urgent to do.

        With a window twice as much as a chunk takes: chunks are quick until the window is full, so that the encoding,
        which is over when the encoder no longer changes, adds nothing to those that are not.
        """
        preset, declared = self._start.preset, self._start.chunks
        wanted = index + 1 if preset.window is None else 2 * index + 1
        wanted = wanted if declared is None else min(wanted, max(declared, 1))
        # When it is needed there may be room, or an error to give.
        with suppress(torch.OutOfMemoryError):
            self._condition.latents(0, wanted * preset.chunk)

    def commit(self, record: ChunkRecord, contexts: list[ChunkContext], x0: Tensor | None = None) -> None:
        """Writes a chunk of the history into the caches; they stay open. x0: its latents, if they are on the device."""
        device = self._world.device
        last_input = None if record.last_input is None else to_device(record.last_input, device)
        x0 = to_device(record.latents, device) if x0 is None else x0
        replay_commit(self.dit, self._start.preset, contexts, x0, last_input)

    def end_chunk(self) -> None:
        """The open chunk's keys and values are final in every branch."""
        for cache in self.caches:
            cache.end()

    def can_cut(self, chunks: int) -> bool:
        """Whether the caches can go back to the end of ``chunks`` chunks without a replay."""
        return all(cache.can_rewind(self.first_frame(chunks)) for cache in self.caches)

    def cut(self, chunks: int) -> None:
        """Goes back to the end of ``chunks`` chunks; ``can_cut`` must have said so."""
        for cache in self.caches:
            cache.rewind(self.first_frame(chunks))

    def replay(self, history: History) -> None:
        """Fills the caches anew by committing every chunk of the history."""
        if not self.caches:
            self.caches = self._empty_caches()
        for cache in self.caches:
            cache.clear()
        for record in history.chunks:
            self.commit(record, self.contexts(record.index, record.controls, record.prompt))
            self.end_chunk()

    # The decoder

    @property
    def decoding(self) -> SecondStream:
        """Where chunks are decoded."""
        return self._second if self._world.overlaps else self._only

    def decode(self, record: ChunkRecord, x0: Tensor | None = None) -> tuple[Tensor, DecoderState]:
        """Frames of the next chunk, and the state after it, which counts once ``decoder`` is set to it. x0: as above,
        and kept by the caller until the stream that decodes is done with it."""
        state = self.decoder.copy()
        x0 = to_device(record.latents, self._world.device) if x0 is None else x0
        return self._world.vae.decode(x0, state), state

    def remember_decoder(self, record: ChunkRecord) -> None:
        """Keeps the state before the record's frames, to go back to; call it before the state moves on."""
        self.forget_decoders(record.index)
        self.decoders.append((record.index, self.decoder))

    def decoder_at(self, chunks: int, *, decoded: int) -> DecoderState | None:
        """The decoder's state after ``chunks`` chunks, if it is at hand. decoded: chunks decoded so far."""
        if chunks == 0:
            return DecoderState()
        if chunks == decoded:
            return self.decoder.copy()
        return next((state.copy() for at, state in self.decoders if at == chunks), None)

    def decode_again(self, history: History, decoded: int) -> DecoderState:
        """The decoder's state after ``decoded`` chunks, from as many latents before it as reach it."""
        return decoder_after(self._world, history, decoded)

    def forget_decoders(self, chunks: int) -> None:
        """Drops what is remembered of chunk ``chunks`` and later ones."""
        while self.decoders and self.decoders[-1][0] >= chunks:
            self.decoders.pop()

    def fork(self, chunks: int, *, with_caches: bool) -> Derived:
        """A twin for the first ``chunks`` chunks, with copies of the caches or empty ones, and a fresh decoder."""
        twin = Derived(
            self._world,
            self._condition,
            self._start,
            self.prompts.fork(),
            rewind_depth=self.rewind_depth,
            caches=[cache.clone() for cache in self.caches] if with_caches else None,
        )
        twin.decoders.extend((at, state) for at, state in self.decoders if at < chunks)
        return twin

    def release(self, *, image: bool) -> None:
        """Frees all that ``replay`` and ``decode_again`` make. image: also what the condition can encode again."""
        self._free()
        self.prompts.release()
        if image:
            self._condition.release()

    def clear(self) -> None:
        """Frees everything."""
        self._free()
        self.prompts.clear()

    def _free(self) -> None:
        self.caches, self.decoder = [], DecoderState()
        self.decoders.clear()
        if self.recorded is not None:
            self.recorded.forget()

    def _empty_caches(self) -> list[KVCache]:
        return [self._empty_cache() for _ in range(2 if self._start.preset.guided else 1)]

    def _empty_cache(self) -> KVCache:
        preset = self._start.preset
        return KVCache(
            self._world.dit.cache_shape(*self.latent_size),
            window=preset.window,
            sink=preset.sink,
            capacity=(self._start.chunks or 1) * preset.chunk,
            rewind_depth=self.rewind_depth,
            dtype=self._world.cache_dtype,
            device=self._world.device,
        )

    def _rays(self, controls: Controls) -> Tensor:
        start = self._start
        intrinsics = controls.intrinsics or start.intrinsics
        size, device = (start.height, start.width), self._world.device
        if controls.actions is not None:
            return action_rays(controls.relative, intrinsics, controls.actions, *size, device=device)
        return camera_rays(controls.relative, intrinsics, *size, device=device)
