"""Event scripts that people type: what a row leaves out stays as it is, and errors name the line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lingbot_core.camera import PER_LATENT, PER_VIDEO, action_string_poses
from lingbot_core.camera.describe import describe_path
from lingbot_core.camera.key_path import path_from_keys
from lingbot_core.camera.key_text import key_lines, keys_of_chunk
from lingbot_core.engine.event_rows import MAX_LINES, parse_rows, parse_script
from lingbot_core.engine.events import parse_events
from lingbot_core.errors import CameraError, InputFileError


def shown(events) -> list:
    return [(event.prompt, event.motion.keys_per_latent) for event in events]


def test_what_a_row_leaves_out_stays_as_it_is():
    text = "\ufeff0: A meadow | w\n\n# later\n2: Night: falls|w wj j \n  4 : Day | breaks |\n5：Rain｜l\n6: \n7: Dusk"
    events = parse_rows(text, chunk=3, steps=PER_LATENT, chunks=9)
    assert shown(events) == [
        ("A meadow", ("w", "w", "w")),
        (None, ("w", "w", "w")),
        ("Night: falls", ("w", "jw", "j")),
        (None, ("j", "j", "j")),
        ("Day | breaks", ("", "", "")),
        ("Rain", ("l", "l", "l")),
        (None, ("l", "l", "l")),
        ("Dusk", ("l", "l", "l")),
        (None, ("l", "l", "l")),
    ]
    assert [event.event_id for event in events] == list(range(9))


def test_rows_may_begin_late_and_end_where_the_last_one_does():
    assert shown(parse_rows("1: | none", chunk=2, steps=PER_LATENT)) == [(None, ("", "")), (None, ("", ""))]
    assert len(parse_rows("0: x\n3: y", chunk=2, steps=PER_LATENT, chunks=2)) == 4  # cutting off is the route's work


def test_json_lines_are_told_by_their_first_character():
    lines = "\n" + "\n".join(json.dumps({"event_id": i, "frames": [["w"], [], []]}) for i in range(2))
    mine = parse_script(lines, chunk=3, steps=PER_LATENT)
    assert shown(mine) == shown(parse_events(lines, chunk=3, steps=PER_LATENT))
    assert shown(parse_script("0: {a} | w", chunk=1, steps=PER_LATENT)) == [("{a}", ("w",))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are no events"),
        ("# only a note\n", "there are no events"),
        ("0: a\nNight falls", "events, line 2: 'Night falls' does not begin with a chunk"),
        ("-1: a", "line 1: '-1: a' does not begin with a chunk"),
        ("0: a\n\n0: b", "events, line 3: chunk 0 follows chunk 0; chunks must rise"),
        ("3: a\n2: b", "line 2: chunk 2 follows chunk 3"),
        ("1000000000: a", "does not begin with a chunk"),
        ("999999999: a", f"chunk 999999999 is beyond the {MAX_LINES} chunks"),
        ("0: a | q", "line 1: keys 'q': 'q' is not a key.*what stands behind the last | are keys"),
        ("0: a\n1: b | w w", "line 2: 2 entries for one chunk; write one for the whole chunk, or 3"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused_by_line(text, message):
    with pytest.raises((InputFileError, CameraError), match=message):
        parse_rows(text, chunk=3, steps=PER_LATENT)


def test_a_bad_json_line_is_refused_by_line_and_an_endless_text_at_once():
    with pytest.raises(InputFileError, match="event script, line 2 is not valid JSON"):
        parse_script('{"event_id": 1}\nnight', chunk=3, steps=PER_LATENT)
    with pytest.raises(InputFileError, match="at most 67108864 are accepted"):
        parse_script("0" * ((1 << 26) + 1), chunk=3, steps=PER_LATENT)


def test_keys_of_a_chunk():
    assert keys_of_chunk("jw", chunk=2) == ("jw", "jw")
    assert keys_of_chunk("w,none，Wj", chunk=3) == ("w", "", "jw")
    assert key_lines("w\n#x\n\nnone", chunk=1) == [("w",), ("",)]


# Paths from keys


def test_a_path_per_video_frame_is_upstreams_without_its_last_pose():
    path = path_from_keys("w-10\niw-15, none-10", PER_VIDEO)
    np.testing.assert_array_equal(path.poses, action_string_poses("w-10,iw-15,none-10")[:37])
    assert path.actions.shape == (37, 4)
    assert path.actions[:26, 0].tolist() == [1.0] * 25 + [0.0]
    assert path.intrinsics_are_default


def test_a_path_per_latent_frame_moves_by_one_step_every_four_frames():
    path = path_from_keys("w-12, j-1", PER_LATENT)
    assert (len(path), path.rate) == (4 * 13 + 1, "video")
    np.testing.assert_allclose(path.poses[:49, 2, 3], np.arange(49) * 0.0125, atol=1e-6)
    turned = path.poses[52] @ np.array([0, 0, 1.0, 0])
    np.testing.assert_allclose(turned[:3], [-np.sin(np.radians(6)), 0, np.cos(np.radians(6))], atol=1e-12)
    assert path.actions[:, 0].tolist() == [1.0] * 48 + [0.0] * 5


@pytest.mark.parametrize(
    ("text", "steps", "message"),
    [
        ("", PER_VIDEO, "there are no keys"),
        ("w", PER_VIDEO, "do not say how long they are held"),
        ("w-30000", PER_LATENT, "the keys last 120001 video frames; at most 100000"),
        ("w-99999", PER_VIDEO, "the keys last 100001 video frames; at most 100000"),
        ("w-1000000000", PER_VIDEO, "not a number of frames"),
    ],
)
def test_paths_that_cannot_be_are_refused(text, steps, message):
    with pytest.raises(CameraError, match=message):
        path_from_keys(text, steps)


def test_a_path_is_described_in_a_few_lines():
    text = describe_path(path_from_keys("w-16, none-8", PER_VIDEO))
    assert text.splitlines() == [
        "25 frames, 1.56 s at 16 fps",
        "steps of a latent frame: median 0.2, longest 0.2, 2 at rest",
        "intrinsics: 500 px, the default",
        "with actions",
    ]
