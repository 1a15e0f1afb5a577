"""The scripts of examples/realtime against a server that answers each infer with real fragments."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import msgpack
import numpy as np
import pytest
from socket_stub import Peer, SocketStub
from video_file import read_video

from lingbot_core.engine.fragments import FragmentWriter

ROOT = Path(__file__).resolve().parents[3]
PATH = "/v1/realtime/world/camera"


def as_numpy(value: dict[bytes, object]) -> np.ndarray:
    return np.frombuffer(value[b"data"], dtype=value[b"dtype"]).reshape(value[b"shape"])


class World:
    """A stand-in world: 9 frames, then 12 for every infer, each chunk in its own grey. ``asked`` are the infers."""

    def __init__(self, gone_after: int | None = None) -> None:
        self.asked: list[dict] = []
        self.gone_after = gone_after

    async def talk(self, peer: Peer) -> None:
        await peer.send(msgpack.packb({"chunk_latent_frames": 3}))
        writer, count = FragmentWriter(width=32, height=16, fps=16), 0
        while True:
            message = await peer.receive()
            request = msgpack.unpackb(message, strict_map_key=False)
            if request["endpoint"] == "reset":
                writer, count = FragmentWriter(width=32, height=16, fps=16), 0
                await peer.send(msgpack.packb({"type": "reset_ok", "session_id": request["session_id"]}))
                continue
            if count == self.gone_after:
                peer.vanish()
                return
            self.asked.append(request)
            video = writer.push(np.full((9 if count == 0 else 12, 16, 32, 3), 5 * (count % 50), np.uint8))
            answer = {"type": "frame", "chunk_id": count, "index": 0, "total": 1, "video": video}
            await peer.send(msgpack.packb(answer))
            count += 1


def run(script: str, *arguments: str | Path, code: int = 0) -> str:
    command = [sys.executable, str(ROOT / "examples" / "realtime" / script), *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_example_04_is_replayed_to_the_end_and_its_fragments_join_to_the_same_video(tmp_path):
    world = World()
    output, parts, joined = tmp_path / "replay.mp4", tmp_path / "parts", tmp_path / "joined.mp4"
    folder = ROOT / "examples" / "04"
    with SocketStub({PATH: world.talk}) as stub:
        printed = run(
            "replay_poses.py", folder, "--server", stub.url, "--output", output, "--fragments", parts, "--seed", "7"
        )

    assert "533 poses: 44 infers of 9 and then 12 poses" in printed
    assert "8 poses left over" in printed
    assert "525 frames, 32 x 16, 16 per second" in printed
    assert len(read_video(output).frames) == 525
    poses, lenses = np.load(folder / "poses.npy"), np.load(folder / "intrinsics.npy")
    sent = np.concatenate([as_numpy(request["cameras"]["poses"]) for request in world.asked])
    # The file is float32; a rotation that is off by more than rounding would have been repaired.
    np.testing.assert_allclose(sent, poses[:525], rtol=0, atol=1e-6)
    assert np.array_equal(
        np.concatenate([as_numpy(request["cameras"]["intrinsics"]) for request in world.asked]), lenses[:525]
    )
    assert world.asked[0]["image"] == (folder / "image.jpg").read_bytes()
    assert world.asked[0]["prompt"] == (folder / "prompt.txt").read_text(encoding="utf-8").strip()
    assert not any("image" in request for request in world.asked[1:])
    longest = np.linalg.norm(np.diff(poses[:525:4, :3, 3].astype(np.float64), axis=0), axis=1).max()
    for request in world.asked:
        assert request["extra_body"] == {
            "translation_unit": pytest.approx(longest, rel=1e-6),
            "first_delta": "identity",
            "seed": 7,
        }

    assert len(list(parts.iterdir())) == 44
    assert "525 frames of 44 fragments" in run("join_fragments.py", parts, "--output", joined)
    assert joined.read_bytes() == output.read_bytes()


def test_a_replay_can_end_early_and_its_unit_is_that_of_the_poses_it_used(tmp_path):
    world, output = World(), tmp_path / "replay.mp4"
    with SocketStub({PATH: world.talk}) as stub:
        printed = run(
            "replay_poses.py", ROOT / "examples" / "04", "--server", stub.url, "--output", output, "--infers", "2"
        )
    assert "21 frames" in printed
    positions = np.load(ROOT / "examples" / "04" / "poses.npy")[:21:4, :3, 3].astype(np.float64)
    longest = np.linalg.norm(np.diff(positions, axis=0), axis=1).max()
    assert world.asked[1]["extra_body"]["translation_unit"] == pytest.approx(longest, rel=1e-6)


def test_a_replay_whose_server_vanishes_keeps_what_it_has(tmp_path):
    output = tmp_path / "replay.mp4"
    with SocketStub({PATH: World(gone_after=3).talk}) as stub:
        printed = run("replay_poses.py", ROOT / "examples" / "03", "--server", stub.url, "--output", output, code=1)
    assert "is gone" in printed
    assert "Traceback" not in printed
    assert len(read_video(output).frames) == 9 + 12 + 12


def test_keys_become_poses_that_move_and_turn(tmp_path):
    world, output = World(), tmp_path / "keys.mp4"
    image = ROOT / "examples" / "tiny" / "day.png"
    with SocketStub({PATH: world.talk}) as stub:
        printed = run(
            "drive_keys.py", "w-2,wl-3", "--image", image, "--prompt", "hills", "--server", stub.url, "--output", output
        )

    assert "chunk 0: w w lw" in printed
    assert "chunk 1: lw lw none" in printed
    assert "21 frames" in printed
    first, second = (as_numpy(request["cameras"]["poses"]) for request in world.asked)
    poses = np.concatenate([first, second])
    assert len(poses) == 6
    # w: 0.05 along +Z a latent frame; l: 6 degrees towards +X, before the step.
    np.testing.assert_allclose(poses[:2, 2, 3], [0.05, 0.10], rtol=1e-5)
    headings = np.degrees(np.arctan2(poses[:, 0, 2], poses[:, 2, 2]))
    np.testing.assert_allclose(headings, [0, 0, 6, 12, 18, 18], atol=1e-9)
    assert poses[2, 0, 3] == pytest.approx(0.05 * math.sin(math.radians(6)), rel=1e-5)
    assert np.array_equal(poses[4], poses[5])
    assert world.asked[0]["extra_body"]["first_delta"] == "from_rest"
    assert world.asked[0]["extra_body"]["translation_unit"] == 0.05
    assert world.asked[0]["image"] == image.read_bytes()


def test_joining_an_empty_folder_is_an_error_in_one_line(tmp_path):
    printed = run("join_fragments.py", tmp_path, "--output", tmp_path / "x.mp4", code=1)
    assert "there are no fragments" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("script", ["replay_poses.py", "drive_keys.py", "join_fragments.py"])
def test_every_script_has_help(script):
    assert "--output" in run(script, "--help")
