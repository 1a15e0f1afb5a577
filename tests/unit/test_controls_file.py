"""Records of controls: they come back bit for bit, are replayed exactly, and anything else is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from lingbot_core.camera import PER_LATENT, KeyMotion
from lingbot_core.engine.controls_file import ControlsRecord, dump_controls, load_controls
from lingbot_core.engine.history import History
from lingbot_core.engine.route import RecordedRoute
from lingbot_core.engine.session import WorldSession
from lingbot_core.errors import HistoryError, InputFileError, LengthError
from lingbot_core.presets import PRESETS, Preset, TableSteps

RECIPE = Preset("window", chunk=3, selection=TableSteps((0, 500)), shift=5.0, window=9, sink=3)
IMAGE = None  # only routes with intrinsics of their own ask for it
STATES = torch.randn(5, 20, generator=torch.Generator().manual_seed(1))
SAID = "Night “falls”\n雨"


@pytest.fixture(scope="module")
def walked(small) -> WorldSession:
    """Three chunks with keys, poses, intrinsics of their own and two prompts."""
    session = begin(small)
    session.advance(session.controls(KeyMotion(("w", "wj", "i"), PER_LATENT)))
    poses = np.tile(session.carry.pose, (12, 1, 1))
    poses[:, 0, 3] += np.cumsum(np.random.default_rng(0).uniform(0, 0.1, 12))
    session.set_prompt(SAID, states=STATES)
    session.advance(session.controls(poses, prompt=SAID, intrinsics=(20.0, 21.0, 16.0, 1 / 3)))
    session.advance(session.controls(KeyMotion(("", "l", "l"), PER_LATENT)))
    return session


def begin(small, **changes) -> WorldSession:
    rules = {"translation_unit": 0.1 + 0.2, "first_delta": "from_rest", "seed": 2**62 + 1}
    return small.start(RECIPE, **{**rules, **changes})


@pytest.fixture
def record(walked) -> ControlsRecord:
    return ControlsRecord.of(walked.history)


def test_a_record_comes_back_bit_for_bit(record):
    text = dump_controls(record)
    again = load_controls(text)
    assert again.start == record.start
    assert again.controls == record.controls
    for mine, theirs in zip(record.controls, again.controls, strict=True):
        assert mine.relative.tobytes() == theirs.relative.tobytes()
        assert mine.pose_after.tobytes() == theirs.pose_after.tobytes()
    assert dump_controls(again) == text
    assert [controls.prompt for controls in again.controls] == [None, SAID, None]


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_every_preset_comes_back(record, preset):
    changed = preset.with_overrides(shift=1 / 3)
    start = dataclasses.replace(record.start, preset=changed)
    relative = np.tile(np.eye(4), (preset.chunk, 1, 1))
    one = dataclasses.replace(record.controls[0], relative=relative, actions=None, keys=None)
    assert load_controls(dump_controls(ControlsRecord(start, (one,)))).start == start


@pytest.mark.parametrize("parts", [[3], [1, 2]])
def test_a_replay_makes_the_same_world_bit_for_bit(small, walked, record, parts):
    route = RecordedRoute(load_controls(dump_controls(record)))
    unit, rule = route.translation_unit()
    assert (unit, rule) == (0.1 + 0.2, "number")
    session = begin(
        small, translation_unit=unit, first_delta=route.first_delta, intrinsics=route.intrinsics(IMAGE), fps=24.0
    )
    for chunks in parts:
        for controls in route.controls(session, IMAGE, act=False, begin=len(session.history), chunks=chunks):
            if controls.prompt is not None:
                session.set_prompt(controls.prompt, states=STATES)
            session.advance(controls)
    for mine, theirs in zip(session.history.chunks, walked.history.chunks, strict=True):
        assert torch.equal(mine.latents, theirs.latents)
        assert mine.prompt == theirs.prompt
    assert dump_controls(ControlsRecord.of(session.history)) == dump_controls(record).replace(
        '"fps": 16.0', '"fps": 24.0'
    )
    with pytest.raises(LengthError, match="have 3 in all: steer the world anew after its end, or"):
        route.controls(session, IMAGE, act=False, begin=3)


class Elsewhere:
    """A session with another start, or other chunks."""

    def __init__(self, history: History) -> None:
        self.history, self.carry = history, history.carry


OTHERS = {
    "preset.window": {"preset": dataclasses.replace(RECIPE, window=None, sink=0)},
    "preset.selection": {"preset": dataclasses.replace(RECIPE, selection=TableSteps((0, 400)))},
    "prompt": {"prompt": "A river"},
    "negative_prompt": {"negative_prompt": "fog"},
    "seed": {"seed": 3},
    "noise": {"noise": "reference"},
    "image": {"image": "another"},
    "height": {"height": 32},
    "width": {"width": 48},
    "intrinsics": {"intrinsics": (1.0, 2.0, 3.0, math.nextafter(4.0, 5.0))},
    "translation_unit": {"translation_unit": math.nextafter(0.1 + 0.2, 1)},
    "first_delta": {"first_delta": "identity"},
    "model": {"model": "other weights"},
}


@pytest.mark.parametrize("field", OTHERS)
def test_each_difference_is_an_error_that_names_the_field(record, field):
    other = dataclasses.replace(record.start, **OTHERS[field])
    with pytest.raises(HistoryError, match=f"recorded with {field}=.*this world has {field}="):
        RecordedRoute(record).controls(Elsewhere(History(other)), IMAGE, act=False)


def test_another_size_is_named_before_the_picture_that_it_makes_another_one(record):
    other = dataclasses.replace(record.start, image="another", height=32, width=48)
    with pytest.raises(HistoryError, match="recorded with height="):
        record.require_same(other)


def test_what_does_not_change_the_world_is_no_difference(record):
    same = dataclasses.replace(record.start.preset, name="my own", overridden=("window",))
    other = dataclasses.replace(record.start, preset=same, fps=24.0, unit_rule="clip", chunks=7)
    record.require_same(other)
    reference = dataclasses.replace(record.start, noise="reference", chunks=3)
    with pytest.raises(HistoryError, match="recorded with chunks=3"):
        ControlsRecord(reference, record.controls).require_same(dataclasses.replace(reference, chunks=4))


def test_a_replay_goes_on_only_behind_the_recorded_chunks(walked, record):
    route, two = RecordedRoute(record), walked.history.first(2)
    assert list(route.controls(Elsewhere(two), IMAGE, act=False, begin=2)) == [record.controls[2]]
    with pytest.raises(HistoryError, match="the world has 2 chunks, but the record was entered at its chunk 0"):
        route.controls(Elsewhere(two), IMAGE, act=False)
    moved = dataclasses.replace(two.chunks[1], controls=record.controls[2])
    with pytest.raises(HistoryError, match="chunk 1 of this world is not the recorded one"):
        route.controls(Elsewhere(dataclasses.replace(two, chunks=(two.chunks[0], moved))), IMAGE, act=False, begin=2)
    said = dataclasses.replace(two.chunks[1], prompt="Rain")
    with pytest.raises(HistoryError, match="chunk 1 of this world is not the recorded one"):
        route.controls(Elsewhere(dataclasses.replace(two, chunks=(two.chunks[0], said))), IMAGE, act=False, begin=2)


@pytest.mark.parametrize("act", [False, True])
def test_beyond_its_end_a_record_stands_still_where_one_chose_to(walked, record, act):
    route = RecordedRoute(record).with_choices(stands_still=True)
    *recorded, fourth, fifth = route.controls(Elsewhere(walked.history.first(0)), IMAGE, act=act, chunks=5)
    assert tuple(recorded) == record.controls
    for controls in (fourth, fifth):
        np.testing.assert_allclose(controls.relative, np.tile(np.eye(4), (3, 1, 1)), atol=1e-12)
        np.testing.assert_allclose(controls.pose_after, record.controls[-1].pose_after, atol=1e-12)
        assert (controls.actions is not None) == act
    assert list(route.controls(Elsewhere(walked.history), IMAGE, act=act, begin=3, chunks=2)) == [fourth, fifth]


def test_runs_that_cannot_be_repeated_are_not_written_down(walked):
    with pytest.raises(HistoryError, match="no chunks yet"):
        ControlsRecord.of(walked.history.first(0))
    injected = dataclasses.replace(walked.history.chunks[0], noise="injected")
    with pytest.raises(HistoryError, match="noise 'injected'"):
        ControlsRecord.of(History(walked.history.start, (injected,)))


def test_a_prompt_that_was_set_beside_the_controls_is_recorded(walked):
    first, second, _ = walked.history.chunks
    quiet = dataclasses.replace(second, controls=dataclasses.replace(second.controls, prompt=None))
    record = ControlsRecord.of(History(walked.history.start, (first, quiet)))
    assert record.controls[1].prompt == second.prompt


def change(text: str, line: int, **fields) -> str:
    """The text with fields of one of its lines changed; a dot reaches into an object; None of a name removes it."""
    lines = text.splitlines()
    value = json.loads(lines[line])
    for name, new in fields.items():
        *path, last = name.split("__")
        place = value
        for step in path:
            place = place[step]
        if new is Ellipsis:
            del place[last]
        else:
            place[last] = new
    lines[line] = json.dumps(value)
    return "\n".join(lines)


NOT_RIGID = [[[2.0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 2, 0], [0, 0, 0, 1]]] * 3
DAMAGES = {
    "empty": (lambda t: " \n", "is empty"),
    "no JSON": (lambda t: "a {road}", "line 1 is damaged"),
    "a file's name": (lambda t: "records/walk_00001_.jsonl", "not the name of its file"),
    "not an object": (lambda t: "[{}]", "line 1 is damaged: it must be a JSON object"),
    "nested": (lambda t: "[" * 100_000 + "{", "line 1 is damaged"),
    "another file": (lambda t: '{"event_id": 1}', "line 1 is not the head of a record"),
    "newer": (lambda t: change(t, 0, version=2), "has version 2"),
    "no count": (lambda t: change(t, 0, chunks=True), "chunks=True must be a whole number"),
    "huge count": (lambda t: change(t, 0, chunks=10**9), "chunks=1000000000 must be"),
    "no start": (lambda t: change(t, 0, start=None), "start must be a JSON object"),
    "no seed": (lambda t: change(t, 0, start__seed=...), "start lacks the field 'seed'"),
    "more": (lambda t: change(t, 0, start__mood="sad"), "start has an unknown field 'mood'"),
    "preset": (lambda t: change(t, 0, start__preset="tiny"), "preset must be a JSON object"),
    "preset field": (lambda t: change(t, 0, start__preset__chunk="3"), "chunk='3' must be a whole number"),
    "preset type": (lambda t: change(t, 0, start__preset__shift="5"), "line 1"),
    "selection": (lambda t: change(t, 0, start__preset__selection={"indices": "x"}), "selection"),
    "selection values": (lambda t: change(t, 0, start__preset__selection={"indices": [5, 1]}), "must rise strictly"),
    "overridden": (lambda t: change(t, 0, start__preset__overridden=[1]), "overridden"),
    "name": (lambda t: change(t, 0, start__preset__name=1), "name 1 must be text"),
    "seed": (lambda t: change(t, 0, start__seed=-1), "seed=-1 is not a value"),
    "noise": (lambda t: change(t, 0, start__noise=[]), r"noise=\[\] is not a value"),
    "unit": (lambda t: change(t, 0, start__translation_unit=0), "translation_unit=0 is not a value"),
    "NaN": (lambda t: change(t, 0, start__fps=math.nan), "line 1 is damaged .NaN is no number"),
    "intrinsics": (lambda t: change(t, 0, start__intrinsics=[1, 2, 3]), "intrinsics="),
    "cut off": (lambda t: t[: len(t) // 2 * 2 - 600], "damaged|cut off"),
    "last line gone": (lambda t: "\n".join(t.splitlines()[:-1]), "cut off: it has 2 of 3 chunks"),
    "middle line gone": (lambda t: "\n".join(t.splitlines()[:2] + t.splitlines()[3:]), "chunk 1 is missing"),
    "a line twice": (lambda t: t + t.splitlines()[-1], "more than the 3 chunks"),
    "poses": (lambda t: change(t, 1, relative=NOT_RIGID), "chunk 0: relative: row 0 is not rigid"),
    "pose": (lambda t: change(t, 1, pose_after=NOT_RIGID[0]), "chunk 0: pose_after: row 0 is not rigid"),
    "infinity": (lambda t: change(t, 2, relative=[[[math.inf] * 4] * 4] * 3), "line 3 is damaged"),
    "one frame": (lambda t: change(t, 1, relative=[np.eye(4).tolist()], keys=None), "has 1 latent frames; .* has 3"),
    "no poses": (lambda t: change(t, 1, relative=...), "chunk 0: controls lack the field 'relative'"),
    "keys": (lambda t: change(t, 1, keys=["q", "", ""]), "chunk 0: .*'q' is not a key"),
    "prompt": (lambda t: change(t, 1, prompt=5), "chunk 0: controls: prompt must be text"),
    "long line": (lambda t: t + "x" * (1 << 21), "longer than 1048576 characters"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_records_are_refused_by_place(record, damage):
    spoil, message = DAMAGES[damage]
    with pytest.raises(InputFileError, match=message):
        load_controls(spoil(dump_controls(record)))


def test_no_cut_is_taken_for_a_whole_record(record):
    text = dump_controls(record)
    for end in range(0, len(text.rstrip()), 97):
        with pytest.raises(InputFileError):
            load_controls(text[:end])


def test_the_report_and_the_text_say_what_it_is(record):
    route = RecordedRoute(record)
    assert route.describe() == f"3 recorded chunks (preset window, seed {2**62 + 1})"
    assert json.dumps(route.report())
    assert (route.chunk, route.chunks, route.prompts) == (3, 3, (SAID,))
