"""The K/V cache against a model of it that is only a list of frames."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lingbot_core.errors import CacheError
from lingbot_core.models.kv_cache import GROWTH, CacheShape, KVCache

SHAPE = CacheShape(layers=2, heads=1, head_dim=2, frame_tokens=3)


def make(window: int | None = None, sink: int = 0, **options) -> KVCache:
    return KVCache(SHAPE, window=window, sink=sink, dtype=torch.float32, device=torch.device("cpu"), **options)


def content(frame: int, layer: int, mark: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one frame that no other frame, layer or try has; [frame_tokens, 1, 2]."""
    base = torch.arange(3 * 2, dtype=torch.float32).view(3, 1, 2) / 16
    keys = base + frame + 1000 * layer + 10000 * mark
    return keys, -keys


def write(cache: KVCache, first: int, frames: int, mark: int = 0) -> None:
    for layer in range(SHAPE.layers):
        parts = [content(first + i, layer, mark) for i in range(frames)]
        keys, values = torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])
        for buffer, new in zip(cache.buffers(layer), (keys, values), strict=True):
            slots = buffer.split(SHAPE.frame_tokens)
            for slot, part in zip(cache.open_slots.tolist(), new.split(SHAPE.frame_tokens), strict=True):
                slots[slot].copy_(part)


def chunk(cache: KVCache, first: int, frames: int, mark: int = 0) -> None:
    cache.begin(first, frames)
    write(cache, first, frames, mark)
    cache.end()


def held(cache: KVCache) -> dict[int, list[torch.Tensor]]:
    """Frame -> keys and values of every layer, as attention sees them."""
    out: dict[int, list[torch.Tensor]] = {}
    for layer in range(SHAPE.layers):
        keys, values = cache.view(layer)
        assert len(keys) == len(values) == SHAPE.frame_tokens * len(cache.slot_frames)
        if not len(keys):
            return {}
        parts = zip(keys.split(SHAPE.frame_tokens), values.split(SHAPE.frame_tokens), strict=True)
        for frame, (k, v) in zip(cache.slot_frames, parts, strict=True):
            out.setdefault(frame, []).extend([k, v])
    return out


def assert_holds(cache: KVCache, frames: list[int], marks: dict[int, int] | None = None) -> None:
    """Exactly these frames, each once, with the content that was written for it."""
    assert sorted(cache.slot_frames) == frames
    for frame, tensors in held(cache).items():
        mark = (marks or {}).get(frame, 0)
        expected = [t for layer in range(SHAPE.layers) for t in content(frame, layer, mark)]
        for got, wanted in zip(tensors, expected, strict=True):
            assert torch.equal(got, wanted), f"frame {frame} was overwritten"


def visible(count: int, window: int | None, sink: int) -> list[int]:
    """Sink and latest frames of ``count`` frames."""
    if window is None or count <= window:
        return list(range(count))
    return [*range(sink), *range(count - (window - sink), count)]


@st.composite
def windows(draw) -> tuple[int, int, int]:
    """(chunk, sink, window)."""
    frames, sink = draw(st.integers(1, 5)), draw(st.integers(0, 7))
    return frames, sink, sink + frames + draw(st.integers(0, 9))


@settings(max_examples=60, deadline=None)
@given(windows(), st.integers(1, 14))
def test_a_window_holds_the_sink_and_the_latest_frames_each_once(sizes, chunks):
    frames, sink, window = sizes
    cache = make(window, sink)
    for index in range(chunks):
        first = index * frames
        cache.begin(first, frames)
        write(cache, first, frames, mark=1)
        write(cache, first, frames)  # the commit overwrites what denoising wrote
        # All forwards of a chunk see the same context.
        assert_holds(cache, visible(first + frames, window, sink))
        cache.end()
        assert_holds(cache, visible(first + frames, window, sink))
        assert cache.next_frame == first + frames


def test_partial_evictions_drop_exactly_the_overflow_behind_the_sink():
    """Chunks of 4 in a window of 18 with a sink of 6: 16 frames, then evictions of 2, 4 and 4."""
    cache = make(18, 6)
    for index in range(7):
        chunk(cache, 4 * index, 4)
        evicted = {3: 6, 4: 8, 5: 12, 6: 16}.get(index, 6)
        assert_holds(cache, [*range(min(6, 4 * index + 4)), *range(evicted, 4 * index + 4)])


class CacheModel(RuleBasedStateMachine):
    """Any order of begin, write, cancel, end, rewind and clone, against a list of what should be there."""

    @initialize(sizes=windows(), limited=st.booleans(), depth=st.integers(0, 3), capacity=st.integers(0, 8))
    def start(self, sizes, limited, depth, capacity):
        self.frames, self.sink, self.window = sizes
        if not limited:
            self.sink, self.window = 0, None
        self.depth = depth
        self.cache = make(self.window, self.sink, rewind_depth=depth, capacity=capacity)
        self.mark = 0
        self.marks: dict[int, int] = {}
        self.history: list[list[int]] = [[]]  # frames held after 0, 1, 2, ... chunks
        self.open = self.written = False

    @property
    def next(self) -> int:
        return self.frames * (len(self.history) - 1)

    @rule()
    def begin(self):
        """Also again, while the chunk is open: the retry after a cancel."""
        before = self.cache.slot_frames if self.open else None
        self.cache.begin(self.next, self.frames)
        if before is not None:
            assert self.cache.slot_frames == before
        self.written = self.written and self.open
        self.open = True

    @precondition(lambda self: self.open)
    @rule()
    def write(self):
        self.mark += 1
        write(self.cache, self.next, self.frames, self.mark)
        self.marks.update(dict.fromkeys(range(self.next, self.next + self.frames), self.mark))
        self.written = True

    @precondition(lambda self: self.open and self.written)
    @rule()
    def end(self):
        self.cache.end()
        self.history.append(visible(self.next + self.frames, self.window, self.sink))
        self.open = self.written = False

    @rule(back=st.integers(0, 5))
    def rewind(self, back):
        chunks = max(0, len(self.history) - 1 - back)
        frame = chunks * self.frames
        possible = self.cache.can_rewind(frame)
        before = self.cache.slot_frames
        assert self.cache.rewind(frame) == possible
        if not possible:
            assert self.cache.slot_frames == before
            return
        del self.history[chunks + 1 :]
        self.open = self.written = False

    @rule()
    def clone(self):
        """Goes on with the copy; what happens to the original is nothing to it."""
        original, self.cache = self.cache, self.cache.clone()
        for buffer in (*original._keys, *original._values):
            buffer.fill_(float("nan"))
        for undo in original._undo:
            for buffer in (*undo.keys, *undo.values):
                buffer.fill_(float("nan"))
        original._slots[:] = [-5] * len(original._slots)
        original._undo.clear()

    @rule()
    def clear(self):
        if len(self.history) < 6:
            return
        self.cache.clear()
        self.history = [[]]
        self.open = self.written = False

    @invariant()
    def holds_what_it_should(self):
        if not hasattr(self, "cache"):
            return
        assert self.cache.next_frame == self.next
        if not self.open:
            assert_holds(self.cache, self.history[-1], self.marks)
            return
        expected = visible(self.next + self.frames, self.window, self.sink)
        assert sorted(self.cache.slot_frames) == expected
        if self.written:
            assert_holds(self.cache, expected, self.marks)

    @invariant()
    def can_go_back_as_far_as_promised(self):
        if not hasattr(self, "cache"):
            return
        chunks = len(self.history) - 1
        everything = self.window is None or self.cache.next_frame + self.frames * self.open <= self.window
        reach = chunks if everything else min(chunks, self.depth - self.open)
        for back in range(reach + 1):
            if everything or back <= self.depth - self.open or (back == 0 and not self.open):
                assert self.cache.can_rewind((chunks - back) * self.frames)


CacheModel.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAnyOrderOfCalls = CacheModel.TestCase


def test_a_retry_evicts_nothing_more():
    cache = make(6, 3)
    chunk(cache, 0, 3)
    chunk(cache, 3, 3)
    cache.begin(6, 3)
    write(cache, 6, 3, mark=1)
    for mark in (2, 0):
        cache.begin(6, 3)
        write(cache, 6, 3, mark)
    assert_holds(cache, [0, 1, 2, 6, 7, 8])
    cache.end()
    chunk(cache, 9, 3)
    assert_holds(cache, [0, 1, 2, 9, 10, 11])


def test_rewinding_an_open_chunk_needs_its_overwritten_frames():
    for depth, possible in ((0, False), (1, True)):
        cache = make(6, 3, rewind_depth=depth)
        chunk(cache, 0, 3)
        chunk(cache, 3, 3)
        cache.begin(6, 3)
        write(cache, 6, 3)
        assert cache.can_rewind(6) == cache.rewind(6) == possible
        if possible:
            assert_holds(cache, [0, 1, 2, 3, 4, 5])
            chunk(cache, 6, 3)
        else:
            cache.end()
        assert_holds(cache, [0, 1, 2, 6, 7, 8])


def test_what_was_kept_for_a_rewind_is_freed_by_a_rewind_behind_it():
    cache = make(6, 3, rewind_depth=3)
    buffers = cache.nbytes
    for index in range(5):
        chunk(cache, 3 * index, 3)
    assert cache.nbytes == buffers + 3 * 3 * SHAPE.frame_bytes(torch.float32)
    assert cache.rewind(3)  # the sink is there in any case
    assert cache.nbytes == buffers
    assert_holds(cache, [0, 1, 2])


def test_slots_after_a_rewind_are_those_of_a_cache_that_never_went_further():
    for window, sink in ((9, 2), (None, 0)):
        straight, other = make(window, sink, rewind_depth=2), make(window, sink, rewind_depth=2)
        for index in range(6):
            chunk(straight, 3 * index, 3)
        for index in range(5):
            chunk(other, 3 * index, 3)
        assert other.rewind(9)
        for index in (3, 4, 5):
            chunk(other, 3 * index, 3)
        assert other.slot_frames == straight.slot_frames


def test_a_cache_without_a_window_grows_and_keeps_what_it_holds():
    cache = make(capacity=2)
    sizes = {cache.nbytes}
    for index in range(2 * GROWTH):
        chunk(cache, 3 * index, 3)
        sizes.add(cache.nbytes)
    assert_holds(cache, list(range(6 * GROWTH)))
    assert len(sizes) <= 2 + 6 * GROWTH // GROWTH
    frame = SHAPE.frame_bytes(torch.float32)
    assert cache.nbytes < (6 * GROWTH + GROWTH) * frame


def test_capacity_is_allocated_at_once_and_not_exceeded():
    cache = make(capacity=12)
    before = [t.data_ptr() for t in (*cache._keys, *cache._values)]
    for index in range(4):
        chunk(cache, 3 * index, 3)
    assert [t.data_ptr() for t in (*cache._keys, *cache._values)] == before
    assert cache.nbytes == 12 * SHAPE.frame_bytes(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_buffers(dtype):
    assert SHAPE.frame_bytes(dtype) == 2 * 2 * 3 * 2 * dtype.itemsize
    cache = KVCache(SHAPE, window=6, sink=0, rewind_depth=1, dtype=dtype, device=torch.device("cpu"))
    assert cache.nbytes == 6 * SHAPE.frame_bytes(dtype)
    for index in range(3):
        chunk(cache, 3 * index, 3)
    assert cache.view(0)[0].dtype == dtype
    assert cache.nbytes == (6 + 3) * SHAPE.frame_bytes(dtype)  # the last chunk overwrote three frames


def test_a_frame_of_the_published_model_at_480x832_costs_1_19_gib():
    shape = CacheShape(layers=40, heads=40, head_dim=128, frame_tokens=60 * 104 // 4)
    assert shape.frame_bytes(torch.bfloat16) == 40 * 2 * 5120 * 2 * 1560
    assert round(shape.frame_bytes(torch.bfloat16) / 2**30, 2) == 1.19


def test_a_view_is_no_copy():
    cache = make(6)
    chunk(cache, 0, 3)
    keys, values = cache.view(1)
    assert keys.data_ptr() == cache._keys[1].data_ptr()
    assert values.data_ptr() == cache._values[1].data_ptr()


def test_a_clone_shares_no_storage_and_lives_on_alone():
    cache = make(6, 3, rewind_depth=2)
    for index in range(4):
        chunk(cache, 3 * index, 3)
    twin = cache.clone()

    def storages(one: KVCache) -> set[int]:
        undo = [t for record in one._undo for t in (*record.keys, *record.values)]
        return {t.untyped_storage().data_ptr() for t in (*one._keys, *one._values, *undo)}

    assert len(storages(cache)) == 4 + 2 * 4
    assert not storages(cache) & storages(twin)
    chunk(twin, 12, 3, mark=1)
    assert_holds(cache, [0, 1, 2, 9, 10, 11])
    assert twin.rewind(9)
    assert_holds(twin, [0, 1, 2, 6, 7, 8])
    assert cache.next_frame == 12
    assert cache.rewind(6)
    assert_holds(cache, [0, 1, 2, 3, 4, 5])


def test_more_than_a_million_tokens_and_any_frame_number_work():
    shape = CacheShape(layers=1, heads=1, head_dim=1, frame_tokens=2**19)
    cache = KVCache(shape, window=None, capacity=3, dtype=torch.bfloat16, device=torch.device("cpu"))
    for frame in range(3):
        cache.begin(frame, 1)
        [slot] = cache.open_slots.tolist()
        for buffer in cache.buffers(0):
            buffer.split(2**19)[slot].fill_(frame)
        cache.end()
    keys, _ = cache.view(0)
    assert len(keys) == 3 * 2**19
    assert [keys[2**19 * frame + 5].item() for frame in range(3)] == [0, 1, 2]
    cache = make(6, 3)
    far = 2**31
    cache._next = far - 3  # as after two thousand million frames
    for first in (far - 3, far, far + 3):
        chunk(cache, first, 3)
    assert sorted(cache.slot_frames) == [*range(far, far + 6)]
    assert cache.next_frame == far + 6


def test_calls_out_of_order_are_errors():
    cache = make(6, 3)
    with pytest.raises(CacheError, match="no chunk is open"):
        cache.end()
    with pytest.raises(CacheError, match="no chunk is open"):
        write(cache, 0, 3)
    with pytest.raises(CacheError, match="chunk at latent frame 3 begun, but 0 comes next"):
        cache.begin(3, 3)
    cache.begin(0, 3)
    with pytest.raises(CacheError, match="the open chunk has 3 latent frames, not 4"):
        cache.begin(0, 4)
    with pytest.raises(CacheError, match="chunk at latent frame 3 begun, but 0 comes next"):
        cache.begin(3, 3)
    write(cache, 0, 3)
    cache.end()
    with pytest.raises(CacheError, match="chunk at latent frame 0 begun, but 3 comes next"):
        cache.begin(0, 3)
    assert not cache.can_rewind(4)
    assert not cache.can_rewind(-1)
    assert not cache.rewind(4)


def test_a_window_too_small_for_its_sink_and_a_chunk_is_an_error():
    cache = make(5, 3)
    chunk(cache, 0, 3)
    with pytest.raises(CacheError, match="a window of 5 cannot hold a sink of 3 and 3 new frames"):
        cache.begin(3, 3)
    assert_holds(cache, [0, 1, 2])
