"""What a client of the video socket may say, and what it is told when it may not."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.spatial.transform import Rotation
from video_server import camera, interaction, start

from lingbot_core.presets import get_preset
from lingbot_core.realtime.errors import MessageError
from lingbot_core.realtime.json_text import read_json
from lingbot_core.realtime.limits import Limits
from lingbot_core.realtime.video_messages import message_type, read_event_id, read_interaction, read_start

TINY, GUIDED = get_preset("tiny"), get_preset("v2-causal-pretrain")
STILL = [[], [], []]


def read(preset=TINY, **fields):
    return read_start(start(**fields), preset=preset, model="tiny")


def read_event(event, **fields):
    message = interaction(event, **fields)
    return read_interaction(message, read_event_id(message))


def refusal(function, *args, **fields) -> MessageError:
    with pytest.raises(MessageError) as caught:
        function(*args, **fields)
    return caught.value


# JSON


def test_json_comes_as_it_is():
    text = '{"type": "session.ping", "a": [1, -2.5e3, null, true, "\\u00e9 [,{"], "b": {}}'
    assert read_json(text) == {"type": "session.ping", "a": [1, -2500.0, None, True, "é [,{"], "b": {}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ('{"a": 1} {}', "not valid JSON"),
        ("[1]", "no object"),
        ("null", "no object"),
        ('{"a": NaN}', "NaN is no JSON"),
        ('{"a": -Infinity}', "-Infinity is no JSON"),
        ('{"a": 1e999}', "too large"),
        ('{"a": ' + "9" * 21 + "}", "21 digits"),
        ('{"a": 1, "b": 2, "a": 3}', "field 'a' twice"),
        ('{"x": {"' + "k" * 100 + '": 1, "' + "k" * 100 + '": 2}}', "field '" + "k" * 40 + "' twice"),
        ('{"a": ' + "[" * 100_000, "not valid JSON|deep in one another"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "deep in one another"),
        ('{"a": [' + ",".join(["[]"] * 200_000) + "]}", "at most 250000 are read"),
    ],
)
def test_json_that_is_refused(text, message):
    error = refusal(read_json, text)
    assert error.code == "malformed_payload"
    with pytest.raises(MessageError, match=message):
        raise error


def test_depth_and_entries_reach_their_bounds_and_do_not_pass_them():
    limits = Limits(depth=3, items=4)
    assert read_json('{"a": [[1, 2]]}', limits) == {"a": [[1, 2]]}
    assert "more than 3 deep" in str(refusal(read_json, '{"a": [[[]]]}', limits))
    assert "5 entries" in str(refusal(read_json, '{"a": [[1, 2, 3]]}', limits))


# session.start


def test_a_start_that_says_little():
    got = read()
    assert (got.prompt, got.preset, got.size, got.fps, got.seed) == ("a sunny day", TINY, (32, 48), 16.0, 0)
    assert (got.chunks, got.script, got.action_path, got.translation_unit, got.first_delta) == (None,) * 5
    assert got.unknown == ()


def test_a_start_that_says_all_that_this_model_can_honour():
    got = read(
        model="tiny",
        format="m4s",
        size="64x32",
        width=None,
        height=None,
        fps=8,
        num_frames=25,
        num_inference_steps=4,
        guidance_scale=1.0,
        true_cfg_scale=1,
        flow_shift=3,
        negative_prompt="",
        seed=7,
        extra_params={
            "flow_shift": 3.0,
            "camera_action_script": [[["w"], [], ["w", "j"]], STILL],
            "translation_unit": 0.1,
            "first_delta": "identity",
        },
    )
    assert (got.size, got.fps, got.seed, got.chunks) == ((32, 64), 8.0, 7, 2)
    assert (got.preset.shift, got.preset.overridden) == (3.0, ("shift",))
    assert got.script == ((frozenset("w"), frozenset(), frozenset("wj")), (frozenset(),) * 3)
    assert (got.translation_unit, got.first_delta) == (0.1, "identity")


def test_a_guided_preset_honours_what_a_distilled_one_cannot():
    got = read(GUIDED, num_inference_steps=20, guidance_scale=3, negative_prompt="ugly", flow_shift=5)
    assert (got.preset.steps, got.preset.guidance_scale, got.preset.shift) == (20, 3.0, 5.0)
    assert got.preset.negative_prompt == "ugly"
    assert read(GUIDED).preset == GUIDED
    assert read(GUIDED, negative_prompt="").preset.negative_prompt == ""
    assert refusal(read, GUIDED, guidance_scale=1, negative_prompt="ugly").code == "unsupported"


def test_what_the_preset_says_anyway_is_no_change_of_it():
    assert read(num_inference_steps=4, guidance_scale=1, flow_shift=1.5).preset == TINY


@pytest.mark.parametrize(
    ("fields", "chunks"),
    [
        ({"num_frames": 9}, 1),
        ({"num_frames": 20}, 1),
        ({"num_frames": 21}, 2),
        ({"num_frames": 81}, 7),
        ({"seconds": 5}, 6),  # 80 frames: 20 latent frames
        ({"seconds": "5"}, 6),
        ({"seconds": 5, "fps": 8}, 3),
        ({"extra_params": {"camera_action_script": [STILL] * 5}}, 5),
        ({"num_frames": 21, "extra_params": {"camera_action_script": [STILL] * 2}}, 2),
    ],
)
def test_the_length_in_chunks(fields, chunks):
    got = read(**fields)
    assert got.chunks == chunks
    if got.num_frames is not None:
        assert chunks == ((got.num_frames - 1) // 4 + 1) // 3


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"prompt": None}, "missing_field", "needs prompt"),
        ({"prompt": 3}, "malformed_payload", "prompt must be text"),
        ({"prompt": "x" * 20_001}, "malformed_payload", "prompt must be text of at most 20000"),
        ({"prompt": "\ud800"}, "malformed_payload", "prompt holds half of a surrogate pair"),
        ({"image_reference": None}, "missing_field", "image_reference"),
        ({"image_reference": "data:"}, "malformed_payload", "image_reference must be a map"),
        ({"image_reference": {}}, "missing_field", "image_reference"),
        ({"image_reference": {"image_url": 5}}, "malformed_payload", "image_url must be text"),
        ({"image_reference": {"image_url": "data:", "file_id": "f"}}, "unsupported", "image_reference.file_id"),
        ({"model": "huge"}, "unsupported", "model='huge' .* 'tiny'"),
        ({"model": 1}, "malformed_payload", "model must be text"),
        ({"format": "mp4"}, "unsupported", "format='mp4' .* m4s"),
        ({"num_inference_steps": 8}, "unsupported", "num_inference_steps=8 .* 4 steps"),
        ({"num_inference_steps": 0}, "malformed_payload", "num_inference_steps must be"),
        ({"num_inference_steps": True}, "malformed_payload", "num_inference_steps must be"),
        ({"guidance_scale": 5}, "unsupported", "guidance_scale=5 .* distilled"),
        ({"guidance_scale": "5"}, "malformed_payload", "guidance_scale must be"),
        ({"guidance_scale_2": 1}, "unsupported", "guidance_scale_2=1"),
        ({"boundary_ratio": 0.5}, "unsupported", "boundary_ratio=0.5"),
        ({"true_cfg_scale": 4}, "unsupported", "true_cfg_scale=4"),
        ({"flow_shift": 0.0001}, "unsupported", "shift=0.0001"),
        ({"flow_shift": -1}, "malformed_payload", "flow_shift must be"),
        ({"flow_shift": 2, "extra_params": {"flow_shift": 3}}, "malformed_payload", "flow_shift is given twice"),
        ({"negative_prompt": "ugly"}, "unsupported", "negative_prompt='ugly' .* guidance"),
        ({"width": 40}, "unsupported", "width=40 must be a positive multiple of 16"),
        ({"height": 8}, "unsupported", "height=8 must be a positive multiple of 16"),
        ({"width": 16_384}, "malformed_payload", "width must be a whole number from 1 to 8192"),
        ({"width": None}, "missing_field", "width and height together"),
        ({"size": "96x64"}, "malformed_payload", "size says 96x64, but width and height say 48x32"),
        ({"size": "large"}, "malformed_payload", "size must be text such as"),
        ({"size": "-48x32"}, "malformed_payload", "size must be text such as"),
        ({"size": "99999x32"}, "malformed_payload", "size must be text such as"),
        ({"size": "48x40", "width": None, "height": None}, "unsupported", "height=40"),
        ({"fps": 0}, "malformed_payload", "fps must be a number above 0 and at most 240"),
        ({"fps": 241}, "malformed_payload", "fps must be a number above 0 and at most 240"),
        ({"num_frames": 8}, "unsupported", "8 frames are less than one chunk of 9"),
        ({"num_frames": 10.0}, "malformed_payload", "num_frames must be"),
        ({"num_frames": 10**6}, "malformed_payload", "num_frames must be"),
        ({"seconds": 0.5}, "unsupported", "8 frames are less than one chunk"),
        ({"seconds": "soon"}, "malformed_payload", "seconds must be a number"),
        ({"seconds": "nan"}, "malformed_payload", "seconds must be a number"),
        ({"seconds": True}, "malformed_payload", "seconds must be a number"),
        ({"seconds": 1e5}, "unsupported", "1600000 frames"),
        ({"seconds": 5, "num_frames": 81}, "malformed_payload", "num_frames and seconds exclude each other"),
        ({"seed": -1}, "malformed_payload", "seed must be"),
        ({"seed": 2**63}, "malformed_payload", "seed must be"),
        ({"extra_params": []}, "malformed_payload", "extra_params must be a map"),
        ({"extra_params": {"translation_unit": []}}, "malformed_payload", "extra_params.translation_unit must be"),
        ({"extra_params": {"first_delta": "jump"}}, "malformed_payload", "extra_params.first_delta must be"),
        ({"extra_params": {"action_path": 5}}, "malformed_payload", "action_path must be text"),
        (
            {"extra_params": {"action_path": "a", "camera_action_script": [STILL]}},
            "malformed_payload",
            "exclude each other",
        ),
    ],
)
def test_a_start_that_is_refused_by_name(fields, code, message):
    error = refusal(read, **fields)
    assert error.code == code
    with pytest.raises(MessageError, match=message):
        raise error


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("w-10", "must be a list of 1 to"),
        ([], "must be a list of 1 to"),
        ([STILL] * 9000, "must be a list of 1 to 8333"),
        ([STILL, "w"], r"camera_action_script\[1\] is no list"),
        ([[["w"], []]], r"camera_action_script\[0\] has 2 entries; a chunk has 3 latent frames"),
        ([[["w"], [], "w"]], r"camera_action_script\[0\]\[2\] is 'w'"),
        ([[["w"], [], ["x"]]], r"camera_action_script\[0\]\[2\] is \['x'\]"),
        ([[["w"], [], ["wd"]]], r"camera_action_script\[0\]\[2\] is \['wd'\]"),
        ([[["w"], [], [["w"]]]], r"camera_action_script\[0\]\[2\] is \[\['w'\]\]"),
    ],
)
def test_a_script_that_is_refused(script, message):
    error = refusal(read, extra_params={"camera_action_script": script})
    assert error.code == "bad_camera"
    with pytest.raises(MessageError, match=message):
        raise error


def test_a_script_and_a_length_have_to_agree():
    error = refusal(read, num_frames=81, extra_params={"camera_action_script": [STILL] * 6})
    assert error.code == "bad_camera"
    assert "6 chunks, but 81 frames are 7 chunks" in str(error)


def test_fields_that_mean_nothing_are_named():
    assert read(n=1, extra_params={"lora": "x"}).unknown == ("n", "extra_params.lora")


# session.interaction


def test_an_interaction_with_all_that_there_is():
    half = math.sqrt(0.5)
    event = {"prompt": "snow", **camera("velocity", (1, -2, 0.5), (0, half, 0, half))}
    got = read_event(event, event_id="e", transition_chunks=3)
    assert (got.event_id, got.prompt, got.transition_chunks) == ("e", "snow", 3)
    assert got.camera.mode == "velocity"
    assert got.camera.pose[:3, 3].tolist() == [1, -2, 0.5]
    # A quarter turn about +Y takes the view from +Z to +X.
    assert got.camera.pose[:3, 2] == pytest.approx([1, 0, 0], abs=1e-12)


def test_what_an_interaction_may_leave_out():
    got = read_event(camera(None, (1, 0, 0)))
    assert (got.camera.mode, got.prompt, got.transition_chunks) == ("target", None, None)
    assert len(got.event_id) == 32
    assert got.event_id != read_event(camera(None)).event_id
    assert read_event({"prompt": "snow"}).camera is None


def test_a_quaternion_that_is_nearly_of_length_one_is_a_rotation():
    rotation = Rotation.from_euler("xyz", [10, 20, 30], degrees=True)
    got = read_event(camera("target", rotation=(1.003 * rotation.as_quat()).tolist()))
    assert np.allclose(got.camera.pose[:3, :3], rotation.as_matrix(), atol=1e-12)


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        ({"type": "session.interaction"}, "missing_field", "needs the object interaction"),
        ({"type": "session.interaction", "interaction": []}, "malformed_payload", "interaction must be a map"),
        (interaction({"prompt": "x"}, event_id=5), "malformed_payload", "event_id must be text"),
        (interaction({"prompt": "x"}, event_id=""), "malformed_payload", "event_id must be text"),
        (interaction({"prompt": "x"}, event_id="x" * 257), "malformed_payload", "event_id must be text"),
        (interaction({"prompt": "x"}, event_id="\udc00"), "malformed_payload", "event_id holds half"),
        (interaction({"prompt": "x"}, transition_chunks=-1), "malformed_payload", "transition_chunks must be"),
        (interaction({"prompt": "x"}, transition_chunks=1.5), "malformed_payload", "transition_chunks must be"),
        (interaction({"prompt": "x"}, transition_chunks=1001), "malformed_payload", "transition_chunks must be"),
        (interaction(None), "missing_field", "needs the object event"),
        (interaction({}), "missing_field", "changes nothing"),
        (interaction({"multi_modal_data": {"audio": 1}}), "missing_field", "changes nothing"),
        (interaction({"prompt": " "}), "malformed_payload", "event.prompt must not be empty"),
        (interaction({"prompt": 5}), "malformed_payload", "prompt must be text"),
        (interaction({"prompt": "x", "negative_prompt": "y"}), "unsupported", "negative_prompt='y'"),
        (interaction({"multi_modal_data": "w"}), "malformed_payload", "multi_modal_data must be a map"),
        (interaction({"multi_modal_data": {"camera": ["w"]}}), "malformed_payload", "camera must be a map"),
        (interaction({"multi_modal_data": {"camera": {}}}), "missing_field", "camera needs the object data"),
        (interaction(camera("fly")), "bad_camera", "mode must be velocity or target, not 'fly'"),
        (
            interaction({"multi_modal_data": {"camera": {"keys": "w", "data": {}}}}),
            "bad_camera",
            "camera has no field keys",
        ),
        (interaction({"multi_modal_data": {"camera": {"data": {}}}}), "missing_field", r"translation \[3\]"),
        (interaction(camera("target", (0, 0))), "bad_camera", "translation must be 3 numbers"),
        (interaction(camera("target", (0, 0, "1"))), "bad_camera", "translation must be 3 numbers"),
        (interaction(camera("target", (0, 0, True))), "bad_camera", "translation must be 3 numbers"),
        (interaction(camera("target", (0, 0, 1.1e9))), "bad_camera", "translation must be 3 numbers"),
        (interaction(camera("target", rotation=(0, 0, 0))), "bad_camera", "rotation must be 4 numbers"),
        (interaction(camera("target", rotation=(0, 0, 0, 0))), "bad_camera", "rotation has the length 0"),
        (interaction(camera("target", rotation=(0, 0, 1, 1))), "bad_camera", "rotation has the length 1.414"),
    ],
)
def test_an_interaction_that_is_refused(message, code, words):
    with pytest.raises(MessageError, match=words) as caught:
        read_interaction(message, read_event_id(message))
    assert caught.value.code == code


def test_data_with_a_field_too_many_is_refused():
    event = camera("target")
    event["multi_modal_data"]["camera"]["data"]["fov"] = 90
    assert "camera.data has no field fov" in str(refusal(read_event, event))


def test_fields_of_an_interaction_that_mean_nothing_are_named():
    message = interaction({"prompt": "x", "mood": 1, "multi_modal_data": {"audio": 1}}, when="now")
    message["extra"] = 1
    assert read_interaction(message, "e").unknown == (
        "extra",
        "interaction.when",
        "event.mood",
        "multi_modal_data.audio",
    )


@pytest.mark.parametrize(
    ("message", "code"), [({}, "missing_field"), ({"type": 3}, "malformed_payload"), ({"type": None}, "missing_field")]
)
def test_a_message_needs_a_type(message, code):
    assert refusal(message_type, message).code == code
    assert message_type(json.loads('{"type": "session.ping"}')) == "session.ping"
