"""Sessions of the embedded model on a CUDA device: recorded graphs, two streams, run-ahead, float8, cancels."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lingbot_core import World, WorldSession
from lingbot_core.camera.controls import KeyMotion
from lingbot_core.camera.keys import PER_LATENT
from lingbot_core.engine.chunk import Chunk
from lingbot_core.engine.warm import warm_up
from lingbot_core.models.float8 import Linear8, Rows8, quantise_rows
from lingbot_core.models.graphs import RecordedDiT
from lingbot_core.models.pieces import PYTORCH

pytestmark = pytest.mark.gpu

IMAGE = np.random.default_rng(0).integers(0, 255, (96, 160, 3), dtype=np.uint8)
MOVES = ("w", "wl", "", "d", "wj", "s", "wl", "w", "a", "w")
STEADY = 3  # chunks until the embedded model's window of 9 latent frames is full


@pytest.fixture(scope="module")
def world() -> World:
    return World.load("tiny", device="cuda")


@pytest.fixture(scope="module")
def eager() -> World:
    """The same without graphs."""
    return World.load("tiny", device="cuda", cuda_graphs=False)


def begin(world: World, **options: Any) -> WorldSession:
    return WorldSession.start(world, IMAGE, "a field", **options)


def step(session: WorldSession, number: int, **options: Any) -> Chunk:
    held = (MOVES[number % len(MOVES)],) * 3
    return session.advance(session.controls(KeyMotion(held, PER_LATENT)), **options)


def walk(session: WorldSession, chunks: int) -> list[Chunk]:
    first = len(session.history)
    return [step(session, first + i) for i in range(chunks)]


def same(got: list[Chunk], expected: list[Chunk]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.latents, b.latents)
        assert torch.equal(a.frames, b.frames)


def recorded(session: WorldSession) -> RecordedDiT:
    assert session._derived.recorded is not None
    return session._derived.recorded


def test_recorded_graphs_are_bitwise_the_transformer(world, eager):
    with_graphs, without = begin(world), begin(eager)
    same(walk(with_graphs, 7), walk(without, 7))
    assert recorded(with_graphs).captures == 3
    assert without._derived.recorded is None


def test_recorded_graphs_of_other_pieces_are_bitwise_the_transformer(world, eager, monkeypatch):
    """Whatever computes the pieces, a replay writes keys and values where the cache has room for this chunk."""
    for dit in (world.dit, eager.dit):
        monkeypatch.setattr(dit, "pieces", PYTORCH)
    same(walk(begin(world), 7), walk(begin(eager), 7))


def test_a_steady_walk_records_no_more(world):
    session = begin(world)
    walk(session, STEADY + 2)
    made = recorded(session).captures
    walk(session, 10)
    assert recorded(session).captures == made == 3


def test_another_prompt_going_back_and_forks_are_bitwise_the_same(world, eager):
    sessions = begin(world, rewind_depth=2), begin(eager, rewind_depth=2)
    done: list[list[Chunk]] = []
    for session in sessions:
        chunks = walk(session, 6)
        session.set_prompt("a field at night")
        chunks += walk(session, 3)
        session.rewind(7)
        chunks += walk(session, 2)
        session.rewind(2)  # beyond what is kept, to before the window was full
        chunks += walk(session, 4)
        twin = session.fork()
        chunks += walk(twin, 2) + walk(session, 2)
        session.release()
        session.resume()
        chunks += walk(session, 3)
        done.append(chunks)
    same(*done)


def test_decoding_beside_the_commit_gives_the_same_frames(world, monkeypatch):
    beside = walk(begin(world), 6)
    monkeypatch.setattr(World, "overlaps", property(lambda self: False))
    same(beside, walk(begin(world), 6))


def test_frames_are_whole_when_they_are_handed_out(world):
    session, seen = begin(world), []
    for number in range(5):
        chunk = step(session, number, on_frames=lambda early: seen.append(early.frames.cpu()))
        assert torch.equal(seen[-1], chunk.frames.cpu())


def test_the_host_never_waits_without_saying_so(world):
    session = begin(world)
    # Whether the encoder still changes is looked at, and that waits.
    session._derived._condition.latents(0, 100)
    walk(session, STEADY + 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        walk(session, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("graphs", [True, False])
def test_the_host_is_at_most_one_step_ahead(world, eager, graphs, monkeypatch):
    session = begin(world if graphs else eager)
    walk(session, STEADY + 2)
    ends: list[torch.cuda.Event] = []

    def counted(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(self: Any, *args: Any) -> Tensor:
            result = run(self, *args)
            torch.cuda._sleep(20_000_000)  # a slow device
            ends.append(torch.cuda.Event())
            ends[-1].record()
            return result

        return call

    owner = type(session._derived.dit)
    name = "__call__" if owner is RecordedDiT else "forward"
    monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    seen = []

    def on_step(number: int, total: int) -> None:
        seen.append([event.query() for event in ends])

    step(session, 5, on_step=on_step)
    assert len(seen) == 4
    for number, finished in enumerate(seen):
        assert all(finished[: max(0, number - 1)]), "more than one step was queued behind the one that runs"
    assert not all(all(finished) for finished in seen), "the device was idle between steps"


class Stop(Exception):
    pass


def test_cancels_anywhere_change_nothing(world):
    expected = walk(begin(world), 8)
    session, chance = begin(world), random.Random(3)
    made: list[Chunk] = []
    while len(made) < 8:
        at = chance.choice([0, 1, 2, 3, "frames", None, None])

        def on_step(number: int, total: int, at: object = at) -> None:
            if number == at:
                raise Stop

        def on_frames(chunk: Chunk, at: object = at) -> None:
            if at == "frames":
                raise Stop

        try:
            chunk: Chunk | None = step(session, len(made), on_step=on_step, on_frames=on_frames)
        except Stop:
            if session.state != "failed":
                continue
            session.resume()
            chunk = None
        made.append(expected[len(made)] if chunk is None else chunk)
    same(made, expected)
    assert [torch.equal(a.latents, b.latents) for a, b in zip(session.history.chunks, expected, strict=True)] == [
        True
    ] * 8


def test_sessions_take_turns_on_one_world(world):
    alone = [walk(begin(world, seed=seed), 6) for seed in (1, 2)]
    both = [begin(world, seed=seed) for seed in (1, 2)]
    taken: list[list[Chunk]] = [[], []]
    for number in range(6):
        for session, chunks in zip(both, taken, strict=True):
            chunks.append(step(session, number))
    for got, expected in zip(taken, alone, strict=True):
        same(got, expected)


def test_warming_up_reports_and_leaves_nothing(world):
    seen: list[tuple[int, int]] = []
    warm_up(world)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    warm_up(world, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert torch.cuda.memory_allocated() == before


def test_still_chunks_see_less_on_a_gpu_too(world, eager):
    sessions = [
        WorldSession.start(w, IMAGE, "a field", preset=w.preset.with_overrides(still_window=6)) for w in (world, eager)
    ]
    same(walk(sessions[0], 7), walk(sessions[1], 7))


@pytest.fixture(scope="module")
def eight() -> World:
    return World.load("tiny", device="cuda", dtype="float8")


def test_float8_products_are_those_of_the_formula():
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(256, 384, dtype=torch.bfloat16)
    layer = Linear8.of(linear).cuda()
    x = torch.randn(48, 256, generator=generator).to("cuda", torch.bfloat16)
    rows = quantise_rows(x)
    exact = (rows.wide() @ (layer.weight.float() * layer.scale).t()) + layer.bias.float()
    for given in (x, Rows8(rows.values, rows.scale)):
        got = layer(given)
        assert got.dtype == torch.bfloat16
        assert (got.float() - exact).norm() / exact.norm() < 5e-3  # bfloat16 of the result
    plain = x.float() @ linear.weight.float().cuda().t() + linear.bias.float().cuda()
    assert 5e-3 < (exact - plain).norm() / plain.norm() < 6e-2


def test_a_float8_world_walks_like_the_exact_one(world, eight):
    assert isinstance(eight.dit.blocks[0].ffn[0], Linear8)
    exact, rounded = walk(begin(world), 6), walk(begin(eight), 6)
    for a, b in zip(exact, rounded, strict=True):
        error = (a.latents - b.latents).norm() / a.latents.norm()
        assert 0 < error < 0.35
    assert (exact[0].latents - rounded[0].latents).norm() / exact[0].latents.norm() < 0.1
