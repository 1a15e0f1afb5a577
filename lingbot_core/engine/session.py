"""One living world: a small state machine around a history and the caches derived from it.

Order of truth: a chunk enters the history as soon as its clean latents exist; then come its frames, then its commit.
Whatever fails after that point is redone from the history by ``resume``; whatever fails before leaves the session as
it was, ready to try the chunk again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from ..camera.controls import CameraCarry, Controls, FirstDelta, KeyMotion, to_controls
from ..camera.intrinsics import check_pixels, default_intrinsics
from ..camera.rays import action_rays, camera_rays
from ..errors import (
    CameraError,
    LengthError,
    NumericsError,
    PresetError,
    PromptError,
    SessionBusyError,
    SessionError,
)
from ..models.dit import ChunkContext, CrossKV
from ..models.kv_cache import KVCache
from ..models.vae import DecoderState
from ..presets import Preset
from .chunk import OnStep, denoise, replay_commit
from .condition import Condition
from .history import ChunkRecord, History, StartRecord
from .noise import InjectedNoise, NoiseSource, ReferenceNoise, SeededNoise
from .timing import Stopwatch
from .world import World

FIRST_DELTAS = get_args(FirstDelta)
NOISES = ("seeded", "reference")


@dataclass(frozen=True, eq=False)
class Chunk:
    """What ``advance`` hands out.

    frames: float32 [3, T, height, width] in [-1, 1] on the compute device; latents: float32 [16, frames, h, w];
    poses: float64 [frames, 4, 4] relative poses that were used; timings: seconds per stage.
    """

    index: int
    frames: Tensor
    latents: Tensor
    poses: np.ndarray
    prompt: str
    timings: dict[str, float]


OnFrames = Callable[[Chunk], None]


class WorldSession:
    """A stateful walk through one world.

    States: ``ready``, ``running`` (a thread is inside), ``failed`` (the last chunk of the history is not finished;
    ``resume`` finishes it), ``closed``. Nothing of one session can be reached from another, and any thread may drive
    one, but only one at a time: a second one gets SessionBusyError at once.
    """

    def __init__(
        self,
        world: World,
        condition: Condition,
        start: StartRecord,
        *,
        prompt_states: dict[str, Tensor],
        rewind_depth: int,
        caches: list[KVCache] | None = None,
    ) -> None:
        """Use ``WorldSession.start``."""
        self._world, self._condition = world, condition
        self._history = History(start)
        self._prompt_states = prompt_states
        self._rewind_depth = rewind_depth
        self._next_prompt: str | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._stale = False  # caches do not match the history and must be rebuilt from it
        self._undecoded = False  # the last chunk's frames have not been handed out
        self._uncommitted = False  # the last chunk is not in the cache
        self._latent_size = (start.height // 8, start.width // 8)
        self._noise = self._make_noise()
        self._caches = self._make_caches() if caches is None else caches
        self._decoder = DecoderState()
        self._decoders: deque[tuple[int, DecoderState]] = deque(maxlen=rewind_depth)
        self._cross: tuple[str, CrossKV] | None = None
        self._negative: CrossKV | None = None

    @classmethod
    def start(
        cls,
        world: World,
        image: Any,
        prompt: str = "",
        *,
        preset: Preset | None = None,
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
        negative_prompt: None takes the preset's. noise: 'seeded', or 'reference', which needs ``chunks``, the declared
        length. translation_unit: scene units per unit of the controls (camera.controls.translation_unit resolves
        'clip', 'key' and percentiles). intrinsics: fx, fy, cx, cy in pixels of the session's picture; None: the
        default of camera.intrinsics. rewind_depth: chunks that can be taken back without a replay. prompt_states,
        negative_states: text states [L, text_dim] in place of the world's own text encoder.
        """
        preset = preset or world.preset
        if first_delta not in FIRST_DELTAS:
            raise CameraError(f"first_delta={first_delta!r} is unknown; use one of {', '.join(FIRST_DELTAS)}")
        if noise not in NOISES:
            raise SessionError(f"noise={noise!r} is unknown; use one of {', '.join(NOISES)}")
        if noise == "reference" and chunks is None:
            raise SessionError("noise='reference' draws the whole clip at once: declare its length with chunks=N")
        if chunks is not None and chunks < 1:
            raise LengthError(f"chunks={chunks} must be at least 1; leave it out for a session of open length")
        if rewind_depth < 0:
            raise SessionError(f"rewind_depth={rewind_depth} must be at least 0 chunks")
        if not preset.guided and (negative_prompt or negative_states is not None):
            raise PresetError(
                f"preset {preset.name}: a negative prompt has no effect at guidance 1; leave it empty, or use the "
                "preset v2-causal-pretrain"
            )
        if not (np.isfinite(translation_unit) and translation_unit > 0):
            raise CameraError(f"translation_unit={translation_unit} must be a positive number")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise SessionError(f"seed={seed!r} must be a whole number from 0 to 2**63 - 1")
        condition = world.condition(image)
        world.require_memory(preset, condition.height, condition.width, chunks=chunks or 1, rewind_depth=rewind_depth)
        record = StartRecord(
            preset=preset,
            prompt=prompt,
            negative_prompt=preset.negative_prompt if negative_prompt is None else negative_prompt,
            seed=seed,
            noise=noise,
            image=condition.digest,
            height=condition.height,
            width=condition.width,
            intrinsics=_four(intrinsics, condition.width, condition.height),
            translation_unit=float(translation_unit),
            unit_rule=unit_rule,
            first_delta=first_delta,
            fps=float(fps),
            chunks=chunks,
            model=world.fingerprint,
        )
        states = {}
        if prompt_states is not None:
            states[prompt] = prompt_states
        if negative_states is not None:
            states[record.negative_prompt] = negative_states
        session = cls(world, condition, record, prompt_states=states, rewind_depth=rewind_depth)
        with torch.inference_mode():
            session._cross_for(prompt)  # a prompt that cannot be encoded is refused here, not in the first chunk
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
        """Bytes of the caches, the decoder's state and its snapshots, and the history."""
        cross = [kv for kv in (self._cross[1] if self._cross else None, self._negative) if kv is not None]
        states = {id(s): s for s in (self._decoder, *(s for _, s in self._decoders))}
        return (
            sum(c.nbytes for c in self._caches)
            + sum(kv.nbytes for kv in cross)
            + sum(s.nbytes for s in states.values())
            + self._history.nbytes
        )

    def controls(
        self,
        motion: np.ndarray | KeyMotion,
        *,
        prompt: str | None = None,
        actions: np.ndarray | None = None,
        intrinsics: Sequence[float] | None = None,
    ) -> Controls:
        """Controls for the next chunk from absolute poses [N, 4, 4] or held keys, in this session's unit and rules."""
        start = self._history.start
        controls, _ = to_controls(
            motion,
            latents=start.preset.chunk,
            unit=start.translation_unit,
            first_delta=start.first_delta,
            carry=self.carry,
            prompt=prompt,
            intrinsics=None if intrinsics is None else _four(intrinsics, start.width, start.height),
            actions=actions,
        )
        return controls

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

        on_step(i, total) is called before every denoising step and may raise to cancel: the session then is as
        before. on_frames(chunk) gets the frames before the commit runs. Raises NumericsError, with nothing lost, when
        the model's output is not finite.
        """
        with self._running():
            self._require_finished()
            index = len(self._history)
            preset = self._history.start.preset
            self._check_controls(controls)
            watch = Stopwatch(self._world.device)
            prompt = self.prompt if controls.prompt is None else controls.prompt
            with watch.stage("prepare"):
                contexts = self._contexts(index, controls, prompt)
            source: NoiseSource = noise or self._noise
            with watch.stage("denoise"):
                done = denoise(
                    self._world.dit, preset, contexts, lambda step: source.draw(index, step), on_step=on_step
                )
                if not torch.isfinite(done.x0).all():
                    raise NumericsError(
                        f"chunk {index} came out with NaN or infinity; check the weights and the dtype, or try "
                        "another seed. The chunks before it are kept"
                    )
            record = ChunkRecord(
                index,
                controls,
                prompt,
                source.name,
                done.x0.float().cpu(),
                None if done.last_input is None else done.last_input.float().cpu(),
                {},
            )
            longer = self._history.append(record)
            # One statement: a Ctrl-C that arrives between two would leave a history that nothing knows to finish.
            self._history, self._next_prompt, self._undecoded, self._uncommitted = longer, None, True, True
            return self._finish(contexts, watch, on_frames, just_denoised=True)

    def resume(self, *, on_frames: OnFrames | None = None) -> Chunk | None:
        """Finishes what an error or a cancel left undone after a chunk entered the history.

        Returns the last chunk if its frames had not been handed out; None if only caches had to be brought up.
        """
        with self._running():
            if self._stale:
                self._rebuild()
            if not (self._undecoded or self._uncommitted):
                return None
            handed_out = not self._undecoded
            last = self._history.chunks[-1]
            contexts = self._contexts(last.index, last.controls, last.prompt) if self._uncommitted else []
            chunk = self._finish(contexts, Stopwatch(self._world.device), on_frames, just_denoised=False)
            return None if handed_out else chunk

    def set_prompt(self, prompt: str, *, states: Tensor | None = None) -> None:
        """The prompt from the next chunk on; only the cross-attention keys and values are rebuilt.

        states: text states [L, text_dim] in place of the world's own text encoder. The history knows a prompt by its
        text, so a text that chunks were already made with cannot stand for other states: PromptError.
        """
        with self._running():
            if states is not None:
                known = self._prompt_states.get(prompt)
                if known is not None and not torch.equal(known.to(states), states):
                    used = (self._history.start.prompt, self._history.start.negative_prompt)
                    if prompt in (*used, *(record.prompt for record in self._history.chunks)):
                        raise PromptError(
                            f"the prompt {_shown(prompt)} is in this session's history with other text states; give "
                            "the new states another text"
                        )
                cross = self._world.dit.encode_prompt(states.to(self._world.device))
                self._prompt_states = {**self._prompt_states, prompt: states}
                self._cross = (prompt, cross)
            self._cross_for(prompt)
            self._next_prompt = prompt

    def rewind(self, chunks: int) -> None:
        """Keeps the first ``chunks`` chunks and forgets the rest.

        Immediate within ``rewind_depth``; beyond it the commits are replayed if a window has evicted, and the decoder
        is brought up by decoding its span again.
        """
        with self._running():
            shorter = self._history.first(chunks)
            if chunks == len(self._history) and not self._stale:
                return
            decoder = self._decoder_at(chunks)
            usable = not self._stale and all(c.can_rewind(self._frame(chunks)) for c in self._caches)
            while self._decoders and self._decoders[-1][0] >= chunks:
                self._decoders.pop()
            self._stale = True
            self._history, self._next_prompt, self._undecoded, self._uncommitted = shorter, None, False, False
            self._rebuild(caches=None if not usable else self._caches, decoder=decoder)

    def fork(self, chunks: int | None = None) -> WorldSession:
        """A new session with the first ``chunks`` chunks (all of them if None); this one is not changed.

        It copies the caches, or replays the commits where that is not possible; the start image's latents are shared.
        """
        with self._running():
            keep = len(self._history) if chunks is None else chunks
            shorter = self._history.first(keep)
            # The last chunk is in the caches only once it is committed.
            in_caches = len(self._history) - (1 if self._uncommitted else 0)
            frame = self._frame(keep)
            usable = not self._stale and keep <= in_caches and all(c.can_rewind(frame) for c in self._caches)
            twin = WorldSession(
                self._world,
                self._condition,
                shorter.start,
                prompt_states=self._prompt_states,
                rewind_depth=self._rewind_depth,
                caches=[c.clone() for c in self._caches] if usable else None,
            )
            twin._history = shorter
            twin._decoders.extend((at, state) for at, state in self._decoders if at < keep)
            if keep == len(self._history):
                twin._next_prompt = self._next_prompt
            twin._stale = True
            twin._rebuild(caches=twin._caches if usable else None, decoder=self._decoder_at(keep))
            return twin

    def close(self) -> None:
        """Frees everything but the history. Closing twice is fine; a closed session refuses to do anything else."""
        if self._closed:
            return
        if not self._lock.acquire(blocking=False):
            raise SessionBusyError("the session is running; close it when the chunk is finished or cancelled")
        try:
            self._closed = True
            self._caches, self._decoder, self._cross, self._negative = [], DecoderState(), None, None
            self._decoders.clear()
            self._prompt_states = {}
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
            # Inference mode belongs to a thread, so it is entered here whoever calls.
            with torch.inference_mode():
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

    def _frame(self, chunks: int) -> int:
        return chunks * self._history.start.preset.chunk

    def _finish(
        self, contexts: list[ChunkContext], watch: Stopwatch, on_frames: OnFrames | None, *, just_denoised: bool
    ) -> Chunk:
        """Frames, then the commit, of the last chunk in the history.

        Frames count as handed out once ``on_frames`` was called with them; without it, when the chunk is returned.
        """
        record = self._history.chunks[-1]
        preset = self._history.start.preset
        latents = record.latents.to(self._world.device)
        frames = latents.new_empty(3, 0, 0, 0)
        # The session's own decoder moves on only when the frames are handed out: until then they can be made again.
        decoder = self._decoder.copy()
        if undecoded := self._undecoded:
            with watch.stage("decode"):
                frames = self._world.vae.decode(latents, decoder)
        poses = record.controls.relative
        chunk = Chunk(record.index, frames, record.latents, poses, record.prompt, watch.seconds())
        if undecoded and on_frames is not None:
            self._decoders.append((record.index, self._decoder))
            self._decoder, self._undecoded = decoder, False
            on_frames(chunk)
        if self._uncommitted:
            # With reuse_last_step_kv the cache already holds what it is to hold, right after denoising.
            if not (just_denoised and preset.reuse_last_step_kv):
                with watch.stage("commit"):
                    replay_commit(self._world.dit, preset, contexts, latents, self._on_device(record.last_input))
            self._stale = True  # until every cache is closed
            for cache in self._caches:
                cache.end()
            self._stale, self._uncommitted = False, False
        timings = watch.seconds()
        self._history = self._history.with_timings(timings)
        if self._undecoded:
            self._decoders.append((record.index, self._decoder))
            self._decoder, self._undecoded = decoder, False
        return replace(chunk, timings=timings)

    def _rebuild(self, *, caches: list[KVCache] | None = None, decoder: DecoderState | None = None) -> None:
        """Brings caches and decoder to the end of the history; what is given only has to be cut back.

        ``_stale`` stays set until all of it is done, so that a failure in between leads to ``resume``.
        """
        records = self._history.chunks
        if caches is None:
            for cache in self._caches:
                cache.clear()
            for record in records:
                contexts = self._contexts(record.index, record.controls, record.prompt)
                latents = record.latents.to(self._world.device)
                replay_commit(
                    self._world.dit, self._history.start.preset, contexts, latents, self._on_device(record.last_input)
                )
                for cache in self._caches:
                    cache.end()
        else:
            for cache in caches:
                cache.rewind(self._frame(len(records)))
        decoder = self._decode_again() if decoder is None else decoder
        self._decoder, self._stale, self._uncommitted = decoder, False, False

    def _decode_again(self) -> DecoderState:
        """The decoder's state after the last chunk whose frames were handed out, from as many latents as reach it."""
        state = DecoderState()
        records = self._history.chunks[: len(self._history) - (1 if self._undecoded else 0)]
        chunk = self._history.start.preset.chunk
        needed = -(-self._world.vae.config.decoder_span // chunk) + 1
        for record in records[-needed:]:
            self._world.vae.decode(record.latents.to(self._world.device), state)
        return state

    def _decoder_at(self, chunks: int) -> DecoderState | None:
        """The decoder's state after ``chunks`` chunks, if it is at hand."""
        if self._stale:
            return None
        if chunks == 0:
            return DecoderState()
        if chunks == len(self._history) - (1 if self._undecoded else 0):
            return self._decoder.copy()
        return next((state.copy() for at, state in self._decoders if at == chunks), None)

    def _on_device(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self._world.device)

    def _contexts(self, index: int, controls: Controls, prompt: str) -> list[ChunkContext]:
        """Everything the forwards of chunk ``index`` share, for each branch; makes room in the caches."""
        start, dit, device = self._history.start, self._world.dit, self._world.device
        first, frames = self._frame(index), start.preset.chunk
        rays = self._rays(controls).to(device)
        crosses = [self._cross_for(prompt)]
        if start.preset.guided:
            crosses.append(self._negative_cross())
        condition = self._condition.latents(first, frames).to(device)
        camera = dit.encode_camera(rays)
        rope = dit.rope(first, frames, *self._latent_size, device)
        for cache in self._caches:
            cache.begin(first, frames)
        return [
            ChunkContext(first, condition, camera, rope, cross, cache)
            for cross, cache in zip(crosses, self._caches, strict=True)
        ]

    def _rays(self, controls: Controls) -> Tensor:
        start = self._history.start
        intrinsics = controls.intrinsics or start.intrinsics
        if self._world.dit.config.control == "act":
            assert controls.actions is not None  # _check_controls
            return action_rays(controls.relative, intrinsics, controls.actions, start.height, start.width)
        return camera_rays(controls.relative, intrinsics, start.height, start.width)

    def _check_controls(self, controls: Controls) -> None:
        frames = self._history.start.preset.chunk
        if controls.relative.shape != (frames, 4, 4):
            raise CameraError(
                f"controls hold {len(controls.relative)} poses; preset {self._history.start.preset.name} takes "
                f"{frames} per chunk"
            )
        acts = self._world.dit.config.control == "act"
        if acts and controls.actions is None:
            raise CameraError(
                "this model is steered by actions (control 'act'): give w a s d rows, one per latent frame"
            )
        if not acts and controls.actions is not None:
            raise CameraError(
                "this model is steered by the camera (control 'cam') and takes no actions; leave them out"
            )

    def _cross_for(self, prompt: str) -> CrossKV:
        if self._cross is None or self._cross[0] != prompt:
            self._cross = (prompt, self._world.dit.encode_prompt(self._states_of(prompt)))
        return self._cross[1]

    def _negative_cross(self) -> CrossKV:
        if self._negative is None:
            self._negative = self._world.dit.encode_prompt(self._states_of(self._history.start.negative_prompt))
        return self._negative

    def _states_of(self, prompt: str) -> Tensor:
        if prompt not in self._prompt_states:
            # A new dict: forks share the old one.
            self._prompt_states = {**self._prompt_states, prompt: self._world.encode_text(prompt)}
        return self._prompt_states[prompt].to(self._world.device)

    def _make_noise(self) -> NoiseSource:
        start = self._history.start
        shape = (self._world.dit.config.out_dim, start.preset.chunk, *self._latent_size)
        if start.noise == "seeded":
            return SeededNoise(start.seed, shape)
        return ReferenceNoise(
            start.seed, shape, chunks=start.chunks or 0, steps=start.preset.steps, device=self._world.device
        )

    def _make_caches(self) -> list[KVCache]:
        preset = self._history.start.preset
        return [
            KVCache(
                self._world.dit.cache_shape(*self._latent_size),
                window=preset.window,
                sink=preset.sink,
                capacity=(self._history.start.chunks or 1) * preset.chunk,
                rewind_depth=self._rewind_depth,
                dtype=self._world.cache_dtype,
                device=self._world.device,
            )
            for _ in range(2 if preset.guided else 1)
        ]


def _shown(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 40 else prompt[:37] + "...")


def _four(intrinsics: Sequence[float] | None, width: int, height: int) -> tuple[float, float, float, float]:
    return check_pixels(default_intrinsics(width, height) if intrinsics is None else intrinsics)
