"""The transformer in CUDA graphs, for a walk whose window is full.

A pass launches about a thousand kernels, which costs the host some forty milliseconds. Once a window is full every
chunk does the same to tensors of the same sizes, so the launches are recorded once and replayed: the host is free for
everything else. Results are bitwise those of the transformer itself.

What a graph reads must stay where it was: keys and values do (kv_cache.py), the camera's scale and shift are made by a
graph of their own, and the small rest is copied into place. So it is for models whose weights nobody moves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .dit import CausalWanDiT
from .dit_blocks import CameraModulation, ChunkContext, TimeModulation
from .float8 import Linear8
from .rope import Rope


def can_be_recorded(dit: CausalWanDiT) -> bool:
    """Whether a transformer lies on a CUDA device in plain layers; a host's own layers may move their weights."""
    if next(dit.parameters()).device.type != "cuda" or torch.version.hip is not None:
        return False
    linears = [m for m in dit.modules() if isinstance(m, (nn.Linear, Linear8))]
    return bool(linears) and all(type(layer) in (nn.Linear, Linear8) for layer in linears)


@dataclass
class _Recording:
    """A graph and the tensors that it reads and writes. source: the context whose values lie in ``context`` now."""

    graph: Any
    x: Tensor
    time: TimeModulation
    context: ChunkContext
    result: Tensor | None
    source: ChunkContext | None = field(default=None, repr=False)


class RecordedDiT:
    """Stands in for a transformer in one walk: the same three passes, replayed where that is possible.

    captures: graphs recorded so far; a steady walk with one prompt records three, and no more. nbytes: what PyTorch set
    aside for them, the camera's scale and shift among it.
    """

    def __init__(self, dit: CausalWanDiT) -> None:
        self.dit = dit
        self.captures = self.nbytes = 0
        self._pool: Any = None
        self._camera: tuple[Any, Tensor, CameraModulation] | None = None
        self._recordings: dict[tuple[int, str], _Recording] = {}
        self._seen: set[tuple[int, str]] = set()
        self._running: torch.cuda.Event | None = None
        self._times: dict[float, TimeModulation] = {}
        self._warm = False
        self._works = True

    def encode_camera(self, rays: Tensor, *, steady: bool = False) -> CameraModulation:
        """See CausalWanDiT. steady: the window is full; the result is then overwritten by the next call."""
        if not (steady and self._works and self._warm):
            # The first pass on a thread sets up libraries, which cannot be recorded.
            self._warm = True
            return self.dit.encode_camera(rays)
        if self._camera is not None and self._camera[1].shape != rays.shape:
            self.forget()
        if self._camera is None:
            place = rays.clone()
            made: list[CameraModulation] = []
            graph = self._record(lambda: made.append(self.dit.encode_camera(place)))
            if graph is None:
                return self.dit.encode_camera(rays)
            self._camera = graph, place, made[0]
        graph, place, modulation = self._camera
        place.copy_(rays)
        graph.replay()
        return modulation

    def __call__(self, x: Tensor, t: float, context: ChunkContext) -> Tensor:
        """See CausalWanDiT.forward."""
        recording = self._recording("denoise", x, t, context, self.dit.denoised)
        if recording is None:
            return self.dit(x, t, context)
        self._replay(recording)
        assert recording.result is not None
        return recording.result.clone()

    def remember(self, x: Tensor, t: float, context: ChunkContext) -> None:
        """See CausalWanDiT."""
        recording = self._recording("remember", x, t, context, self.dit.remembered)
        if recording is None:
            self.dit.remember(x, t, context)
        else:
            self._replay(recording)

    def _replay(self, recording: _Recording) -> None:
        """A device takes about one pass's kernels in advance; a host that launches more spins until there is room.
        So it sleeps until the pass before is done: the device idles for a tenth of a millisecond."""
        if self._running is not None:
            self._running.synchronize()
        recording.graph.replay()
        self._running = torch.cuda.Event(blocking=True)
        self._running.record()

    def forget(self) -> None:
        """Gives all memory back; what is still needed is recorded again."""
        self._recordings.clear()
        self._seen.clear()
        self._times.clear()
        self._camera = self._pool = None
        self.nbytes = 0

    def _recording(
        self, name: str, x: Tensor, t: float, context: ChunkContext, run: Callable[..., Tensor | None]
    ) -> _Recording | None:
        """A recording with these inputs in place; None where the transformer has to run by itself."""
        in_place = self._camera is not None and context.camera is self._camera[2]
        if not (self._works and in_place and context.cache.steady and context.seen is None):
            return None
        key = id(context.cache), name
        recording = self._recordings.get(key)
        if recording is not None and not _same_places(recording.context, context):
            del self._recordings[key]
            recording = None
        if recording is None:
            if key not in self._seen:
                # The first pass of its size chooses algorithms and may allocate; neither can be recorded.
                self._seen.add(key)
                return None
            recording = self._recorded(x, self._time(t, x), context, run)
            if recording is None:
                return None
            self._recordings[key] = recording
        self._place(recording, x, self._time(t, x), context)
        return recording

    def _recorded(
        self, x: Tensor, time: TimeModulation, context: ChunkContext, run: Callable[..., Tensor | None]
    ) -> _Recording | None:
        place, rope = x.clone(), context.rope
        own_time = TimeModulation(time.embedding.clone(), time.rows.clone())
        own = replace(context, condition=context.condition.clone(), rope=Rope(rope.cos.clone(), rope.sin.clone()))
        results: list[Tensor | None] = []
        graph = self._record(lambda: results.append(run(place, own_time, own)))
        return None if graph is None else _Recording(graph, place, own_time, own, results[0])

    def _place(self, recording: _Recording, x: Tensor, time: TimeModulation, context: ChunkContext) -> None:
        recording.x.copy_(x)
        recording.time.embedding.copy_(time.embedding)
        recording.time.rows.copy_(time.rows)
        if recording.source is not context:
            recording.context.condition.copy_(context.condition)
            recording.context.rope.cos.copy_(context.rope.cos)
            recording.context.rope.sin.copy_(context.rope.sin)
            recording.source = context

    def _time(self, t: float, x: Tensor) -> TimeModulation:
        """A recipe has a handful of times, and the weights do not change."""
        if t not in self._times:
            self._times[t] = self.dit.encode_time(t, x.device)
        return self._times[t]

    def _record(self, run: Callable[[], Any]) -> Any:
        """The graph of what ``run`` launches; None, and no further try, where this device or its memory refuses."""
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        try:
            # Other threads go on using the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                run()
        except (RuntimeError, torch.OutOfMemoryError) as error:
            logging.warning("LingBot World: CUDA graphs are left out: %s", error)
            self._works = False
            self.forget()
            return None
        self.captures += 1
        self.nbytes += max(0, torch.cuda.memory_reserved() - before)
        return graph


def _same_places(own: ChunkContext, context: ChunkContext) -> bool:
    """Whether a graph that was recorded with ``own`` reads and writes what ``context`` holds."""
    return own.cache is context.cache and own.cross is context.cross and own.camera is context.camera
