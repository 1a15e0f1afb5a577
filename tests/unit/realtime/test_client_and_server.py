"""The clients against the server as a process: the examples, a killed server, the code of docs/realtime.md."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from serve_process import ServeProcess
from socket_stub import Peer, SocketStub
from video_file import read_video

from lingbot_core.cli import build_parser
from lingbot_core.engine.fragments import FragmentWriter
from lingbot_core.realtime.client import ServerError, ServerGoneError, SyncCameraClient, clip_maximum, slices

ROOT = Path(__file__).resolve().parents[3]
FOUND = re.findall(
    r"^```(\w+)\n(.*?)^```$", (ROOT / "docs" / "realtime.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
)
COMMANDS = [
    shlex.split(line)
    for language, code in FOUND
    if language == "bash"
    for line in code.replace("\\\n", " ").splitlines()
    if line.strip()
]
PYTHON = [code for language, code in FOUND if language == "python"]
DOCUMENTED = "8760"
"""The port in docs/realtime.md."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with ServeProcess() as running:
        yield running


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with the examples in it: what a block writes under outputs/ stays out of the repository."""
    (tmp_path / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    return tmp_path


def run(command: list[str], cwd: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def walk(client: SyncCameraClient, poses: np.ndarray, lens: np.ndarray, **options: object) -> list[np.ndarray]:
    """The frames of one infer of a small world."""
    size = {"height": 32, "width": 48, "frames_per_chunk": 1000}
    return [frame.video for frame in client.infer(poses, lens, **size, **options)]


def test_every_block_of_the_document_is_run_by_these_tests():
    assert {language for language, _ in FOUND} == {"bash", "python"}
    assert [words[0] for words in COMMANDS] == ["lingbot-world", "python", "python", "python"]
    assert ["SyncCameraClient" in code for code in PYTHON] == [True, False]
    assert ["VideoClient" in code for code in PYTHON] == [False, True]


def test_the_documented_command_serves():
    arguments = build_parser().parse_args(COMMANDS[0][1:])
    assert (arguments.verb, arguments.model, arguments.port) == ("serve", "tiny", int(DOCUMENTED))


def test_the_documented_commands_run_one_after_the_other(server, workplace):
    for words in COMMANDS[1:]:
        run([sys.executable, *(word.replace(DOCUMENTED, str(server.port)) for word in words[1:])], workplace)
    outputs = workplace / "outputs"
    frames = {file.name: len(read_video(file).frames) for file in outputs.glob("*.mp4")}
    assert frames == {"replay.mp4": 33, "joined.mp4": 33, "keys.mp4": 21}
    assert (outputs / "joined.mp4").read_bytes() == (outputs / "replay.mp4").read_bytes()


def test_the_documented_walk_runs(server, workplace):
    (workplace / "outputs").mkdir()
    printed = run([sys.executable, "-c", PYTHON[0].replace(DOCUMENTED, str(server.port))], workplace)
    assert "'chunk_latent_frames': 3" in printed
    assert "33 frames" in printed
    assert len(read_video(workplace / "outputs" / "walk.mp4").frames) == 33


def test_the_documented_video_runs(workplace):
    (workplace / "outputs").mkdir()
    heard: list[dict] = []

    async def talk(peer: Peer) -> None:
        heard.append(json.loads(await peer.receive()))
        await peer.send(json.dumps({"type": "video.start", "request_id": "r", "format": "m4s", "config": {}}))
        heard.append(json.loads(await peer.receive()))
        await peer.send(json.dumps({"type": "session.interaction.queued", "event_id": "right"}))
        writer = FragmentWriter(width=32, height=16, fps=16)
        for index, frames in enumerate((9, 12, 12)):
            metadata = {"type": "video.chunk_metadata", "kind": "chunk", "num_frames": frames}
            await peer.send(json.dumps({**metadata, "generation_chunk_index": index}))
            await peer.send(writer.push(np.zeros((frames, 16, 32, 3), np.uint8)))
        await peer.send(json.dumps({"type": "session.done", "chunks": 3, "reason": "completed"}))
        await peer.receive()

    with SocketStub({"/v1/realtime/video": talk}) as stub:
        printed = run([sys.executable, "-c", PYTHON[1].replace(DOCUMENTED, str(stub.port))], workplace)

    assert [message["type"] for message in heard] == ["session.start", "session.interaction"]
    assert "chunk 2 12 frames" in printed
    assert "completed 33 frames" in printed


def test_a_session_goes_on_over_a_new_connection_as_if_nothing_had_happened(server):
    path, lens = np.load(ROOT / "examples/04/poses.npy")[:33], np.load(ROOT / "examples/04/intrinsics.npy")
    parts, _ = slices(path, 3)
    first = {
        "image": ROOT / "examples" / "tiny" / "day.png", "prompt": "a sunny day", "translation_unit": clip_maximum(path)
    }  # fmt: skip
    with SyncCameraClient(server.url) as client:
        client.reset("whole")
        whole = [walk(client, part, lens[: len(part)], session_id="whole", **first) for part in parts]
    pieces = []
    for part in parts:
        with SyncCameraClient(server.url) as client:
            options = first if not pieces else {}
            pieces.append(walk(client, part, lens[: len(part)], session_id="pieces", **options))
    for one, other in zip(whole, pieces, strict=True):
        assert np.array_equal(np.concatenate(one), np.concatenate(other))


def test_what_is_refused_comes_as_its_code_and_the_connection_goes_on(server):
    poses, lens = np.tile(np.eye(4), (9, 1, 1)), np.tile([500.0, 500.0, 416.0, 240.0], (9, 1))
    with SyncCameraClient(server.url) as client:
        with pytest.raises(ServerError) as caught:
            walk(client, poses, lens, session_id="nothing yet")
        assert caught.value.code == "missing_field"
        with pytest.raises(ServerError) as caught:
            walk(client, 2 * poses, lens, session_id="nothing yet")
        assert caught.value.code == "bad_camera"
        client.reset("nothing yet")


def test_a_killed_server_is_one_error_and_the_client_connects_to_the_next_one():
    poses, lens = np.tile(np.eye(4), (9, 1, 1)), np.tile([500.0, 500.0, 416.0, 240.0], (9, 1))
    first = {"image": ROOT / "examples" / "tiny" / "day.png", "prompt": "a sunny day"}
    with ServeProcess() as server, SyncCameraClient(server.url) as client:
        assert [len(part) for part in walk(client, poses, lens, **first)] == [9]
        server.kill()
        with pytest.raises(ServerGoneError, match="is gone"):
            walk(client, poses, lens)
        with pytest.raises(ServerGoneError, match="no connection to"):
            client.connect()
        with ServeProcess(port=server.port):
            client.connect()
            assert [len(part) for part in walk(client, poses, lens, **first)] == [9]


def test_a_second_interrupt_ends_a_server_whose_model_goes_on_loading():
    slow = (
        "import sys, time; from lingbot_core.engine.world import World; from lingbot_core.cli import main; "
        "World.load = lambda *a, **k: (print('loads', file=sys.stderr, flush=True), time.sleep(60)); "
        "sys.exit(main(['serve', '--model', 'tiny', '--port', '0']))"
    )
    with subprocess.Popen([sys.executable, "-c", slow], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            while process.stderr.readline() != "loads\n":
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert "Ctrl-C again ends at once" in process.stderr.readline()
            time.sleep(1)  # by now it waits for the model
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
        finally:
            process.kill()
