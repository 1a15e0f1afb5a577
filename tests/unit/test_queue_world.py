"""scripts/queue_world.py as a user calls it, against a server that does what ComfyUI's queue does."""

from __future__ import annotations

import errno
import importlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from queue_stub import QueueStub, succeed, write_workflow

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "queue_world.py"
sys.path.append(str(SCRIPT.parent))
queue_world = importlib.import_module("queue_world")


@dataclass
class Done:
    returncode: int
    stderr: str


Queue = Callable[..., Done]


def command(server: str, workflow: Path, *arguments: object) -> list[str]:
    out = workflow.parent / "out"
    return [str(workflow), "--server", server, "--out", str(out), *map(str, arguments)]


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    return write_workflow(tmp_path / "walk.json")


@pytest.fixture
def queue(workflow: Path, capsys: pytest.CaptureFixture[str]) -> Queue:
    def run(server: QueueStub | str, *arguments: object, file: Path = workflow) -> Done:
        url = server if isinstance(server, str) else server.url
        code = queue_world.main(command(url, file, *arguments))
        return Done(code, capsys.readouterr().err)

    return run


def made(workflow: Path) -> list[str]:
    return sorted(file.name for file in (workflow.parent / "out").iterdir())


def test_a_run_is_submitted_followed_and_downloaded(queue, workflow):
    with QueueStub(inputs=("start.png",)) as server:
        done = queue(server)
    assert done.returncode == 0, done.stderr
    assert server.prompts == [json.loads(workflow.read_text())]
    assert (workflow.parent / "out" / "walk__video.mp4").read_bytes() == b"bytes of a b/video.mp4"
    assert made(workflow) == ["walk__video.mp4"]
    for text in ("World v1.0 1/4", "World v1.0: 8.1 fps", "done", "1.5 s", "1 of 1 succeeded, 1 files"):
        assert text in done.stderr


def test_every_output_key_is_downloaded_and_nothing_is_overwritten(queue, workflow):
    def plan(prompt):
        outputs = {
            "3": {"gifs": [{"filename": "a.mp4", "subfolder": "", "type": "output", "format": "video/h264-mp4"}]},
            "4": {"video": [{"filename": "b.webm", "subfolder": "x", "type": "output"}], "animated": [True]},
            "5": {"audio": [{"filename": "c.flac", "subfolder": "", "type": "output"}], "text": ["some words"]},
            "6": {"images": [{"filename": "p.png", "subfolder": "", "type": "temp"}]},
        }
        return {"outputs": outputs}

    with QueueStub(plan, inputs=("start.png",)) as server:
        assert queue(server).returncode == 0
        assert made(workflow) == ["walk__a.mp4", "walk__b.webm", "walk__c.flac"]
        server.files["a.mp4"] = b"another"
        assert queue(server, "--previews").returncode == 0
    assert made(workflow) == [
        "walk__a (1).mp4", "walk__a.mp4", "walk__b (1).webm", "walk__b.webm", "walk__c (1).flac", "walk__c.flac",
        "walk__p.png",
    ]  # fmt: skip
    assert (workflow.parent / "out" / "walk__a.mp4").read_bytes() == b"bytes of a.mp4"
    assert (workflow.parent / "out" / "walk__a (1).mp4").read_bytes() == b"another"


def test_a_name_from_the_server_is_never_a_path(queue, workflow):
    item = {"filename": "../../../evil: name?.mp4", "subfolder": "..", "type": "output"}
    with QueueStub(lambda prompt: {"outputs": {"3": {"images": [item]}}}, inputs=("start.png",)) as server:
        assert queue(server).returncode == 0
    assert made(workflow) == ["walk__evil_ name_.mp4"]


def test_set_reaches_nodes_by_id_title_and_class_with_values_of_the_inputs_kind(queue, workflow):
    with QueueStub(inputs=("start.png",)) as server:
        done = queue(
            server, "--set", "2.seed=77", "--set", "World v1.0.strict=true", "--set", "save.filename_prefix=123",
            "--set", "Save.format.codec=av1", "--set", "Start.preset=tiny=1",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert server.prompts[0]["2"]["inputs"] == {"image": ["1", 0], "seed": 77, "strict": True, "preset": "tiny=1"}
    assert server.prompts[0]["3"]["inputs"]["filename_prefix"] == "123"
    assert server.prompts[0]["3"]["inputs"]["format.codec"] == "av1"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("seed=7", "does not say node.input=value"),
        ("Start.=7", "does not say node.input=value"),
        ("Nobody.seed=7", "no node 'Nobody' in walk.json; it has Load Image (node 1, LoadImage), World v1.0"),
        ("Start.sed=7", "has no input 'sed'; did you mean seed?"),
        ("Start.quartz=7", "has no input 'quartz'. It has "),
        ("Start.seed=many", "seed of World v1.0 (node 2, Start) is a number, now 5; 'many' is not"),
        ("Start.seed=true", "is a number"),
        ("Start.strict=perhaps", "is true or false"),
        pytest.param("Start.seed=" + "[" * 100_000, "is a number", id="deep"),
    ],
)
def test_a_wrong_set_is_an_error_that_says_what_there_is(queue, setting, message):
    with QueueStub(inputs=("start.png",)) as server:
        done = queue(server, "--set", setting)
    assert (done.returncode, server.prompts) == (2, [])
    assert message in done.stderr


def test_an_ambiguous_node_is_an_error_that_lists_the_candidates(queue, workflow):
    nodes = json.loads(workflow.read_text())
    nodes["7"] = {"class_type": "Start", "inputs": {"seed": 1}, "_meta": {"title": "Second"}}
    workflow.write_text(json.dumps(nodes))
    with QueueStub(inputs=("start.png",)) as server:
        done = queue(server, "--set", "Start.seed=7")
        assert done.returncode == 2
        assert "'Start' is 2 nodes: World v1.0 (node 2, Start), Second (node 7, Start)" in done.stderr
        assert queue(server, "--set", "Second.seed=7").returncode == 0
    assert [server.prompts[0][node]["inputs"]["seed"] for node in ("2", "7")] == [5, 7]


def test_images_and_seeds_multiply_and_the_names_say_which(queue, workflow, tmp_path):
    odd = ["a 10.png", "a 2.jpg", 'schöne "Grüße" & #1 [x].webp']
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in odd:
        (folder / name).write_bytes(name.encode())
    (folder / "notes.txt").write_text("no picture")
    with QueueStub() as server:
        done = queue(server, "--images", folder, "--seeds", "3-4,9")
    assert done.returncode == 0, done.stderr
    assert server.input_files == {name: name.encode() for name in odd}
    order = ["a 2.jpg", "a 10.png", odd[2]]
    pairs = [(prompt["1"]["inputs"]["image"], prompt["2"]["inputs"]["seed"]) for prompt in server.prompts]
    assert pairs == [(name, seed) for name in order for seed in (3, 4, 9)]
    assert made(workflow)[0] == "1_a 2_seed3__video.mp4"
    assert made(workflow)[8] == "9_schöne _Grüße_ & #1 [x]_seed9__video.mp4"
    assert "9 of 9 succeeded, 9 files" in done.stderr


def test_a_picture_whose_name_is_taken_by_another_gets_the_name_the_server_gave_it(queue, tmp_path):
    (tmp_path / "start.png").write_bytes(b"mine")
    with QueueStub(inputs=("start.png",)) as server:
        assert queue(server, "--images", tmp_path / "start.png").returncode == 0
    assert server.prompts[0]["1"]["inputs"]["image"] == "start (1).png"


def test_a_picture_that_the_server_lacks_is_sent_from_beside_the_workflow(queue, workflow, tmp_path):
    (tmp_path / "start.png").write_bytes(b"mine")
    with QueueStub() as server:
        assert queue(server).returncode == 0
    assert server.input_files == {"start.png": b"mine"}


def test_the_start_picture_of_the_workflows_is_one_of_the_examples():
    examples = SCRIPT.parents[1] / "examples"
    assert (examples / "lingbot_tiny_day.png").read_bytes() == (examples / "tiny" / "day.png").read_bytes()


def test_a_picture_of_the_packs_examples_is_sent_with_its_folder(queue, tmp_path):
    with QueueStub() as server:
        done = queue(server, file=write_workflow(tmp_path / "walk.json", "03/image.jpg"))
    assert done.returncode == 0, done.stderr
    assert server.prompts[0]["1"]["inputs"]["image"] == "03/image.jpg"
    assert server.input_files["03/image.jpg"] == (SCRIPT.parents[1] / "examples/03/image.jpg").read_bytes()


@pytest.mark.parametrize("image", ["start.png", "../secret.png", "/etc/hostname"])
def test_a_picture_that_is_nowhere_is_an_error_that_says_where_it_was_looked_for(queue, tmp_path, image):
    (tmp_path / "deep").mkdir()
    (tmp_path / "secret.png").write_bytes(b"not beside the workflow")
    with QueueStub() as server:
        done = queue(server, file=write_workflow(tmp_path / "deep" / "walk.json", image))
    assert (done.returncode, server.prompts, server.input_files) == (2, [], {})
    assert f"wants the picture {image}: it is not in the server's input folder" in done.stderr
    assert str(tmp_path / "deep") in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "6-1"], "ends before it begins"),
        (["--seeds", "a-b"], "is no seed and no range"),
        (["--seeds", "0-99999999"], "at most 10000"),
        (["--images", "nowhere"], "no such folder or file"),
        (["--image-node", "1"], "there are no --images"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_queued(queue, arguments, message):
    with QueueStub(inputs=("start.png",)) as server:
        done = queue(server, *arguments)
    assert (done.returncode, server.prompts) == (2, [])
    assert message in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"nodes": [], "links": []}', "export it with File > Export (API)"),
        ("[]", "no workflow in API format"),
        ('{"1": {"inputs": {}}}', "no workflow in API format"),
        ("{", "is not JSON"),
        pytest.param("[" * 100_000, "is not JSON", id="deep"),
    ],
)
def test_a_file_that_is_no_api_workflow_is_refused(queue, workflow, content, message):
    workflow.write_text(content)
    with QueueStub() as server:
        done = queue(server)
    assert done.returncode == 2
    assert message in done.stderr


REFUSAL = {
    "error": {"type": "prompt_outputs_failed_validation", "message": "Prompt outputs failed validation", "details": ""},
    "node_errors": {
        "2": {
            "class_type": "Start",
            "errors": [{"message": "Value not in list", "details": "preset: 'best' not in ['tiny']"}],
            "dependent_outputs": ["3"],
        }
    },
}


def test_a_refused_workflow_shows_the_nodes_own_errors_and_stops_the_batch(queue):
    with QueueStub(lambda prompt: {"refuse": REFUSAL}, inputs=("start.png",)) as server:
        done = queue(server, "--seeds", "1-3")
        assert done.returncode == 1
        assert "World v1.0 (node 2, Start): Value not in list: preset: 'best' not in ['tiny']" in done.stderr
        assert done.stderr.count("not submitted") == 2
        assert len(server.prompts) == 1
        queue(server, "--seeds", "1-3", "--keep-going")
        assert len(server.prompts) == 1 + 3


def test_a_missing_pack_is_named(queue):
    error = {
        "type": "missing_node_type",
        "message": "Node 'Start World' not found. The custom node may not be installed.",
    }
    error["extra_info"] = {"class_type": "LingBotStartWorld"}
    plan = {"refuse": {"error": error, "node_errors": {}}}
    with QueueStub(lambda prompt: plan, inputs=("start.png",)) as server:
        done = queue(server)
    assert done.returncode == 1
    assert "Node 'Start World' not found" in done.stderr
    assert "no LingBot World nodes" in done.stderr


def test_outputs_that_comfyui_leaves_out_are_a_failure(queue):
    with QueueStub(lambda p: {**succeed(p), "left_out": REFUSAL["node_errors"]}, inputs=("start.png",)) as server:
        done = queue(server)
    assert done.returncode == 1
    assert "Value not in list" in done.stderr
    assert "0 of 1 succeeded, 1 files" in done.stderr


def test_an_error_in_a_node_is_shown_and_the_other_runs_go_on(queue, workflow):
    error = {
        "node_id": "2", "node_type": "Start", "exception_type": "RuntimeError", "exception_message": "out of memory\n",
        "traceback": ["  File 'a'\n", "  File 'b', line 7\n    run()\n"],
    }  # fmt: skip

    def plan(prompt):
        outputs = {"3": {"images": [{"filename": "kept.mp4", "subfolder": "", "type": "output"}]}}
        return {"error": error, "outputs": outputs} if prompt["2"]["inputs"]["seed"] == 2 else succeed(prompt)

    with QueueStub(plan, inputs=("start.png",)) as server:
        done = queue(server, "--seeds", "1-3")
    assert done.returncode == 1
    assert "World v1.0 (node 2, Start): RuntimeError: out of memory" in done.stderr
    assert "File 'b', line 7" in done.stderr
    assert "2 of 3 succeeded, 3 files" in done.stderr
    assert made(workflow) == ["1_seed1__video.mp4", "2_seed2__kept.mp4", "3_seed3__video.mp4"]


def test_a_run_that_somebody_interrupts_on_the_server_is_a_failure(workflow):
    with QueueStub(lambda prompt: {"wait": True}, inputs=("start.png",)) as server:
        process = start(command(server.url, workflow))
        wait_for(lambda: server.running is not None)
        server._loop.call_soon_threadsafe(server._interrupted.set)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "interrupted in World v1.0" in errors


def test_ctrl_c_takes_back_this_calls_runs_and_nobody_elses_and_keeps_what_was_saved(workflow):
    def plan(prompt):
        saved = {"3": {"images": [{"filename": "half.mp4", "subfolder": "", "type": "output"}]}}
        return {"wait": True, "outputs": saved}

    with QueueStub(plan, inputs=("start.png",)) as server:
        process = start(command(server.url, workflow, "--seeds", "1-3"))
        wait_for(lambda: server.running is not None and len(server.prompts) == 3)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (server.running, server.waiting) == (None, [])
    assert process.returncode == 130, errors
    assert server.calls == [("delete", ["prompt-1", "prompt-2"]), ("interrupt", "prompt-0")]
    assert made(workflow) == ["1_seed1__half.mp4"]
    assert errors.count("taken back") == 2


def test_a_lost_socket_costs_only_progress(queue):
    with QueueStub(lambda p: {**succeed(p), "drop_sockets": True}, inputs=("start.png",)) as server:
        done = queue(server, "--seeds", "1-3")
    assert done.returncode == 0, done.stderr
    assert "connecting again" in done.stderr
    assert server.connections > 1


@pytest.mark.parametrize(
    "address",
    ["", "http://", "ftp://127.0.0.1:8188", "http://127.0.0.1:99999", "127.0.0.1:http", "http://[::1", "a server"],
)
def test_what_is_no_address_is_refused(queue, address):
    done = queue(address)
    assert done.returncode == 2
    assert f"--server {address!r} is no address of a server, such as http://127.0.0.1:8188" in done.stderr


@pytest.mark.parametrize("seconds", ["nan", "-1", "inf", "soon"])
def test_patience_is_a_number_of_seconds(queue, capsys, seconds):
    with pytest.raises(SystemExit, match="2"):
        queue("http://127.0.0.1:9", f"--patience={seconds}")
    assert f"argument --patience: invalid seconds value: '{seconds}'" in capsys.readouterr().err


def test_no_server_is_one_line(queue):
    done = queue("http://127.0.0.1:9")
    assert done.returncode == 1
    assert "no answer from http://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_goes_away_is_waited_for_and_then_given_up(workflow):
    with QueueStub(lambda prompt: {"wait": True}, inputs=("start.png",)) as server:
        process = start(command(server.url, workflow, "--patience", "2"))
        wait_for(lambda: server.running is not None)
        server.stop()
        _, errors = process.communicate(timeout=25)
    assert process.returncode == 1
    assert "trying again" in errors
    assert "given up after" in errors
    assert "Traceback" not in errors


def test_a_prompt_that_the_server_no_longer_knows_is_a_failure(queue):
    with QueueStub(lambda prompt: {"vanish": True}, inputs=("start.png",)) as server:
        done = queue(server)
    assert done.returncode == 1
    assert "no longer knows this run" in done.stderr


def test_a_download_that_breaks_off_leaves_no_file_and_is_a_failure(queue, workflow):
    with QueueStub(inputs=("start.png",)) as server:
        server.files["a b/video.mp4"] = None
        done = queue(server)
    assert done.returncode == 1
    assert "cannot be downloaded: the server answered 404" in done.stderr
    assert made(workflow) == []


def test_a_download_that_finds_no_room_says_where_the_file_still_is(queue, workflow, monkeypatch):
    async def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("comfy_queue.server.Server.download", full)
    with QueueStub(inputs=("start.png",)) as server:
        done = queue(server)
    assert (done.returncode, made(workflow)) == (1, [])
    assert "walk__video.mp4 cannot be written: No space left on device; the server has it in its output" in done.stderr
    assert "folder as a b/video.mp4" in done.stderr


def test_another_kind_of_server_is_recognised(queue, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = process.stdout.readline().split(" port ")[1].split()[0]
        (tmp_path / "object_info").mkdir()
        (tmp_path / "object_info" / "Start").write_text("<html>")
        done = queue(f"127.0.0.1:{port}", "--set", "2.seed=1")
    finally:
        process.kill()
        process.wait()
    assert done.returncode == 1
    assert "is no ComfyUI" in done.stderr


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(SCRIPT), *arguments], stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
