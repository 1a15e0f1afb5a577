"""The history: frozen, in order, comparable, and fit for a report."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from lingbot_core.camera.controls import CameraCarry, Controls
from lingbot_core.engine.history import ChunkRecord, History, StartRecord
from lingbot_core.errors import HistoryError
from lingbot_core.presets import PRESETS

START = StartRecord(
    preset=PRESETS["v1-fast"],
    prompt="a",
    negative_prompt="",
    seed=5,
    noise="seeded",
    image="digest",
    height=464,
    width=832,
    intrinsics=(500.0, 500.0, 416.0, 232.0),
    translation_unit=0.25,
    unit_rule="clip",
    first_delta="identity",
    fps=16.0,
    chunks=None,
    model="fingerprint",
)


def record(index: int, prompt: str = "a", last_input: torch.Tensor | None = None) -> ChunkRecord:
    pose = np.eye(4)
    pose[0, 3] = index + 1
    controls = Controls(np.tile(np.eye(4), (3, 1, 1)), pose)
    return ChunkRecord(index, controls, prompt, "seeded", torch.full((16, 3, 2, 2), float(index)), last_input, {})


def history(*prompts: str) -> History:
    out = History(START)
    for index, prompt in enumerate(prompts):
        out = out.append(record(index, prompt))
    return out


def test_appending_and_cutting_make_new_histories():
    empty = History(START)
    one = empty.append(record(0))
    three = history("a", "a", "b")
    assert (len(empty), len(one), len(three), len(three.first(1))) == (0, 1, 3, 1)
    assert three.first(2).chunks == three.chunks[:2]
    assert three.first(3).chunks == three.chunks
    assert three.first(0).start is START


def test_nothing_of_a_history_can_be_assigned():
    one = history("a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.chunks = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.chunks[0].prompt = "b"
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.start.seed = 6
    with pytest.raises(ValueError, match="read-only"):
        one.chunks[0].controls.relative[0, 0, 3] = 1.0


def test_a_chunk_out_of_order_is_refused():
    for wrong in (0, 2):
        with pytest.raises(HistoryError, match=f"chunk {wrong} cannot follow 1 chunks"):
            history("a").append(record(wrong))
    for wrong in (-1, 2):
        with pytest.raises(HistoryError, match=f"{wrong} chunks were asked for; this history has 1"):
            history("a").first(wrong)


def test_camera_prompt_and_length_are_those_of_the_end():
    empty, two = History(START), history("a", "b")
    assert empty.carry == CameraCarry.start()
    assert (empty.prompt, empty.frames, empty.nbytes) == ("a", 0, 0)
    assert two.carry.latents == 6
    assert two.carry.pose[0, 3] == 2
    assert (two.prompt, two.frames) == ("b", 21)
    assert two.nbytes == 2 * 16 * 3 * 2 * 2 * 4
    with_input = History(START).append(record(0, last_input=torch.zeros(16, 3, 2, 2)))
    assert with_input.nbytes == two.nbytes


def test_timings_are_set_on_the_last_chunk_alone():
    timed = history("a", "a").with_timings({"decode": 0.5})
    assert timed.chunks[0].timings == {}
    assert timed.chunks[1].timings == {"decode": 0.5}


OTHERS = {
    "preset": PRESETS["v1-fast"].with_overrides(shift=5.0),
    "prompt": "b",
    "negative_prompt": "ugly",
    "seed": 6,
    "noise": "reference",
    "image": "another",
    "height": 480,
    "width": 480,
    "intrinsics": (500.0, 500.0, 416.0, 233.0),
    "translation_unit": 0.5,
    "unit_rule": "number",
    "first_delta": "from_rest",
    "fps": 24.0,
    "chunks": 3,
    "model": "other weights",
}


def test_every_field_of_a_start_is_tried_below():
    assert set(OTHERS) == {field.name for field in dataclasses.fields(StartRecord)}


@pytest.mark.parametrize("field", OTHERS)
def test_starts_that_differ_are_told_apart_by_the_field(field):
    other = dataclasses.replace(START, **{field: OTHERS[field]})
    START.require_same(dataclasses.replace(START))
    with pytest.raises(HistoryError, match=f"recorded with {field}=") as error:
        START.require_same(other)
    shown = "v1-fast (shift=5.0)" if field == "preset" else repr(OTHERS[field])
    assert shown in str(error.value)


def test_the_summary_survives_json_and_says_what_was_run():
    summary = history("a", "b", "b", "a").summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["preset"] == "v1-fast"
    assert (summary["chunks"], summary["frames"], summary["seed"]) == (4, 45, 5)
    assert summary["intrinsics"] == [500.0, 500.0, 416.0, 232.0]
    assert (summary["translation_unit"], summary["translation_unit_rule"]) == (0.25, "clip")
    assert summary["prompt_changes"] == [{"chunk": 1, "prompt": "b"}, {"chunk": 3, "prompt": "a"}]
    changed = dataclasses.replace(START, preset=OTHERS["preset"])
    assert History(changed).summary()["preset"] == "v1-fast (shift=5.0)"


def test_a_real_sessions_summary_survives_json(walks, recipe):
    done = walks[recipe].session.history
    summary = done.summary()
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["chunks"], summary["frames"]) == (7, done.frames)
    assert summary["prompt_changes"] == [{"chunk": 3, "prompt": "b"}]


def test_records_hold_the_last_steps_input_only_where_the_commit_is_skipped(walks):
    for name in ("window", "guided"):
        assert all(record.last_input is None for record in walks[name].session.history.chunks)
    for record in walks["reuse-last-step"].session.history.chunks:
        assert record.last_input.dtype == torch.float32
        assert record.last_input.shape == record.latents.shape
        assert not torch.equal(record.last_input, record.latents)
