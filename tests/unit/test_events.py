"""Event scripts: one chunk per JSON line, in every spelling that is accepted, and every way to get one wrong."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingbot_core.camera import PER_LATENT, PER_VIDEO, KeyMotion
from lingbot_core.engine import events
from lingbot_core.engine.events import ChunkEvent, parse_events
from lingbot_core.errors import CameraError, InputFileError, PromptError

ACTIONS, TRAJECTORY = "lingbot.camera_actions.v1", "lingbot.camera_trajectory.v1"
FRAMES = [["w"], ["j", "w"], []]
KEYS = KeyMotion(("w", "jw", ""), PER_LATENT)
POSES = np.tile(np.eye(4), (9, 1, 1))
POSES[:, 2, 3] = np.arange(9)


def parse(*lines: object, chunk: int = 3, steps=PER_LATENT) -> list[ChunkEvent]:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n"
    return parse_events(text, chunk=chunk, steps=steps)


def test_a_line_switches_the_prompt_and_holds_keys_per_latent_frame():
    first, second = parse(
        {"event_id": 1, "prompt": "Snow begins to fall", "frames": FRAMES}, {"event_id": 5, "frames": [[], [], ["L"]]}
    )
    assert (first.event_id, first.prompt, first.motion, first.intrinsics) == (1, "Snow begins to fall", KEYS, None)
    assert (second.event_id, second.prompt, second.motion) == (5, None, KeyMotion(("", "", "l"), PER_LATENT))


def test_a_line_without_camera_keeps_still():
    still, also = parse({"event_id": 0, "prompt": "Night"}, {"event_id": 1, "frames": None})
    assert (still.prompt, still.motion) == ("Night", None)
    assert (also.prompt, also.motion) == (None, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"frames": FRAMES},
        {"schema": ACTIONS, "frames": FRAMES},
        {"schema": ACTIONS, "data": {"mode": "frames", "frames": FRAMES}},
        {"camera": {"frames": FRAMES}},
        {"camera": {"schema": ACTIONS, "mode": "script", "frames": FRAMES}},
        {"camera": {"schema": ACTIONS, "data": {"mode": "script", "frames": FRAMES}}},
        {"controls": [{"track": "camera", "schema": ACTIONS, "data": {"mode": "frames", "frames": FRAMES}}]},
    ],
)
def test_every_spelling_of_keys_means_the_same(fields):
    (event,) = parse({"event_id": 3, **fields})
    assert event.motion == KEYS


@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: {"camera": c}, lambda c: {"camera": {"data": c}}])
@pytest.mark.parametrize("schema", [{"schema": TRAJECTORY}, {}])
@pytest.mark.parametrize(
    "intrinsics",
    [
        [500, 400, 416, 240],
        [[500, 400, 416, 240]],
        [[500, 400, 416, 240]] * 9,
        [[500, 0, 416], [0, 400, 240], [0, 0, 1]],
    ],
)
def test_every_spelling_of_poses_means_the_same(wrap, schema, intrinsics):
    fields = wrap({"poses": POSES.tolist(), "intrinsics": intrinsics, **schema})
    (event,) = parse({"event_id": 0, **fields})
    np.testing.assert_array_equal(event.motion, POSES)
    assert event.intrinsics == (500.0, 400.0, 416.0, 240.0)


def test_key_lists_follow_the_chunk_and_the_steps_that_are_given():
    (event,) = parse({"event_id": 0, "frames": [["w"], [], [], ["s"]]}, chunk=4, steps=PER_VIDEO)
    assert event.motion == KeyMotion(("w", "", "", "s"), PER_VIDEO)


@given(
    st.lists(
        st.lists(st.lists(st.sampled_from("wasdijkl"), max_size=8), min_size=3, max_size=3), min_size=1, max_size=5
    )
)
def test_keys_come_back_as_they_were_written(script):
    parsed = parse(*({"event_id": i, "frames": frames} for i, frames in enumerate(script)))
    held = [[set(keys) for keys in event.motion.keys_per_latent] for event in parsed]
    assert held == [[set(keys) for keys in frames] for frames in script]


def test_files_may_have_a_byte_order_mark_empty_lines_and_windows_line_ends(tmp_path):
    file = tmp_path / "script.jsonl"
    # U+2028 is no line end of JSON lines, although str.splitlines would split there.
    lines = [{"event_id": 1, "prompt": "A B"}, {"event_id": 2}]
    text = "\r\n\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    for source in (file, str(file)):
        first, second = parse_events(source, chunk=3, steps=PER_LATENT)
        assert (first.prompt, second.event_id) == ("A B", 2)


BAD_LINES = [
    ("not json", InputFileError, "is not valid JSON"),
    ("[1]", InputFileError, "must be a JSON object, not a list"),
    ("[" * 5000, InputFileError, "nested too deeply|not valid JSON"),
    ({"prompt": "x"}, InputFileError, "event_id is missing"),
    ({"event_id": True}, InputFileError, "event_id is True; it must be a whole number"),
    ({"event_id": 2.0}, InputFileError, "must be a whole number"),
    ({"event_id": -1}, InputFileError, "from 0"),
    ({"event_id": 1}, InputFileError, "event_id 1 follows 1; ids must rise"),
    ({"event_id": 0}, InputFileError, "event_id 0 follows 1"),
    ({"event_id": 2, "frame": FRAMES}, InputFileError, "no field 'frame'; the fields are event_id, prompt"),
    ('{"event_id": 2, "event_id": 3}', InputFileError, "the field 'event_id' is given twice; keep one"),
    ('{"event_id": 2, "camera": {"mode": 1, "mode": 1}}', InputFileError, "the field 'mode' is given twice"),
    ({"event_id": 2, "prompt": ""}, PromptError, "leave it out to keep the prompt"),
    ({"event_id": 2, "prompt": 7}, PromptError, "prompt must be text"),
    ({"event_id": 2, "frames": [["w"], []]}, CameraError, r"2 entries; a chunk has 3 latent frames.*\[\[\"w\"\]"),
    ({"event_id": 2, "frames": "www"}, CameraError, "frames has text"),
    ({"event_id": 2, "frames": [["w"], [], ["x"]]}, CameraError, "'x' is not a key; use w a s d"),
    ({"event_id": 2, "frames": [["w"], [], "w"]}, CameraError, r"frames\[2\].*list of single keys"),
    ({"event_id": 2, "frames": [["w"], [], ["none"]]}, CameraError, r"frames\[2\].*list of single keys"),
    (
        {"event_id": 2, "frames": FRAMES, "camera": {"frames": FRAMES}},
        CameraError,
        "given twice, by its own fields and",
    ),
    ({"event_id": 2, "frames": FRAMES, "poses": POSES.tolist()}, CameraError, "has no field 'frames'"),
    ({"event_id": 2, "schema": ACTIONS, "poses": POSES.tolist()}, CameraError, "has no field 'poses'"),
    ({"event_id": 2, "schema": TRAJECTORY, "intrinsics": [1]}, CameraError, "needs the field 'poses'"),
    (
        {"event_id": 2, "schema": "lingbot.camera.v9", "frames": FRAMES},
        CameraError,
        "schema 'lingbot.camera.v9' is unkn",
    ),
    ({"event_id": 2, "mode": "state", "frames": FRAMES}, CameraError, "mode 'state' belongs to a live connection"),
    ({"event_id": 2, "camera": 5}, CameraError, "must be an object with 'frames' or 'poses', not a number"),
    ({"event_id": 2, "camera": {"data": [1]}}, CameraError, "data must be an object"),
    ({"event_id": 2, "camera": {"mode": "x", "data": {"mode": "x"}}}, CameraError, "'mode' is given twice"),
    ({"event_id": 2, "controls": [{}, {}]}, CameraError, "list of one camera object"),
    ({"event_id": 2, "controls": [{"track": "audio", "data": {}}]}, CameraError, "only the track 'camera'"),
    ('{"event_id": 2, "poses": [[[1,0,0,0],[0,1,0,NaN],[0,0,1,0],[0,0,0,1]]]}', CameraError, "row 0 holds NaN"),
    ({"event_id": 2, "poses": (2 * POSES).tolist()}, CameraError, "bottom row other than"),
    ({"event_id": 2, "poses": "eye"}, CameraError, "real numbers"),
    ({"event_id": 2, "poses": POSES.tolist(), "intrinsics": [0.6, 1, 0.5, 0.5]}, CameraError, "looks normalised"),
]


@pytest.mark.parametrize(("line", "error", "message"), BAD_LINES)
def test_a_bad_line_is_refused_by_its_number(line, error, message):
    with pytest.raises(error, match=f"(?s)event script, line 2.*({message})"):
        parse({"event_id": 1}, line)


def test_a_script_needs_an_event(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(InputFileError, match="holds no event; write one line per chunk"):
        parse_events(tmp_path / "empty.jsonl", chunk=3, steps=PER_LATENT)


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing", "does not exist"), ("folder", "cannot be read"), ("pipe", "cannot be read: it is not a regular file")],
)
def test_an_unreadable_file_is_named(tmp_path, name, message):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputFileError, match=f"{name}.*{message}"):
        parse_events(tmp_path / name, chunk=3, steps=PER_LATENT)


def test_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "latin1.jsonl").write_bytes('{"event_id": 1, "prompt": "café"}'.encode("latin-1"))
    with pytest.raises(InputFileError, match="line 1 is not UTF-8"):
        parse_events(tmp_path / "latin1.jsonl", chunk=3, steps=PER_LATENT)


def test_sizes_are_bounded(tmp_path, monkeypatch):
    file = tmp_path / "long.jsonl"
    file.write_text('{"event_id": 1}\n{"event_id": 2, "prompt": "' + "x" * events.MAX_LINE_BYTES + '"}\n')
    with pytest.raises(InputFileError, match="line 2 is longer than"):
        parse_events(file, chunk=3, steps=PER_LATENT)
    monkeypatch.setattr(events, "MAX_LINES", 3)
    with pytest.raises(InputFileError, match="more than 3 lines"):
        parse(*({"event_id": i} for i in range(4)))
