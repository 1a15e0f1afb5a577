"""The video socket on a real server: what it answers, what it makes, and what it leaves behind."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from aiohttp import WSMsgType
from hostile_video import hostile_visit
from video_server import HURRIED, PICTURE, camera, data_url, interaction, noise_picture, run, start, video_server

from lingbot_core.camera.formats.npy import load_camera
from lingbot_core.engine.fragments import FragmentWriter
from lingbot_core.engine.image import frames_to_uint8, prepare_image
from lingbot_core.engine.route import route_from_camera, route_from_events
from lingbot_core.engine.session import WorldSession
from lingbot_core.errors import PromptError, ServerError
from lingbot_core.realtime.client import VideoClient, key_velocity
from lingbot_core.realtime.codec import pack, unpack
from lingbot_core.realtime.host import LoadedHost
from lingbot_core.realtime.server import CAMERA, VIDEO
from lingbot_core.realtime.video_socket import AHEAD
from lingbot_core.realtime.worker import ThreadWorker

from ..conftest import prompt_states

EXAMPLES = Path(__file__).parents[3] / "examples"
PING = {"type": "session.ping"}
STOP = {"type": "session.stop"}


class Watched(LoadedHost):
    """The tiny model; what was made is kept when its session ends, and a test can hold up the worker or let it fail.

    seen: histories of sessions that ended. gate: cleared, the worker waits before its next chunk. entered: it is there.
    """

    def __init__(self, world) -> None:
        super().__init__(world)
        self.seen = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.unsayable: set[str] = set()
        self.broken = False

    def close(self, handle) -> None:
        self.seen.append(handle.history)
        super().close(handle)

    def encode(self, prompts):
        if bad := self.unsayable & set(prompts):
            raise PromptError(f"{bad.pop()} cannot be said")
        return super().encode(prompts)

    @contextmanager
    def drive(self, handle):
        self.entered.set()
        assert self.gate.wait(30)
        if self.broken:
            raise RuntimeError("a wire came loose")
        with super().drive(handle) as drive:
            yield drive


@pytest.fixture
def host(tiny_world) -> Watched:
    return Watched(tiny_world)


def frames_of(video: bytes) -> np.ndarray:
    """uint8 [T, H, W, 3] of mp4 bytes."""
    with av.open(io.BytesIO(video)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def left_nothing(at, host: Watched) -> bool:
    return len(at.service.residents) == 0 and not host.registry._living and at.service.connections == 0


async def watch(at, *messages, first=None):
    """Sends messages at once, and reads to the end of the video."""
    async with at.peer() as peer:
        for message in messages:
            await peer.send(message)
        await peer.until("session.done")
        return peer


def script(*rows: str) -> list:
    """One row for each chunk, its latent frames separated by spaces; - for no key."""
    return [[list(keys.strip("-")) for keys in row.split()] for row in rows]


WALK = script("w w wj", "j - d", "i ik l")


# What is said


def test_a_video_from_its_start_to_its_end(host):
    async def scenario():
        async with video_server(host=host) as at:
            async with at.peer() as peer:
                begun = await peer.ask(start(num_frames=30, seed=5, colour="red", extra_params={"lora": 1}))
                done = await peer.until("session.done")
                close = await peer.closed()
            await at.becomes_true(lambda: left_nothing(at, host))
            return begun, peer, done, close

    begun, peer, done, close = run(scenario())
    request = begun.pop("request_id")
    assert begun == {
        "type": "video.start",
        "format": "m4s",
        "config": {
            "model": "tiny", "preset": "tiny", "width": 48, "height": 32, "fps": 16.0, "num_frames": 21, "chunks": 2,
            "max_frames": 21, "chunk_latent_frames": 3, "num_inference_steps": 4, "guidance_scale": 1.0,
            "flow_shift": 1.5, "seed": 5, "translation_unit": 0.05, "translation_unit_rule": "key",
            "first_delta": "from_rest", "intrinsics": begun["config"]["intrinsics"], "camera": None,
        },
        "warnings": ["unknown field ignored: colour", "unknown field ignored: extra_params.lora"],
    }  # fmt: skip
    metadata = [dict(message) for message, _ in peer.chunks]
    assert all(stages.pop("stage_durations")["denoise"] > 0 for stages in metadata)
    assert metadata == [
        {
            "type": "video.chunk_metadata", "request_id": request, "kind": "media", "transport_chunk_index": index,
            "generation_chunk_index": index, "num_frames": frames, "byte_length": len(peer.chunks[index][1]),
            "started_event_ids": [], "active_event_ids": [], "completed_event_ids": [],
        }
        for index, frames in enumerate((9, 12))
    ]  # fmt: skip
    assert done == {
        "type": "session.done",
        "request_id": request,
        "chunks": 2,
        "reason": "completed",
        "stopped": False,
    }
    assert close == (1000, "the video ended")
    assert frames_of(peer.video).shape == (21, 32, 48, 3)
    assert frames_of(peer.chunks[0][1]).shape == (9, 32, 48, 3)


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        ("{", "malformed_payload", "not valid JSON"),
        ("[" * 5000, "malformed_payload", "JSON|deep"),
        ('{"type": "session.ping", "type": "session.stop"}', "malformed_payload", "'type' twice"),
        ({"kind": "session.ping"}, "missing_field", "no type"),
        ({"type": "session.dance"}, "malformed_payload", "type 'session.dance' is unknown"),
        (STOP, "out_of_order", "session.stop came before"),
        (interaction({"prompt": "x"}), "out_of_order", "session.interaction came before"),
        (start(prompt=None), "missing_field", "needs prompt"),
        (start(num_inference_steps=50), "unsupported", "num_inference_steps=50"),
        (start(extra_params={"action_path": "walk"}), "unsupported", "without a folder for it"),
        (start(extra_params={"translation_unit": "clip"}), "bad_camera", "needs a camera path"),
        (start(extra_params={"translation_unit": "far"}), "bad_camera", "'far' is unknown"),
        (
            start(image_reference={"image_url": "https://example.com/a.png"}),
            "malformed_payload",
            "image_reference.image_url is a URL of the web, which this server does not fetch",
        ),
        (start(image_reference={"image_url": "/etc/passwd"}), "malformed_payload", "no data: URL"),
        (
            start(image_reference={"image_url": data_url(b"no picture")}),
            "malformed_payload",
            "image_reference.image_url is in no known format",
        ),
        (
            start(image_reference={"image_url": data_url(PICTURE[:-40])}),
            "malformed_payload",
            "cut off",
        ),
    ],
)
def test_what_is_refused_leaves_the_connection_open_and_nothing_behind(host, message, code, words):
    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            error = await peer.ask(message)
            assert (len(at.service.residents), len(host.registry._living)) == (0, 0)
            assert at.service.metrics.count("errors_total", code=code) == 1
            assert (await peer.ask(PING))["type"] == "session.pong"
            await peer.send(start(num_frames=9))
            await peer.until("session.done", chunks=1, reason="completed")
            return error

    error = run(scenario())
    assert (error["type"], error["code"]) == ("error", code)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(error["message"])


def test_binary_frames_are_refused_before_and_after_the_start(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            await peer.socket.send_bytes(b"\x82")
            first = await peer.get()
            await peer.send(start(num_frames=21))
            await peer.until("video.start")
            await peer.socket.send_bytes(b"{}")
            second = await peer.until("error")
            await peer.until("session.done", chunks=2)
            return first, second

    for error in run(scenario()):
        assert (error["code"], error["message"]) == (
            "malformed_payload",
            "this socket takes JSON in text frames, no binary frames",
        )


def test_a_session_is_started_once(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            await peer.send(start(num_frames=21))
            await peer.send(start(num_frames=9))
            error = await peer.until("error")
            await peer.until("session.done", chunks=2)
            return error

    error = run(scenario())
    assert (error["code"], error["event_id"]) == ("out_of_order", None)


def test_messages_after_the_start_are_bounded(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            await peer.send(start())
            await peer.until("video.start")
            await peer.send(interaction({"prompt": "x" * 200_000}, event_id="e"))
            error = await peer.until("error")
            await peer.send(STOP)
            await peer.until("session.done")
            return error

    assert "at most 131072 are read after the start" in run(scenario())["message"]


def test_while_the_model_loads_a_start_is_told_so(host):
    async def scenario():
        async with video_server() as at, at.peer() as peer:
            first = await peer.ask(start(num_frames=9))
            pong = await peer.ask(PING)
            worker = ThreadWorker()
            at.service.open(host, worker)
            await peer.send(start(num_frames=9))
            await peer.until("session.done", chunks=1)
            await at.service.close()
            worker.close()
            return first, pong

    first, pong = run(scenario())
    assert (first["type"], first["code"], pong["type"]) == ("error", "loading", "session.pong")


def test_a_connection_without_a_start_is_closed_after_its_time(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer(HURRIED) as peer:
            for _ in range(4):  # whoever says something is not forgotten
                await asyncio.sleep(0.2)
                assert (await peer.ask(PING))["type"] == "session.pong"
            return await peer.get(), await peer.closed()

    error, close = run(scenario())
    assert (error["code"], error["message"]) == ("start_timeout", "no session.start within 0.5 seconds")
    assert close == (1011, "no session.start within 0.5 seconds")


def test_a_stall_is_reported_a_ping_puts_it_off_and_the_work_goes_on(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer(HURRIED) as peer:
            host.gate.clear()
            await peer.send(start(num_frames=9))
            await peer.until("video.start")
            for _ in range(4):
                await asyncio.sleep(0.2)
                assert (await peer.ask(PING))["type"] == "session.pong"
            stalled = await peer.get()
            host.gate.set()
            await peer.until("session.done", chunks=1, reason="completed")
            return stalled

    error = run(scenario())
    assert (error["code"], error["event_id"]) == ("stalled", None)
    assert error["message"] == "no chunk and no ping for 0.5 seconds; the work goes on"


def test_pings_and_interactions_are_answered_while_a_chunk_runs(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            host.gate.clear()
            await peer.send(start(num_frames=9))
            await peer.until("video.start")
            await at.becomes_true(host.entered.is_set)
            pong = await peer.ask(PING)
            queued = await peer.ask(interaction({"prompt": "snow"}, event_id="e"))
            assert peer.chunks == []
            host.gate.set()
            await peer.until("session.done", chunks=1)
            return pong, queued

    pong, queued = run(scenario())
    assert pong == {"type": "session.pong"}
    assert (queued["type"], queued["event_id"]) == ("session.interaction.queued", "e")


# Interactions


def test_an_interaction_takes_effect_at_the_next_chunk_and_its_metadata_say_so(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            await peer.send(start(num_frames=45))
            await peer.until("video.start")
            await at.becomes_true(host.entered.is_set)
            await peer.send(interaction({"prompt": "snow", **camera("velocity", (0, 0, 0.05))}, event_id="e"))
            await peer.until("session.done")
            return peer

    peer = run(scenario())
    active = [message["active_event_ids"] for message, _ in peer.chunks]
    assert active == [[], ["e"], ["e"], ["e"]]
    assert [message["started_event_ids"] for message, _ in peer.chunks] == [[], ["e"], [], []]
    (history,) = host.seen
    assert [chunk.prompt for chunk in history.chunks] == ["a sunny day", "snow", "snow", "snow"]
    steps = [chunk.controls.relative for chunk in history.chunks]
    assert np.array_equal(steps[0], np.tile(np.eye(4), (3, 1, 1)))
    assert all(step[:, :3, 3] == pytest.approx(np.tile([0, 0, 1], (3, 1)), abs=1e-12) for step in steps[1:])


def test_an_interaction_that_comes_with_the_start_steers_the_first_chunk(host):
    async def scenario():
        async with video_server(host=host) as at:
            return await watch(at, start(num_frames=9), interaction(camera("velocity", (0.05, 0, 0)), event_id="e"))

    peer = run(scenario())
    assert peer.chunks[0][0]["active_event_ids"] == ["e"]
    assert host.seen[0].chunks[0].controls.relative[0, 0, 3] == pytest.approx(1)


@pytest.mark.parametrize(("chunks", "translation"), [(2, (0.3, -0.1, 0.2)), (0, (0, 0, 5)), (None, (1, 0, 0))])
def test_a_target_is_reached_exactly(host, chunks, translation):
    rotation = (0, 0.5, 0, 3**0.5 / 2)  # 60 degrees about +Y

    async def scenario():
        async with video_server(host=host) as at:
            event = camera(None, translation, rotation)
            fields = {} if chunks is None else {"transition_chunks": chunks}
            return await watch(at, start(num_frames=33), interaction(event, event_id="t", **fields))

    peer = run(scenario())
    expected = np.eye(4)
    expected[:3, :3] = [[0.5, 0, 3**0.5 / 2], [0, 1, 0], [-(3**0.5) / 2, 0, 0.5]]
    expected[:3, 3] = translation
    after = [chunk.controls.pose_after for chunk in host.seen[0].chunks]
    reached = chunks or 1
    for pose in after[reached - 1 :]:
        assert pose == pytest.approx(expected, abs=1e-14)
    assert [message["completed_event_ids"] for message, _ in peer.chunks] == [
        ["t"] if index == reached - 1 else [] for index in range(3)
    ]


def test_what_cannot_be_is_rejected_later_by_its_id_which_may_be_used_again(host):
    host.unsayable = {"unsayable"}

    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            await peer.send(start())
            await peer.send(interaction(camera("velocity", (0, 0, 0.05)), event_id="v"))
            await peer.until("video.chunk_metadata", generation_chunk_index=0)
            await peer.send(interaction({"prompt": "unsayable", **camera("velocity")}, event_id="e"))
            first = await peer.until("error")
            await peer.send(interaction(camera("velocity", (9e8, 0, 0)), event_id="e"))
            second = await peer.until("error")
            await peer.send(interaction({"prompt": "snow"}, event_id="e"))
            await peer.until("video.chunk_metadata", started_event_ids=["e"])
            await peer.send(STOP)
            await peer.until("session.done")
            return peer, first, second

    peer, first, second = run(scenario())
    assert (first["code"], first["event_id"]) == ("interaction_failed", "e")
    assert "unsayable cannot be said" in first["message"]
    assert (second["code"], second["event_id"]) == ("interaction_failed", "e")
    assert "farther than" in second["message"]
    (history,) = host.seen
    # Neither of the two left a trace: the camera goes on as before, and so does the prompt until the third one.
    steps = np.concatenate([chunk.controls.relative for chunk in history.chunks])
    assert steps[:, :3, 3] == pytest.approx(np.tile([0, 0, 1], (len(steps), 1)), abs=1e-12)
    assert {chunk.prompt for chunk in history.chunks} == {"a sunny day", "snow"}
    begun = [message["started_event_ids"] for message, _ in peer.chunks]
    assert [ids for ids in begun if ids] == [["v"], ["e"]]
    assert all("v" in message["active_event_ids"] for message, _ in peer.chunks)


def test_a_bad_interaction_is_answered_with_its_id_and_ends_nothing(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            await peer.send(start(num_frames=21))
            errors = []
            for message in (
                interaction({}, event_id="e"),
                interaction(camera("fly"), event_id="e"),
                interaction({"prompt": "snow"}, event_id="e"),
                interaction({"prompt": "snow"}, event_id="e"),
            ):
                await peer.send(message)
            while len(errors) < 3:
                errors.append(await peer.until("error"))
            await peer.until("session.done", chunks=2)
            return errors, peer

    errors, peer = run(scenario())
    assert [error["code"] for error in errors] == ["missing_field", "bad_camera", "event_id_conflict"]
    assert {error["event_id"] for error in errors} == {"e"}
    assert sum(event["type"] == "session.interaction.queued" for event in peer.events) == 1


def test_unknown_fields_of_interactions_and_idle_transitions_are_reported_once(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            await peer.send(start(num_frames=21))
            await peer.until("video.start")
            event = {**camera("velocity"), "mood": 1}
            for name in ("a", "b"):
                await peer.send(interaction(event, event_id=name, transition_chunks=2 if name == "a" else 0))
            await peer.until("session.done")
            return {event["event_id"]: event.get("warnings") for event in peer.events if "queued" in event["type"]}

    assert run(scenario()) == {
        "a": [
            "unknown field ignored: event.mood",
            "transition_chunks means nothing for a velocity, which holds at once",
        ],
        "b": None,
    }


def test_a_flood_of_interactions_is_bounded_and_each_is_answered(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            host.gate.clear()
            await peer.send(start(num_frames=9))
            await peer.until("video.start")
            answers = [await peer.ask(interaction({"prompt": str(index)}, event_id=str(index))) for index in range(80)]
            host.gate.set()
            await peer.until("session.done", chunks=1)
            return answers

    answers = run(scenario())
    assert {answer["type"] for answer in answers[:60]} == {"session.interaction.queued"}
    assert all(answer["code"] == "session_busy" and answer["event_id"] for answer in answers[-10:])


class Acting(Watched):
    """A host whose model is steered by actions; it has no text encoder, so that states are given."""

    def begin(self, beginning):
        return super().begin(replace(beginning, settings={**beginning.settings, "prompt_states": prompt_states(0)}))

    def encode(self, prompts):
        return {prompt: prompt_states(1) for prompt in prompts}


def test_a_model_that_is_steered_by_actions_takes_scripts_and_prompts_and_rejects_cameras(act_world):
    host = Acting(act_world)
    sizes = {"width": 32, "height": 16}

    async def scenario():
        async with video_server(host=host) as at:
            scripted = await watch(at, start(**sizes, extra_params={"camera_action_script": WALK}))
            async with at.peer() as peer:
                begun = await peer.ask(start(**sizes))
                await peer.send(interaction({"prompt": "snow"}, event_id="p"))
                await peer.send(interaction(camera("velocity"), event_id="v"))
                error = await peer.until("error")
                await peer.until("video.chunk_metadata", started_event_ids=["p"])
                await peer.send(STOP)
                await peer.until("session.done")
            return scripted, begun["config"], error

    _, config, error = run(scenario())
    assert (error["code"], error["event_id"]) == ("interaction_failed", "v")
    assert "steered by actions" in error["message"]
    # Attention sees all of the past here, so that an endless session is short.
    assert (config["num_frames"], config["max_frames"]) == (None, 957)
    scripted, free = host.seen
    assert np.concatenate([chunk.controls.actions for chunk in scripted.chunks])[:6].tolist() == [
        [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1],
    ]  # fmt: skip
    assert not any(chunk.controls.actions.any() for chunk in free.chunks)
    assert free.chunks[-1].prompt == "snow"


DIRECTIONS = {
    "l": camera("velocity", rotation=(0, np.sin(np.radians(3)), 0, np.cos(np.radians(3)))),
    "d": camera("velocity", (0.05, 0, 0)),
    "i": camera("velocity", rotation=(np.sin(np.radians(2)), 0, 0, np.cos(np.radians(2)))),
}


@pytest.mark.parametrize("key", DIRECTIONS)
def test_the_picture_of_a_velocity_moves_as_that_of_its_key(tiny_world, key):
    from training.measures import agrees, along_key, global_motion

    picture = (EXAMPLES / "lingbot_tiny_day.png").read_bytes()
    message = start(
        image_reference={"image_url": data_url(picture)}, width=160, height=96, num_frames=33
    )  # fmt: skip

    async def scenario():
        async with video_server(tiny_world) as at:
            return await watch(at, message, interaction(DIRECTIONS[key], event_id=key))

    frames = frames_of(run(scenario()).video)
    motion = global_motion(torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255)
    halves = [along_key(motion[begin : begin + 8], key, 160) for begin in (8, 16, 24)]
    assert all(agrees(distance) for distance in halves), halves


# Noise


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_noise_is_answered_and_the_connection_goes_on(host, seed):
    pick = random.Random(seed)

    async def scenario():
        async with video_server(host=host) as at:
            kinds = Counter()
            for _ in range(12):
                kinds += await hostile_visit(at, pick, 25)
            await at.becomes_true(lambda: left_nothing(at, host))
            assert at.service.metrics.count("errors_total", code="internal") == 0
            return kinds, await watch(at, start(num_frames=9))

    kinds, peer = run(scenario())
    assert {"malformed_payload", "out_of_order", "session.interaction.queued"} <= set(kinds)
    assert len(peer.chunks) == 1


# What is made


def offline(world, route, **settings):
    """A session that the same route drives: latents of each chunk, and the mp4."""
    picture = prepare_image(PICTURE, size=(32, 48), mode="crop")
    unit, rule = route.translation_unit()
    session = WorldSession.start(
        world, picture, "a sunny day", translation_unit=unit, unit_rule=rule, first_delta=route.first_delta,
        intrinsics=route.intrinsics(picture), **settings,
    )  # fmt: skip
    writer = FragmentWriter(width=48, height=32, fps=16)
    latents, video = [], b""
    for controls in route.controls(session, picture, act=False):
        chunk = session.advance(controls)
        latents.append(chunk.latents)
        video += writer.push(frames_to_uint8(chunk.frames))
    return latents, video, session.history.start


def test_a_script_makes_what_an_offline_session_makes_bit_for_bit(host, tiny_world):
    lines = [json.dumps({"event_id": index, "frames": row}) for index, row in enumerate(WALK)]
    latents, video, begun = offline(tiny_world, route_from_events("\n".join(lines), tiny_world.preset), seed=3)

    async def scenario():
        async with video_server(host=host) as at:
            return await watch(at, start(num_frames=33, seed=3, extra_params={"camera_action_script": WALK}))

    peer = run(scenario())
    (history,) = host.seen
    assert history.start == begun
    assert all(torch.equal(chunk.latents, same) for chunk, same in zip(history.chunks, latents, strict=True))
    assert peer.video == video
    assert [chunk.controls.keys for chunk in history.chunks] == [("w", "w", "jw"), ("j", "", "d"), ("i", "ik", "l")]
    config = peer.events[0]["config"]
    assert (config["camera"], config["translation_unit_rule"], config["first_delta"]) == (
        "camera_action_script", "key", "from_rest",
    )  # fmt: skip


def test_an_interaction_takes_the_camera_from_a_script_for_good(host):
    async def scenario():
        async with video_server(host=host) as at:
            message = start(extra_params={"camera_action_script": [[["w"]] * 3] * 3})
            return await watch(at, message, interaction(camera("target", (0, 0, 0)), event_id="back"))

    run(scenario())
    (history,) = host.seen
    assert [chunk.controls.keys for chunk in history.chunks] == [None] * 3
    assert all(np.array_equal(chunk.controls.pose_after, np.eye(4)) for chunk in history.chunks)


def test_action_path_makes_what_the_offline_run_of_those_files_makes(host, tiny_world):
    path = load_camera(EXAMPLES / "04")
    route = route_from_camera(path, tiny_world.preset, num_frames=33)
    latents, video, begun = offline(tiny_world, route)

    async def scenario():
        async with video_server(host=host, trusted=EXAMPLES) as at:
            return await watch(at, start(num_frames=33, extra_params={"action_path": "04"}))

    peer = run(scenario())
    (history,) = host.seen
    assert history.start == begun
    assert all(torch.equal(chunk.latents, same) for chunk, same in zip(history.chunks, latents, strict=True))
    assert peer.video == video
    assert peer.events[0]["config"]["translation_unit_rule"] == "clip"


def test_a_target_is_relative_to_where_a_path_begins(host, tmp_path):
    poses = np.tile(np.eye(4), (33, 1, 1))
    poses[:, 0, 3] = 5 + np.arange(33)
    (tmp_path / "walk").mkdir()
    np.save(tmp_path / "walk" / "poses.npy", poses)

    async def scenario():
        async with video_server(host=host, trusted=tmp_path) as at:
            message = start(extra_params={"action_path": "walk", "translation_unit": 1})
            await watch(at, message, interaction(camera("target", (0, 0, 3)), event_id="t"))
            await watch(at, message)

    run(scenario())
    taken, alone = host.seen
    steps = taken.chunks[0].controls.relative[:, :3, 3]
    assert steps == pytest.approx(np.array([[0, 0, 0], [0, 0, 1], [0, 0, 1]]))
    assert taken.chunks[0].controls.pose_after[:3, 3].tolist() == [5, 0, 3]
    assert alone.chunks[0].controls.pose_after[:3, 3].tolist() == [13, 0, 0]


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ("../outside", "unsupported", "is refused"),
        ("walk/../../outside", "unsupported", "is refused"),
        ("ABSOLUTE", "unsupported", "is refused"),
        ("link", "unsupported", "is refused"),
        ("link/inside", "unsupported", "is refused"),
        ("poisoned", "unsupported", "is refused"),
        ("walk\0", "unsupported", "is refused"),
        ("", "unsupported", "is refused"),
        (".", "unsupported", "is refused"),
        ("x" * 1000, "unsupported", "is refused"),
        ("..\\outside", "unsupported", "is refused"),
        ("nowhere", "bad_camera", "does not exist"),
        ("empty", "bad_camera", "empty/poses.npy does not exist"),
        ("short", "unsupported", "action_path: .* shorter than one chunk"),
    ],
)
def test_action_path_leads_nowhere_but_below_its_folder(host, tmp_path, given, code, words):
    trusted, outside = tmp_path / "trusted", tmp_path / "outside"
    poses = np.tile(np.eye(4), (9, 1, 1))
    for folder in (outside, outside / "inside", trusted / "walk", trusted / "short", trusted / "poisoned"):
        folder.mkdir(parents=True)
        np.save(folder / "poses.npy", poses[:5] if folder.name == "short" else poses)
    (trusted / "empty").mkdir()
    (trusted / "link").symlink_to(outside)
    (trusted / "poisoned" / "poses.npy").unlink()
    (trusted / "poisoned" / "poses.npy").symlink_to(outside / "poses.npy")
    given = str(outside) if given == "ABSOLUTE" else given

    async def scenario():
        async with video_server(host=host, trusted=trusted) as at, at.peer() as peer:
            error = await peer.ask(start(extra_params={"action_path": given}))
            await peer.send(start(extra_params={"action_path": "walk"}))
            await peer.until("session.done", chunks=1)
            return error

    error = run(scenario())
    assert (error["type"], error["code"]) == ("error", code)
    assert str(tmp_path) not in error["message"] or given == str(outside)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(error["message"])


def test_four_videos_at_once_are_each_as_if_alone(host):
    messages = [start(num_frames=33, seed=seed, extra_params={"camera_action_script": WALK}) for seed in range(4)]

    async def alone():
        async with video_server(host=host) as at:
            return [(await watch(at, message)).video for message in messages]

    async def together():
        # Two stay awake: the others come back from their history for every chunk.
        async with video_server(host=host, awake=2) as at:
            peers = await asyncio.gather(*(watch(at, message) for message in messages))
            return [peer.video for peer in peers]

    videos = run(alone())
    assert len(set(videos)) == 4
    assert run(together()) == videos


def test_a_camera_and_a_video_socket_share_one_world(host):
    poses = np.tile(np.eye(4), (9, 1, 1))
    poses[:, 2, 3] = np.arange(9)
    infer = {
        "session_id": "s", "image": PICTURE, "prompt": "a rainy day",
        "cameras": {"poses": poses, "intrinsics": np.array([[500.0, 500, 416, 240]] * 9)},
        "extra_body": {"height": 32, "width": 48, "frames_per_chunk": 100},
    }  # fmt: skip
    message = start(num_frames=45, extra_params={"camera_action_script": [*WALK, WALK[0]]})

    async def frames(at):
        async with at.client.ws_connect(at.server.make_url(CAMERA), max_msg_size=0) as socket:
            await socket.receive()
            out = []
            for _ in range(3):
                await socket.send_bytes(pack(infer))
                out.append(unpack((await socket.receive()).data)["video"])
            return np.concatenate(out)

    async def scenario():
        async with video_server(host=host) as at:
            apart = (await watch(at, message)).video, await frames(at)
        async with video_server(host=host) as at:
            peer, seen = await asyncio.gather(watch(at, message), frames(at))
            return apart, (peer.video, seen)

    apart, together = run(scenario())
    assert together[0] == apart[0]
    assert np.array_equal(together[1], apart[1])
    assert apart[1].shape == (33, 32, 48, 3)


# How it ends


def test_a_session_without_an_end_goes_on_until_it_is_stopped(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            begun = await peer.ask(start())
            await peer.until("video.chunk_metadata", generation_chunk_index=3)
            await peer.send(STOP)
            done = await peer.until("session.done")
            return begun["config"], done, await peer.closed(), len(peer.chunks)

    config, done, close, chunks = run(scenario())
    assert (config["num_frames"], config["chunks"], config["max_frames"]) == (None, None, 57_597)
    assert (done["reason"], done["stopped"], done["chunks"]) == ("stopped", True, chunks)
    assert chunks >= 4
    assert close[0] == 1000


def test_a_session_without_an_end_has_a_bound(host, monkeypatch):
    monkeypatch.setattr("lingbot_core.realtime.video_session.ENDLESS_FRAMES", 21)

    async def scenario():
        async with video_server(host=host) as at:
            return await watch(at, start())

    peer = run(scenario())
    assert (peer.events[-1]["reason"], peer.events[-1]["chunks"]) == ("limit", 2)


def test_a_chunk_that_is_running_is_given_up_when_the_session_is_stopped(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            host.gate.clear()
            await peer.send(start())
            await peer.until("video.start")
            await at.becomes_true(host.entered.is_set)
            await peer.ask(PING)
            await peer.send(STOP)
            await asyncio.sleep(0.1)
            host.gate.set()
            return await peer.until("session.done")

    assert run(scenario())["chunks"] == 0
    assert len(host.seen[0]) == 0


def test_only_a_few_chunks_are_made_ahead_of_the_reader(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            await peer.send(start(num_frames=117))
            made = lambda: at.service.metrics.count("chunks_total")  # noqa: E731
            await at.becomes_true(lambda: made() >= AHEAD)
            await asyncio.sleep(2)  # eight more would have been made by now
            waiting = made()
            await peer.until("session.done", chunks=10, reason="completed")
            return waiting, peer

    waiting, peer = run(scenario())
    assert waiting == AHEAD
    assert len(frames_of(peer.video)) == 117


def test_whoever_reads_nothing_is_let_go(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer(HURRIED) as peer:
            await peer.send(start())
            await at.becomes_true(lambda: len(host.registry._living) == 1)
            await at.becomes_true(lambda: len(at.service.residents) == 0 and not host.registry._living)
            return at.service.metrics.count("chunks_total")

    assert run(scenario()) == AHEAD


@pytest.mark.parametrize("when", ["beginning", "running"])
def test_a_client_that_vanishes_leaves_nothing_behind(host, when):
    async def scenario():
        async with video_server(host=host, timeout=300) as at:
            async with at.peer() as peer:
                await peer.send(start())
                if when == "running":
                    await peer.until("video.chunk_metadata")
                peer.socket._response.connection.transport.abort()
            await at.becomes_true(lambda: at.service.connections == 0)
            assert left_nothing(at, host)
            await watch(at, start(num_frames=9))

    run(scenario())


def test_a_client_that_is_killed_leaves_nothing_behind(host):
    client = textwrap.dedent(
        """
        import asyncio, sys, aiohttp
        async def main():
            async with aiohttp.ClientSession() as session, session.ws_connect(sys.argv[1]) as socket:
                await socket.send_str(sys.stdin.read())
                async for message in socket:
                    print(message.type.name, flush=True)
        asyncio.run(main())
        """
    )

    async def scenario():
        async with video_server(host=host) as at:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", client, str(at.server.make_url(VIDEO)),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(start()).encode())
            process.stdin.close()
            while (await process.stdout.readline()).strip() != b"BINARY":
                pass
            assert len(at.service.residents) == 1
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            await at.becomes_true(lambda: left_nothing(at, host))

    run(scenario())


def test_what_fails_inside_is_said_and_closes_the_connection(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            await peer.send(start())
            await peer.until("video.chunk_metadata")
            host.broken = True
            error = await peer.until("error")
            close = await peer.closed()
            host.broken = False
            await at.becomes_true(lambda: left_nothing(at, host))
            await watch(at, start(num_frames=9))
            return error, close

    error, close = run(scenario())
    assert (error["code"], error["message"]) == ("internal", "something failed inside the server (RuntimeError)")
    assert close == (1011, "the session failed and cannot go on")


def test_when_the_world_is_no_longer_served_its_videos_end(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            await peer.send(start())
            await peer.until("video.chunk_metadata")
            await at.service.close()
            return await peer.until("session.done"), await peer.closed()

    done, close = run(scenario())
    assert (done["reason"], done["stopped"]) == ("closed", True)
    assert close[0] == 1000


def test_whoever_reads_the_end_late_gets_it_whole(host):
    async def scenario():
        async with video_server(host=host) as at, at.peer() as peer:
            await peer.send(start(num_frames=33))
            await at.becomes_true(lambda: len(host.seen) == 1)
            await asyncio.sleep(0.5)
            await peer.until("session.done", chunks=3, reason="completed")
            return peer, await peer.closed()

    peer, close = run(scenario())
    assert len(frames_of(peer.video)) == 33
    assert close == (1000, "the video ended")


def test_more_sessions_than_the_server_takes_are_told_to_wait(host):
    async def scenario():
        async with video_server(host=host, known=1) as at, at.peer() as one, at.peer() as other:
            await one.send(start())
            await one.until("video.start")
            refused = await other.ask(start())
            await one.send(STOP)
            await one.until("session.done")
            await at.becomes_true(lambda: len(at.service.residents) == 0)
            await other.send(start(num_frames=9))
            await other.until("session.done", chunks=1)
            return refused

    assert run(scenario())["code"] == "session_busy"


def test_the_socket_answers_pings_of_its_own_kind(host):
    async def scenario():
        async with video_server(host=host) as at:
            url = at.server.make_url(VIDEO)
            async with at.client.ws_connect(url, autoping=False) as socket:
                await socket.ping(b"there?")
                return await socket.receive(timeout=10)

    answer = run(scenario())
    assert (answer.type, bytes(answer.data)) == (WSMsgType.PONG, b"there?")


def test_the_client_of_this_library_drives_it(host):
    events = []

    async def drive(client: VideoClient):
        with pytest.raises(ServerError, match="num_inference_steps") as refused:
            await client.start("a sunny day", image=PICTURE, width=48, height=32, num_inference_steps=9)
        begun = await client.start("a sunny day", image=PICTURE, width=48, height=32)
        await client.interact(velocity=key_velocity("w"), event_id="w")
        await client.interact(velocity=key_velocity("w"), event_id="w")
        await client.ping()
        chunks = []
        async for metadata, fragment in client.chunks():
            chunks.append((metadata, fragment))
            if len(chunks) == 2:
                await client.interact(prompt="snow", target=np.eye(4), event_id="back")
            if metadata["completed_event_ids"] == ["back"]:
                await client.stop()
        return refused.value.code, begun, chunks, client.done

    async def scenario():
        async with (
            video_server(host=host) as at,
            VideoClient(str(at.server.make_url("/")), on_event=events.append) as client,
        ):
            return await drive(client)

    code, begun, chunks, done = run(scenario())
    assert (code, begun["format"], done["reason"]) == ("unsupported", "m4s", "stopped")
    kinds = [event.get("code", event["type"]) for event in events]
    assert sorted(kinds) == ["event_id_conflict", *["session.interaction.queued"] * 2, "session.pong"]
    assert len(frames_of(b"".join(fragment for _, fragment in chunks))) == 12 * len(chunks) - 3
    poses = [chunk.controls.pose_after for chunk in host.seen[0].chunks]
    assert poses[1][2, 3] > 0.1
    assert any(np.array_equal(pose, np.eye(4)) for pose in poses[2:])


def test_a_picture_of_another_shape_decides_the_size_where_none_is_named(host):
    message = start(
        width=None, height=None, num_frames=9, image_reference={"image_url": data_url(noise_picture(64, 64))}
    )

    async def scenario():
        async with video_server(host=host) as at:
            return await watch(at, message)

    peer = run(scenario())
    config = peer.events[0]["config"]
    assert (config["width"], config["height"]) == (112, 112)
    assert frames_of(peer.video).shape == (9, 112, 112, 3)
