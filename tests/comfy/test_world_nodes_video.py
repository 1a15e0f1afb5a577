"""The VIDEO's file: what it carries, and what becomes of a run whose file cannot be written or is taken away."""

from __future__ import annotations

import json
import os

import av
import folder_paths
import pytest
import torch
from comfy_api.latest import io

pytestmark = pytest.mark.usefixtures("wg")


@pytest.fixture
def video_error(wg):
    return wg.part("lingbot_core.errors").VideoError


@pytest.fixture
def temp_folder(tmp_path):
    """A temp folder of ComfyUI's that a test may spoil."""
    before = folder_paths.get_temp_directory()
    folder_paths.set_temp_directory(str(tmp_path / "temp"))
    yield tmp_path / "temp"
    folder_paths.set_temp_directory(before)


def as_comfyui_asks(wg, name, **hidden):
    cls = wg.node(name)
    cls.GET_SCHEMA()
    return cls.PREPARE_CLASS_CLONE({"hidden_inputs": {io.Hidden(key): value for key, value in hidden.items()}})


def test_what_a_file_cannot_carry_is_left_out_and_does_not_stop_a_run(graph, wg, caplog):
    given = {
        "workflow": {"nodes": []},
        "note": "a NUL \0 inside",
        "half": "\ud800",
        "encoder": "mine",
        "timecode": "01:00:00:00",
        "": "nameless",
        "\udfff": "half a name",
    }
    hidden = {"PROMPT": {"7": {}}, "EXTRA_PNGINFO": given}
    _, video, _, _ = wg.call("LingBotAdvanceWorld", hidden, world=graph.start(), chunks=1)
    with av.open(video.get_stream_source()) as file:
        tags = dict(file.metadata)
    assert {key: json.loads(tags[key]) for key in ("workflow", "note", "half", "prompt")} == {
        "workflow": {"nodes": []},
        "note": given["note"],
        "half": given["half"],
        "prompt": {"7": {}},
    }
    assert tags["encoder"] != "mine"
    assert "'encoder'" in caplog.text


def test_a_workflow_that_is_no_dictionary_does_not_stop_a_run(graph, wg):
    hidden = {"PROMPT": None, "EXTRA_PNGINFO": ["a list"]}
    _, video, _, _ = wg.call("LingBotAdvanceWorld", hidden, world=graph.start(), chunks=1)
    assert video.get_frame_count() == 9


def test_a_world_goes_on_after_any_prompt(graph):
    prompt = "half \ud800, 雪, a NUL \0"
    _, _, world, _ = graph.advance(graph.start(), 1, prompt=prompt)
    _, video, _, _ = graph.advance(world, 1)
    with av.open(video.get_stream_source()) as file:
        assert json.loads(file.metadata["lingbot_world"])["prompt_changes"] == [{"chunk": 0, "prompt": prompt}]


def test_a_node_runs_again_when_its_file_is_gone(graph, wg, temp_folder):
    asked = as_comfyui_asks(wg, "LingBotAdvanceWorld", UNIQUE_ID="12")
    start = graph.start()
    images, video, _, _ = wg.call("LingBotAdvanceWorld", {"UNIQUE_ID": "12"}, world=start, chunks=2)
    before = asked.fingerprint_inputs(world=None, chunks=2)
    assert asked.fingerprint_inputs(world=None, chunks=2) == before
    os.remove(video.get_stream_source())
    after = asked.fingerprint_inputs(world=None, chunks=2)
    assert after != before
    again, video, _, report = wg.call("LingBotAdvanceWorld", {"UNIQUE_ID": "12"}, world=start, chunks=2)
    assert torch.equal(again, images)
    assert json.loads(report)["made"]["chunks_reused"] == 2
    assert video.get_frame_count() == 21
    assert asked.fingerprint_inputs(world=None, chunks=2) == after


def test_a_restart_runs_again_when_its_file_is_gone(graph, wg, temp_folder):
    asked = as_comfyui_asks(wg, "LingBotWorldSession", UNIQUE_ID="7")  # the id that graph.session calls it with
    graph.session("file", "restart", 1)
    before = asked.fingerprint_inputs(name="file", mode="restart")
    for file in temp_folder.iterdir():
        file.unlink()
    assert asked.fingerprint_inputs(name="file", mode="restart") != before


def test_a_file_that_is_removed_while_it_is_written_is_told(graph, wg, temp_folder, video_error, monkeypatch):
    writer = wg.part("lingbot_core.engine.video").VideoWriter
    write = writer.write

    def and_remove(self, frames):
        write(self, frames)
        os.remove(self.path)

    whole, *_ = graph.advance(graph.start(), 1)
    start = graph.start()
    monkeypatch.setattr(writer, "write", and_remove)
    with pytest.raises(video_error, match=r"was removed while it was written.*keeps the 1 new chunks: queue again"):
        graph.advance(start, 1)
    monkeypatch.undo()
    images, _, _, report = graph.advance(start, 1)
    assert torch.equal(images, whole)
    assert report["made"]["chunks_reused"] == 1


def test_a_full_disk_is_one_message_that_says_what_is_kept(graph, wg, video_error, monkeypatch):
    writer = wg.part("lingbot_core.engine.video")._RecordingFile
    write, written = writer.write, [0]

    def full(self, data):
        written[0] += len(data)
        if written[0] > 6000:
            self.failure = OSError(28, "No space left on device")
            raise self.failure
        return write(self, data)

    monkeypatch.setattr(writer, "write", full)
    with pytest.raises(video_error) as caught:
        graph.advance(graph.start(), 6)
    message = str(caught.value)
    assert "the disk is full; free some space" in message
    assert message.count("are in") == 1
    assert "new chunks: queue again to go on" in message


def test_a_temp_folder_that_cannot_be_made_is_named(graph, temp_folder, video_error):
    temp_folder.write_text("a file in its place")
    with pytest.raises(video_error, match=r"temp folder .* cannot be made: File exists.*--temp-directory"):
        graph.advance(graph.start(), 1)
