"""When frames are shown and chunks begin, on a clock that the test moves."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lingbot_core.realtime.live_pace import BACKLOG, Pace

FPS, FRAMES = 16.0, 12


def live(seconds: float, chunks: int, commit: float = 0.0) -> tuple[list[float], list[float], list[float]]:
    """Begins of chunks, and times and gaps of all frames, of a world whose chunks take so long."""
    pace, now, begins, shown = Pace(FPS), 0.0, [], []
    for _ in range(chunks):
        now += pace.wait(now)
        begins.append(now)
        now += seconds
        showing = pace.show(FRAMES, now)
        shown = [time for time in shown if time < showing.first] + [showing.due(index) for index in range(FRAMES)]
        now += commit
        pace.took(seconds, seconds + commit)
    return begins, shown, [b - a for a, b in pairwise(shown)]


def test_a_fast_world_plays_at_its_own_fps_and_begins_each_chunk_as_late_as_it_can():
    begins, shown, gaps = live(0.1, 20)
    assert len(shown) == 20 * FRAMES
    assert max(gaps[FRAMES:]) == pytest.approx(1 / FPS)
    assert min(gaps[FRAMES:]) == pytest.approx(1 / FPS)
    for begin, first in zip(begins[5:], shown[5 * FRAMES :: FRAMES], strict=True):
        assert 0.1 < first - begin < 0.1 * 1.15 + 0.04


def test_a_slow_world_never_waits_and_shows_every_frame_soon():
    begins, shown, gaps = live(1.1, 20, commit=0.1)
    assert begins == pytest.approx([1.2 * number for number in range(20)])
    assert len(shown) == 20 * FRAMES
    # What it takes is known after the first: its frames are spread over nine tenths of that.
    assert max(gaps[FRAMES:]) == pytest.approx(1.2 - 11 * 0.09, abs=0.01)
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(0.09)
    last = begins[-1] + 1.1
    assert shown[-FRAMES] <= last + BACKLOG


def test_a_very_slow_world_stands_still_rather_than_crawl():
    _, _, gaps = live(10.0, 5)
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(2 / FPS)


def test_a_chunk_that_comes_early_drops_frames_instead_of_lagging():
    pace = Pace(FPS)
    pace.took(1.4, 1.4)
    first = pace.show(FRAMES, 0.0)
    second = pace.show(FRAMES, 0.2)
    assert second.first == pytest.approx(0.2 + BACKLOG)
    assert first.due(FRAMES - 1) > second.first


def test_a_fast_world_that_is_early_once_shows_all_its_frames():
    pace = Pace(FPS)
    pace.took(0.5, 0.5)
    first = pace.show(FRAMES, 0.0)
    second = pace.show(FRAMES, 0.3)
    assert second.first == pytest.approx(first.due(FRAMES - 1) + 1 / FPS)


def test_what_it_says_of_real_time():
    pace = Pace(FPS)
    assert pace.is_real_time(FRAMES) is None
    pace.took(0.5, 0.6)
    assert pace.is_real_time(FRAMES) is True
    for _ in range(20):
        pace.took(0.9, 1.0)
    assert pace.is_real_time(FRAMES) is False
