"""The K/V cache of one branch of one session: what self-attention remembers of the world.

Memory is organised in slots of one latent frame each. Frames fill the slots in order; once a window is full, the
oldest frames behind the sink give up exactly as many slots as the new chunk needs and are overwritten in place, so a
chunk never moves the rest of the cache. Attention does not care about the order of slots, and keys are stored with
the rotation of their absolute frame, so nothing is ever rotated again.

All bookkeeping is in Python integers: neither a write nor a view waits for the device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CacheError

# A cache without a window grows by this many latent frames at a time, one layer after the other, so that growing
# needs the extra memory of a single layer only.
GROWTH = 6


@dataclass(frozen=True)
class CacheShape:
    """What one latent frame costs. frame_tokens: tokens per latent frame."""

    layers: int
    heads: int
    head_dim: int
    frame_tokens: int

    def frame_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one latent frame's keys and values over all layers."""
        return 2 * self.layers * self.frame_tokens * self.heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class _Undo:
    """What has to be put back to forget a chunk: slots before it, and the keys and values it overwrote."""

    slots: tuple[int, ...]
    overwritten: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


class KVCache:
    """Keys and values of every layer, [tokens, heads, head_dim] each.

    window: latent frames in all, sink and current chunk included; None keeps everything. sink: first frames that are
    never evicted. capacity: frames to allocate at once when there is no window (grows beyond it). rewind_depth:
    chunks that ``rewind`` can take back without a replay once the window evicts.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        window: int | None,
        sink: int = 0,
        capacity: int = 0,
        rewind_depth: int = 0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape, self.window, self.sink = shape, window, sink
        self.rewind_depth = rewind_depth
        self.dtype, self.device = dtype, device
        self._slots: list[int] = []  # absolute latent frame in each slot
        self._next = 0  # first latent frame of the chunk that comes next, or of the open one
        self._open: tuple[int, ...] | None = None  # slots of the chunk being written, in frame order
        self._table = torch.empty(0, dtype=torch.int64, device=device)  # the same, where kernels can read it
        self._undo: deque[_Undo] = deque(maxlen=rewind_depth)
        self._frames = window if window is not None else max(capacity, 1)
        self._keys = [self._allocate(self._frames) for _ in range(shape.layers)]
        self._values = [self._allocate(self._frames) for _ in range(shape.layers)]

    def _allocate(self, frames: int) -> Tensor:
        tokens = frames * self.shape.frame_tokens
        size = (tokens, self.shape.heads, self.shape.head_dim)
        return torch.empty(size, dtype=self.dtype, device=self.device)

    @property
    def slot_frames(self) -> tuple[int, ...]:
        """Absolute latent frame held by each filled slot, the open chunk's included."""
        return tuple(self._slots)

    @property
    def next_frame(self) -> int:
        """First latent frame of the chunk that is open or comes next."""
        return self._next

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, those kept for rewinding included."""
        kept = [t for undo in self._undo for t in (*undo.keys, *undo.values)]
        return sum(t.nbytes for t in (*self._keys, *self._values, *kept))

    def begin(self, first_frame: int, frames: int) -> None:
        """Makes room for the chunk that starts at ``first_frame``; evicts at most once however often it is called.

        A chunk that was begun and never ended (cancelled, failed) is simply begun again.
        """
        if first_frame != self._next:
            raise CacheError(f"chunk at latent frame {first_frame} begun, but {self._next} comes next")
        if self._open is not None:
            if len(self._open) != frames:
                raise CacheError(f"the open chunk has {len(self._open)} latent frames, not {frames}")
            return
        before = tuple(self._slots)
        used = len(self._slots)
        total = used + frames if self.window is None else min(self.window, used + frames)
        evict = used + frames - total
        # The oldest frames behind the sink, oldest first.
        old = sorted(s for s in range(used) if self._slots[s] >= self.sink)
        old.sort(key=lambda slot: self._slots[slot])
        freed = old[:evict]
        if len(freed) < evict:
            raise CacheError(f"a window of {self.window} cannot hold a sink of {self.sink} and {frames} new frames")
        self._remember(before, tuple(freed))
        self._grow(total)
        slots = sorted([*range(used, total), *freed])
        after = [*before, *[-1] * (total - used)]
        for offset, slot in enumerate(slots):
            after[slot] = first_frame + offset
        table = torch.tensor(slots, dtype=torch.int64)
        if len(self._table) != frames:
            self._table = torch.empty(frames, dtype=torch.int64, device=self.device)
        # The same tensor for every chunk: graphs that were captured read it. The host does not wait for the device.
        self._table.copy_(table, non_blocking=True)
        # One statement, so that an interruption finds the chunk either begun or not.
        self._slots, self._open = after, tuple(slots)

    def end(self) -> None:
        """The open chunk's keys and values are final."""
        if self._open is None:
            raise CacheError("no chunk is open")
        self._next, self._open = self._next + len(self._open), None

    @property
    def open_slots(self) -> Tensor:
        """int64 [frames] on the cache's device: the slots of the open chunk's latent frames."""
        if self._open is None:
            raise CacheError("no chunk is open")
        return self._table

    def buffers(self, layer: int) -> tuple[Tensor, Tensor]:
        """All slots of a layer, [slots * frame_tokens, heads, head_dim] each, filled or not."""
        return self._keys[layer], self._values[layer]

    @property
    def steady(self) -> bool:
        """Whether a window is full: attention then sees whole buffers, which stay where they are."""
        return self.window is not None and len(self._slots) == self.window

    def view(self, layer: int, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Everything attention may see now: two [tokens, heads, head_dim] views without a copy.

        slots: of `latest`, to see only these; then it is a copy.
        """
        filled = self._span(0, len(self._slots))
        keys, values = self._keys[layer][filled], self._values[layer][filled]
        if slots is None:
            return keys, values
        shape = (-1, self.shape.frame_tokens, *keys.shape[1:])
        some = (t.view(shape).index_select(0, slots).flatten(0, 1) for t in (keys, values))
        return next(some), next(some)

    def latest(self, frames: int) -> Tensor | None:
        """Slots of the sink and of the newest latent frames, ``frames`` in all, int64 on the cache's device.

        None if there are no more than that.
        """
        if len(self._slots) <= frames:
            return None
        newest = sorted(range(len(self._slots)), key=lambda slot: self._slots[slot])
        sink = [slot for slot in newest if self._slots[slot] < self.sink]
        chosen = sorted({*sink, *newest[len(newest) - (frames - len(sink)) :]})
        return torch.tensor(chosen, dtype=torch.int64).to(self.device, non_blocking=True)

    def can_rewind(self, frame: int) -> bool:
        """Whether ``rewind(frame)`` would succeed."""
        if not 0 <= frame <= self._next:
            return False
        unchanged = frame == self._next and self._open is None
        return unchanged or self._kept_as_truncation(frame) or self._undo_steps(frame) is not None

    def rewind(self, frame: int) -> bool:
        """Forgets all chunks from latent frame ``frame`` on. False, with nothing changed, if they must be replayed."""
        if not self.can_rewind(frame):
            return False
        if frame == self._next and self._open is None:
            return True
        if self._kept_as_truncation(frame):
            kept = sum(held < frame for held in self._slots)
            del self._slots[kept:]
            while self._undo and len(self._undo[-1].slots) >= kept:
                self._undo.pop()
        else:
            for _ in range(self._undo_steps(frame) or 0):
                self._restore(self._undo.pop())
        self._open = None
        self._next = frame
        return True

    def clone(self) -> KVCache:
        """A copy that shares no storage; its buffers are as large as this one's."""
        twin = object.__new__(KVCache)
        twin.__dict__.update(self.__dict__)
        twin._slots = list(self._slots)
        twin._table = self._table.clone()
        twin._keys = [t.clone() for t in self._keys]
        twin._values = [t.clone() for t in self._values]
        twin._undo = deque(
            (
                _Undo(u.slots, u.overwritten, tuple(t.clone() for t in u.keys), tuple(t.clone() for t in u.values))
                for u in self._undo
            ),
            maxlen=self.rewind_depth,
        )
        return twin

    def clear(self) -> None:
        """Forgets everything but keeps the buffers."""
        self._slots.clear()
        self._undo.clear()
        self._open, self._next = None, 0

    def _span(self, first: int, count: int) -> slice:
        tokens = self.shape.frame_tokens
        return slice(first * tokens, (first + count) * tokens)

    def _grow(self, frames: int) -> None:
        if frames <= self._frames:
            return
        target = max(frames, self._frames + GROWTH)
        filled = self._span(0, len(self._slots))
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                new = self._allocate(target)
                new[filled] = old[filled]
                buffers[layer] = new
        self._frames = target

    def _kept_as_truncation(self, frame: int) -> bool:
        """True when slots hold frames 0, 1, 2, ... in order, so that dropping a tail is all there is to do."""
        kept = sum(held < frame for held in self._slots)
        return kept == frame and self._slots[:kept] == list(range(kept))

    def _undo_steps(self, frame: int) -> int | None:
        """How many undo records lead back to ``frame``; None if they do not reach it."""
        for steps, undo in enumerate(reversed(self._undo), start=1):
            if (max(undo.slots) + 1 if undo.slots else 0) == frame:
                return steps
        return None

    def _remember(self, slots: tuple[int, ...], overwritten: tuple[int, ...]) -> None:
        if not self.rewind_depth:
            return
        spans = [self._span(slot, 1) for slot in overwritten]
        keys = tuple(torch.cat([k[s] for s in spans]) for k in self._keys) if spans else ()
        values = tuple(torch.cat([v[s] for s in spans]) for v in self._values) if spans else ()
        self._undo.append(_Undo(slots, overwritten, keys, values))

    def _restore(self, undo: _Undo) -> None:
        self._slots = list(undo.slots)
        for position, slot in enumerate(undo.overwritten):
            here, there = self._span(slot, 1), self._span(position, 1)
            for layer, (keys, values) in enumerate(zip(undo.keys, undo.values, strict=True)):
                self._keys[layer][here] = keys[there]
                self._values[layer][here] = values[there]
