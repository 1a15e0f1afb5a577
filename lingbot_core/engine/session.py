"""One living world: a small state machine around a history and the caches derived from it.

Order of truth: a chunk enters the history as soon as its clean latents exist; then come its frames, then its commit.
Whatever fails after that point is redone from the history by ``resume``; whatever fails before leaves the session as
it was, ready to try the chunk again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..camera.controls import CameraCarry, Controls, FirstDelta, KeyMotion
from ..errors import NumericsError, SessionBusyError, SessionError
from ..models.dit import ChunkContext
from ..models.vae import DecoderState
from ..presets import Preset, get_preset
from .chunk import Chunk, OnStep, denoise, draws
from .condition import Condition
from .derived import Derived
from .history import ChunkRecord, History, StartRecord
from .noise import InjectedNoise, NoiseSource, ReferenceNoise, SeededNoise
from .prompts import Prompts, PromptStates
from .revival import require_match, require_record
from .start import check_whole, make_start, refuse_negative
from .steering import next_controls, require_controls
from .timing import Stopwatch, undisturbed
from .transfer import to_host
from .world import World

OnFrames = Callable[[Chunk], None]


class WorldSession:
    """A stateful walk through one world.

    States: ``ready``, ``running`` (a thread is inside), ``failed`` (the last chunk of the history is not finished;
    ``resume`` finishes it), ``closed``. Nothing of one session can be reached from another, and any thread may drive
    one, but only one at a time: a second one gets SessionBusyError at once.
    """

    def __init__(self, world: World, history: History, derived: Derived) -> None:
        """Use ``WorldSession.start``."""
        self._world, self._history, self._derived = world, history, derived
        self._next_prompt: str | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._stale = False  # caches do not match the history and must be brought up from it
        self._undecoded = False  # the last chunk's frames have not been handed out
        self._uncommitted = False  # the last chunk is not in the caches
        self._noise = _noise_source(world, history.start, derived.latent_size)

    @classmethod
    def start(
        cls,
        world: World,
        image: Any,
        prompt: str = "",
        *,
        preset: Preset | str | None = None,
        negative_prompt: str | None = None,
        seed: int = 0,
        noise: str = "seeded",
        chunks: int | None = None,
        translation_unit: float = 1.0,
        unit_rule: str = "number",
        first_delta: FirstDelta = "identity",
        intrinsics: Sequence[float] | None = None,
        fps: float = 16.0,
        rewind_depth: int = 0,
        prompt_states: Tensor | None = None,
        negative_states: Tensor | None = None,
    ) -> WorldSession:
        """Begins a world.

        image: a path, encoded bytes, an array or tensor, a PreparedImage or a Condition (see World.condition).
        preset: one, or its name; None takes the world's.
        negative_prompt: None takes the preset's. noise: 'seeded', or 'reference', which needs ``chunks``, the declared
        length. translation_unit: scene units per unit of the controls (camera.controls.translation_unit resolves
        'clip', 'key' and percentiles). intrinsics: fx, fy, cx, cy in pixels of the session's picture; None:
        World.default_intrinsics. rewind_depth: chunks that can be taken back without a replay. prompt_states,
        negative_states: text states [L, text_dim] in place of the world's own text encoder.
        """
        preset = world.preset if preset is None else get_preset(preset) if isinstance(preset, str) else preset
        condition = world.condition(image)
        record = make_start(
            world,
            condition,
            preset=preset,
            prompt=prompt,
            negative_prompt=negative_prompt,
            seed=seed,
            noise=noise,
            chunks=chunks,
            translation_unit=translation_unit,
            unit_rule=unit_rule,
            first_delta=first_delta,
            intrinsics=intrinsics,
            fps=fps,
        )
        if negative_states is not None:
            refuse_negative(preset)
        check_whole("rewind_depth", rewind_depth, 0)
        world.require_memory(
            preset,
            condition.height,
            condition.width,
            held=condition.nbytes,
            chunks=chunks or 1,
            rewind_depth=rewind_depth,
            whole_noise=noise == "reference",
        )
        states = {} if prompt_states is None else {prompt: prompt_states}
        prompts = Prompts(world, states, negative_states)
        with undisturbed(world.device):
            prompts.cross(prompt)  # a prompt that cannot be encoded is refused here, not in the first chunk
            if preset.guided:
                prompts.negative(record.negative_prompt)
        derived = Derived(world, condition, record, prompts, rewind_depth=rewind_depth)
        return cls(world, History(record), derived)

    @classmethod
    def from_history(
        cls,
        world: World,
        condition: Condition,
        history: History,
        *,
        prompt_states: Mapping[str, Tensor] | None = None,
        negative_states: Tensor | None = None,
        rewind_depth: int = 0,
    ) -> WorldSession:
        """A session at the end of a history that was made elsewhere, or by a session that is gone.

        Nothing is allocated yet: call ``resume``, which replays the commits; after it every chunk that follows is
        bitwise the one that the first session would have made. condition: of the start image the history began with.
        prompt_states, negative_states: text states of the history's prompts; those that are missing are encoded.
        Raises HistoryError naming the field in which world or image differ from the start record.
        """
        require_match(world, condition, history.start)
        check_whole("rewind_depth", rewind_depth, 0)
        prompts = Prompts(world, prompt_states or {}, negative_states)
        derived = Derived(world, condition, history.start, prompts, rewind_depth=rewind_depth, caches=[])
        session = cls(world, history, derived)
        session._stale = True
        return session

    # What can be asked at any time

    @property
    def state(self) -> str:
        """'ready', 'running', 'failed' or 'closed'."""
        if self._closed:
            return "closed"
        if self._lock.locked():
            return "running"
        return "failed" if self._unfinished else "ready"

    @property
    def world(self) -> World:
        """The loaded model that this session runs on."""
        return self._world

    @property
    def history(self) -> History:
        """All finished chunks; frozen."""
        return self._history

    @property
    def carry(self) -> CameraCarry:
        """The camera pose that the next chunk goes on from."""
        return self._history.carry

    @property
    def prompt(self) -> str:
        """The prompt of the next chunk."""
        return self._history.prompt if self._next_prompt is None else self._next_prompt

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, the prompts, the decoder's states and the history."""
        return self._derived.nbytes + self._history.nbytes

    @property
    def cache_nbytes(self) -> int:
        """Bytes that ``release`` gives back: all but the history and the text states."""
        return self._derived.cache_nbytes

    @property
    def prompt_states(self) -> PromptStates:
        """The text states of all prompts that a replay needs: what ``from_history`` takes."""
        return self._derived.prompts.given

    @property
    def rewind_depth(self) -> int:
        """Chunks that can be taken back without a replay."""
        return self._derived.rewind_depth

    def runs_on(self, world: World) -> bool:
        """Whether this session's networks are those of ``world``, and not others with equal weights."""
        return self._world.dit is world.dit and self._world.vae is world.vae

    def controls(
        self,
        motion: np.ndarray | KeyMotion,
        *,
        prompt: str | None = None,
        actions: np.ndarray | None = None,
        intrinsics: Sequence[float] | None = None,
    ) -> Controls:
        """Controls for the next chunk from absolute poses [N, 4, 4] or held keys, in this session's unit and rules."""
        return next_controls(self._history, motion, prompt=prompt, actions=actions, intrinsics=intrinsics)

    # What changes the world

    def advance(
        self,
        controls: Controls,
        *,
        noise: InjectedNoise | None = None,
        on_step: OnStep | None = None,
        on_frames: OnFrames | None = None,
    ) -> Chunk:
        """Generates the next chunk.

        on_step(i, total) is called before every denoising step, on a GPU while it still is at the one before, and may
        raise to cancel: the session then is as before. on_frames(chunk) gets the frames as soon as they exist, before
        the commit is done. Raises NumericsError, with nothing lost, when the model's output is not finite.
        """
        with self._running():
            self._require_finished()
            index = len(self._history)
            preset = self._history.start.preset
            require_controls(controls, preset, self._world.dit.config.control)
            if noise is not None:
                noise.check((self._world.dit.config.out_dim, preset.chunk, *self._derived.latent_size), draws(preset))
            watch = Stopwatch(self._world.device)
            prompt = self.prompt if controls.prompt is None else controls.prompt
            with watch.stage("prepare"):
                contexts = self._derived.contexts(index, controls, prompt)
            source: NoiseSource = noise or self._noise
            with watch.stage("denoise"):
                done = denoise(
                    self._derived.dit, preset, contexts, lambda step: source.draw(index, step), on_step=on_step
                )
            x0 = done.x0.float()
            latents = to_host(x0)
            if not np.isfinite(latents.numpy()).all():
                raise NumericsError(
                    f"chunk {index} came out with NaN or infinity; check the weights and the dtype, or try another "
                    "seed. The chunks before it are kept"
                )
            record = ChunkRecord(
                index,
                controls,
                prompt,
                source.name,
                latents,
                None if done.last_input is None else to_host(done.last_input.float()),
                {},
            )
            longer = self._history.append(record)
            # One statement: a Ctrl-C that arrives between two would leave a history that nothing knows to finish.
            self._history, self._next_prompt, self._undecoded, self._uncommitted = longer, None, True, True
            return self._finish(contexts, watch, on_frames, x0=x0)

    def adopt(self, record: ChunkRecord, *, on_frames: OnFrames | None = None) -> Chunk:
        """Takes over a chunk that another session made from this very position: decoded and committed, not denoised.

        The result, and all that follows, is bitwise what ``advance`` would have given. The states of its prompt must
        be known or encodable. Raises HistoryError for a record of another position or recipe.
        """
        with self._running():
            self._require_finished()
            start = self._history.start
            shape = (self._world.dit.config.out_dim, start.preset.chunk, *self._derived.latent_size)
            require_record(record, start, shape)
            require_controls(record.controls, start.preset, self._world.dit.config.control)
            longer = self._history.append(record)
            watch = Stopwatch(self._world.device)
            with watch.stage("prepare"):
                contexts = self._derived.contexts(record.index, record.controls, record.prompt)
            self._history, self._next_prompt, self._undecoded, self._uncommitted = longer, None, True, True
            return self._finish(contexts, watch, on_frames)

    def resume(self, *, on_frames: OnFrames | None = None) -> Chunk | None:
        """Finishes what an error or a cancel left undone after a chunk entered the history.

        Returns the last chunk if its frames had not been handed out; None if only caches had to be brought up.
        """
        with self._running():
            if self._stale:
                self._bring_up()
            if not (self._undecoded or self._uncommitted):
                return None
            handed_out = not self._undecoded
            last = self._history.chunks[-1]
            contexts = self._derived.contexts(last.index, last.controls, last.prompt) if self._uncommitted else []
            chunk = self._finish(contexts, Stopwatch(self._world.device), on_frames)
            return None if handed_out else chunk

    def set_prompt(self, prompt: str, *, states: Tensor | None = None) -> None:
        """The prompt from the next chunk on; only the cross-attention keys and values are rebuilt.

        states: text states [L, text_dim] in place of the world's own text encoder. The history knows a prompt by its
        text, so a text that chunks were already made with cannot stand for other states: PromptError.
        """
        with self._running():
            used = {self._history.start.prompt, *(record.prompt for record in self._history.chunks)}
            if states is not None:
                self._derived.prompts.give(prompt, states, used=used)
            self._derived.prompts.cross(prompt)
            self._next_prompt = prompt
            self._derived.prompts.tidy({*used, prompt})

    def settle_unit(self, unit: float, rule: str) -> None:
        """Another translation unit, for a path that is not known before it begins to move; see History.with_unit."""
        with self._running():
            self._history = self._history.with_unit(unit, rule)

    def rewind(self, chunks: int) -> None:
        """Keeps the first ``chunks`` chunks and forgets the rest.

        Immediate within ``rewind_depth``; beyond it the commits are replayed if a window has evicted, and the decoder
        is brought up by decoding its span again.
        """
        with self._running():
            shorter = self._history.first(chunks)
            if chunks == len(self._history) and not self._stale:
                return
            decoder = None if self._stale else self._derived.decoder_at(chunks, decoded=self._decoded)
            cut = not self._stale and self._derived.can_cut(chunks)
            self._stale = True
            self._derived.forget_decoders(chunks)
            self._history, self._next_prompt, self._undecoded, self._uncommitted = shorter, None, False, False
            self._bring_up(cut=cut, decoder=decoder)

    def fork(self, chunks: int | None = None) -> WorldSession:
        """A new session with the first ``chunks`` chunks (all of them if None); this one is not changed.

        It copies the caches, or replays the commits where that is not possible; the start image's latents are shared.
        """
        with self._running():
            keep = len(self._history) if chunks is None else chunks
            shorter = self._history.first(keep)
            # The last chunk is in the caches only once it is committed.
            in_caches = len(self._history) - (1 if self._uncommitted else 0)
            copied = not self._stale and keep <= in_caches and self._derived.can_cut(keep)
            twin = WorldSession(self._world, shorter, self._derived.fork(keep, with_caches=copied))
            # Frames that were not handed out here can be had from the twin, too.
            twin._undecoded = self._undecoded and keep == len(self._history)
            decoder = None if self._stale else self._derived.decoder_at(twin._decoded, decoded=self._decoded)
            if keep == len(self._history):
                twin._next_prompt = self._next_prompt
            twin._stale = True
            twin._bring_up(cut=copied, decoder=decoder)
            return twin

    def release(self, *, image: bool = True) -> None:
        """Frees the keys and values and the state of decoder and encoder; the history and the text states stay.

        image: also the latents of the start image, which other sessions may share: these then encode it again. The
        next ``resume`` rebuilds all of it, bitwise. Raises SessionBusyError while the session is running.
        """
        if self._closed:
            return
        if not self._lock.acquire(blocking=False):
            raise SessionBusyError("the session is running; release it when the chunk is finished or cancelled")
        try:
            self._stale = True
            self._derived.release(image=image)
            self._noise = _noise_source(self._world, self._history.start, self._derived.latent_size)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Frees everything but the history. Closing twice is fine; a closed session refuses to do anything else."""
        if self._closed:
            return
        if not self._lock.acquire(blocking=False):
            raise SessionBusyError("the session is running; close it when the chunk is finished or cancelled")
        try:
            self._closed = True
            self._derived.clear()
            self._noise = InjectedNoise(torch.empty(0))  # the reference's noise holds a whole clip
        finally:
            self._lock.release()

    # Inside

    @contextmanager
    def _running(self) -> Iterator[None]:
        if self._closed:
            raise SessionError("this session is closed; start a new one")
        if not self._lock.acquire(blocking=False):
            raise SessionBusyError("this session is being driven already; wait until its chunk is finished")
        try:
            if self._closed:  # by another thread, since the look above
                raise SessionError("this session is closed; start a new one")
            with undisturbed(self._world.device):
                yield
        finally:
            self._lock.release()

    @property
    def _unfinished(self) -> bool:
        return self._stale or self._undecoded or self._uncommitted

    def _require_finished(self) -> None:
        if not self._unfinished:
            return
        last = len(self._history) - 1
        what = (
            f"chunk {last} is in the history, but its frames were not handed out"
            if self._undecoded
            else "the caches are behind the history"
        )
        raise SessionError(f"{what}; call resume() first, nothing is lost")

    @property
    def _decoded(self) -> int:
        """Chunks whose frames have been handed out."""
        return len(self._history) - (1 if self._undecoded else 0)

    def _finish(
        self, contexts: list[ChunkContext], watch: Stopwatch, on_frames: OnFrames | None, *, x0: Tensor | None = None
    ) -> Chunk:
        """Frames, then the commit, of the last chunk in the history. x0: its latents on the device, just denoised.

        Frames count as handed out once ``on_frames`` was called with them; without it, when the chunk is returned.
        Where there is a second stream the commit is queued first: the device goes on with it while the frames, which
        come from the other stream, are handed out.
        """
        record, beside = self._history.chunks[-1], self._derived.decoding
        derived, preset = self._derived, self._history.start.preset
        # With reuse_last_step_kv the cache already holds what it is to hold, right after denoising.
        commit = self._uncommitted and not (x0 is not None and preset.reuse_last_step_kv)
        # The session's own decoder moves on only when the frames are handed out: until then they can be made again.
        frames, decoder = record.latents.new_empty(3, 0, 0, 0), derived.decoder
        undecoded = self._undecoded
        try:
            if undecoded:
                with beside.begin(), watch.stage("decode"):
                    frames, decoder = derived.decode(record, x0)
            if commit and beside.parallel:
                with watch.stage("commit"):
                    derived.commit(record, contexts, x0)
            poses = record.controls.relative
            timings = watch.seconds("prepare", "denoise", "decode")
            # A copy: the history must not be changed through what is handed out.
            chunk = Chunk(record.index, frames, record.latents.clone(), poses, record.prompt, timings)
            if undecoded and on_frames is not None:
                derived.remember_decoder(record)
                derived.decoder, self._undecoded = decoder, False
                with beside.again():
                    on_frames(chunk)
        finally:
            beside.join()
        if commit and not beside.parallel:
            with watch.stage("commit"):
                derived.commit(record, contexts, x0)
        if self._uncommitted:
            self._stale = True  # until every cache is closed
            derived.end_chunk()
            self._stale, self._uncommitted = False, False
        contexts.clear()  # the camera's part of them is the largest of all that a chunk takes
        timings = watch.seconds()
        self._history = self._history.with_timings(timings)
        if beside.parallel:
            derived.encode_ahead(record.index + 1)
        if self._undecoded:
            derived.remember_decoder(record)
            derived.decoder, self._undecoded = decoder, False
        return replace(chunk, timings=timings)

    def _bring_up(self, *, cut: bool = False, decoder: DecoderState | None = None) -> None:
        """Brings caches and decoder to the end of the history. cut: the caches only have to be cut back.

        ``_stale`` stays set until all of it is done, so that a failure in between leads to ``resume``.
        """
        if cut:
            self._derived.cut(len(self._history))
        else:
            self._derived.replay(self._history)
        decoder = self._derived.decode_again(self._history, self._decoded) if decoder is None else decoder
        self._derived.decoder, self._stale, self._uncommitted = decoder, False, False


def _noise_source(world: World, start: StartRecord, latent_size: tuple[int, int]) -> NoiseSource:
    shape = (world.dit.config.out_dim, start.preset.chunk, *latent_size)
    if start.noise == "seeded":
        return SeededNoise(start.seed, shape)
    chunks, steps = start.chunks or 0, start.preset.steps
    return ReferenceNoise(start.seed, shape, chunks=chunks, steps=steps, device=world.device)
