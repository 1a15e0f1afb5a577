"""The measurements of whole sessions at small sizes: that they run anywhere, and that their rows say what they mean."""

from __future__ import annotations

import json
import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.chunk import fp8, host, options, steady, walks, worlds
from benchmarks.chunk.__main__ import run
from lingbot_core.camera.controls import Controls
from lingbot_core.engine.session import Chunk, WorldSession
from lingbot_core.models.dit import CausalWanDiT
from lingbot_core.presets import get_preset

Capture = pytest.CaptureFixture[str]


def rows(capsys: Capture, *arguments: str) -> list[dict[str, Any]]:
    """What the command line prints at small sizes, the line about the machine left out."""
    assert run(["--tiny", "--device", "cpu", *arguments])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]


def rounded(dit: CausalWanDiT, exclude: tuple[str, ...] = ()) -> None:
    """Stands for the engine's float8 linears: weights of blocks that have only float8's digits, in place."""
    for name, module in dit.blocks.named_modules():
        if isinstance(module, nn.Linear) and not any(part in name for part in exclude):
            module.weight.data = module.weight.data.to(torch.float8_e4m3fn).to(module.weight.dtype)


@pytest.fixture
def float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "find", lambda: rounded)


def test_steady_shows_some_chunks_and_sums_up_those_of_a_full_window(capsys: Capture) -> None:
    [row] = rows(capsys, "--parts", "steady", "--steady-chunks", "12")
    assert row["made"] == 12
    assert row["finite"]
    assert [chunk["chunk"] for chunk in row["chunks"]] == [*range(10), 11]
    assert {"wall_ms", "host_ms", "cpu_ms", "prepare", "denoise", "decode", "commit"} <= set(row["chunks"][0])
    assert row["steady"]["denoise"]["spread"] >= 0
    assert set(row["once"]) == {"chunk 8", "end"}
    assert row["once"]["end"]["graphs"] == 0


def test_steady_without_decode_and_out_of_time_says_so(capsys: Capture) -> None:
    arguments = ("--parts", "steady", "--no-decode", "--steady-chunks", "50", "--steady-seconds", "0")
    [row] = rows(capsys, *arguments)
    assert row["made"] == 1
    assert row["stopped"] == "after 0 s"
    assert row["chunks"][0]["decode"] < row["chunks"][0]["denoise"]
    assert isinstance(row["steady"], str)


def test_a_steady_walk_that_fails_keeps_what_it_measured(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = WorldSession.advance

    def fails(session: WorldSession, controls: Controls) -> Chunk:
        if len(session.history) == 2:
            raise RuntimeError("no more")
        return advance(session, controls)

    monkeypatch.setattr(WorldSession, "advance", fails)
    assert not run(["--tiny", "--device", "cpu", "--parts", "steady", "--no-decode"])
    row = json.loads(capsys.readouterr().out.splitlines()[1])
    assert (row["made"], row["failed"]) == (2, "chunk 2: RuntimeError: no more")


def test_every_twentieth_chunk_of_a_long_walk_is_shown() -> None:
    assert steady._some(200) == [*range(10), *range(20, 200, 20), 199]


def test_a_summary_knows_the_spread_and_a_drift() -> None:
    found = steady.summary([{"ms": 100.0 + index} for index in range(11)])["ms"]
    assert found["mean"] == 105
    assert found["spread"] == pytest.approx(10 / 105, abs=1e-4)
    assert found["late"] == pytest.approx(1.1)


def test_boundary_compares_the_first_frame_with_forwards_and_decode(capsys: Capture) -> None:
    [row] = rows(capsys, "--parts", "boundary")
    assert 0 < row["first_frame_ms"] <= row["whole_chunk_ms"]
    alone = row["alone"]
    assert alone["forwards_and_decode_ms"] == pytest.approx(4 * alone["forward_ms"] + alone["decode_ms"], abs=0.1)
    assert row["ratio"] == pytest.approx(row["first_frame_ms"] / alone["forwards_and_decode_ms"], rel=1e-3)


def test_stream_drives_the_command_lines_own_loop(capsys: Capture) -> None:
    [row] = rows(capsys, "--parts", "stream")
    assert row["writer"] == "VideoWriter"
    assert row["frames_per_chunk"] == 12
    assert row["decode_seen_ms"] == pytest.approx(row["streamed_ms"] - row["denoise_and_commit_ms"], abs=0.02)
    assert row["write_ms"] > 0


def test_big_has_720p_and_129_frames(capsys: Capture) -> None:
    [large, long] = rows(capsys, "--parts", "big")
    assert (large["case"], large["frames"], len(large["chunks"])) == ("720p", 33, 3)
    assert (long["frames"], len(long["chunks"])) == (129, 11)
    assert large["finite"]
    assert long["finite"]


def test_memory_has_the_lengths_that_are_asked_about(capsys: Capture) -> None:
    found = rows(capsys, "--parts", "memory")
    assert [(row["frames"], row["asked_below_gib"]) for row in found] == [(21, 50.0), (33, 50.0), (81, 70.0)]


def test_options_are_exact_where_they_change_nothing(capsys: Capture) -> None:
    found = rows(capsys, "--parts", "options", "--chunks", "2", "--scenes", "random")
    by_option = {row["option"]: row for row in found}
    assert by_option["again"]["x0_error"] == [0.0, 0.0]
    assert by_option["window 9, sink 3"]["x0_error"] == [0.0, 0.0]  # nothing is evicted yet
    reused = by_option["reuse_last_step_kv"]["x0_error"]
    assert reused[0] == 0.0  # its first chunk has no past
    assert reused[1] > 0.0
    assert by_option["two steps (0, 679)"]["x0_error"][0] > 0.0


def test_a_shorter_recipe_gets_the_noise_that_the_exact_one_has_at_its_steps() -> None:
    exact = get_preset("v1-fast")
    shorter = options.choices(exact)["three steps (0, 358, 679)"]
    start = SimpleNamespace(seed=5, height=16, width=16)
    world = SimpleNamespace(dit=SimpleNamespace(config=SimpleNamespace(out_dim=16)))
    session: Any = SimpleNamespace(history=SimpleNamespace(start=start), world=world)
    whole, part = (walks._noise(session, preset, exact, 3) for preset in (exact, shorter))
    assert [[torch.equal(part.draw(3, i), whole.draw(3, j)) for j in range(4)] for i in range(3)] == [
        [True, False, False, False],
        [False, False, True, False],
        [False, False, False, True],
    ]


def test_fp8_says_what_is_missing(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "MODULE", "lingbot_core.models.none_of_this_name")
    [row] = rows(capsys, "--parts", "fp8")
    assert row == {"what": "fp8", "missing": "there is no module lingbot_core.models.none_of_this_name"}


@pytest.mark.usefixtures("float8")
def test_fp8_stands_beside_its_yardstick(capsys: Capture) -> None:
    found = rows(capsys, "--parts", "fp8", "--chunks", "1", "--fp8-chunks", "1")
    assert len(found) == 7
    free = [row for row in found if row["kind"] == "free walk"]
    assert [row["walk"] for row in free] == ["full size", "drift at 16x32", "drift"]
    for row in free:
        chance, error = row["by_yardstick"]["x0_error"], row["float8"]["x0_error"]
        assert max(chance) < 1e-4  # float32 in another order
        assert min(error) > 1e-4
    trained = free[-1]
    assert trained["scene"] == "tiny, trained"
    assert 15 < trained["float8"]["worst_psnr_db"] < 80
    for row in found:
        if row["kind"].startswith("single"):
            assert row["forwards"] == 8
            assert row["float8"]["mean"] > row["by_yardstick"]["mean"]


@pytest.mark.usefixtures("float8")
def test_other_parts_can_run_with_float8_linears(capsys: Capture) -> None:
    [row, *_] = rows(capsys, "--parts", "memory", "--float8")
    assert row["linears"] == "float8"


def test_a_world_without_a_decoder_denoises_the_same() -> None:
    scene = walks.tiny_scene(torch.device("cpu"), torch.float32)
    bare = walks.Scene(
        scene.name, worlds.without_decoder(scene.world), scene.condition, scene.states, scene.keys, scene.frames
    )
    preset = scene.world.preset
    whole, blind = walks.walk(scene, preset, 2), walks.walk(bare, preset, 2)
    assert all(torch.equal(a, b) for a, b in zip(whole.x0, blind.x0, strict=True))
    assert [frames.shape[1] for frames in blind.frames] == [9, 12]


def test_time_in_a_wait_is_no_work_of_the_host() -> None:
    timer, flag = host.HostTimer(), threading.Event()
    with timer.watching():
        threading.Timer(0.2, flag.set).start()
        flag.wait()
        row = timer.lap()
    assert row["wall_ms"] > 150
    assert row["host_ms"] < 100
    assert row["cpu_ms"] < 100


def test_a_copy_on_one_device_is_no_wait() -> None:
    a = torch.zeros(2)
    assert not host._waits("copy_", (a, a), a)
    assert not host._waits("to", (a, torch.float64), a.double())
    assert not host._waits("__bool__", (a,), True)
    assert host._waits("synchronize", (), None)


def test_watching_leaves_no_trace() -> None:
    before = (Tensor.to, Tensor.cpu, torch.cuda.synchronize, threading.Condition.wait, "cpu" in vars(Tensor))
    with host.HostTimer().watching(), host.Captured():
        pass
    assert before == (Tensor.to, Tensor.cpu, torch.cuda.synchronize, threading.Condition.wait, "cpu" in vars(Tensor))


def test_captures_are_known_only_where_graphs_are_recorded() -> None:
    derived = SimpleNamespace(recorded=None)
    session: Any = SimpleNamespace(_derived=derived)
    assert host.captures(session) is None
    derived.recorded = SimpleNamespace(captures=3)
    assert host.captures(session) == 3


def test_implicit_waits_are_counted_by_line_and_the_modes_own_notice_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def mode(value: str) -> None:
        warnings.warn("Synchronization debug mode does not detect all synchronizing operations", stacklevel=2)

    def advance(controls: Any, *, on_step: Any) -> None:
        for step in range(4):
            on_step(step, 4)
            if step in (1, 3):  # in the second forward, and after the last one
                warnings.warn(host.SYNCED + " (Triggered internally)", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode)
    history = SimpleNamespace(start=SimpleNamespace(preset=get_preset("v1-fast")))
    session: Any = SimpleNamespace(
        world=SimpleNamespace(device=torch.device("cuda")),
        history=history,
        controls=lambda motion: motion,
        advance=advance,
    )
    found = host.implicit_waits(session)
    assert found is not None
    assert found["while_denoising"] == 1
    assert list(found["in_advance"].values()) == [2]
    assert next(iter(found["in_advance"])).startswith("unit/test_benchmarks.py:")


def test_implicit_waits_cannot_be_counted_without_a_gpu() -> None:
    session: Any = SimpleNamespace(world=SimpleNamespace(device=torch.device("cpu")))
    assert host.implicit_waits(session) is None
    begin = time.perf_counter()
    with host.sleeping_waits(torch.device("cpu")) as cost:
        assert cost is None
    assert time.perf_counter() - begin < 1
