"""The camera nodes, called as ComfyUI calls them."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from pathlib import Path

import execution
import folder_paths
import nodes as comfy_nodes
import numpy as np
import pytest
from comfy_api.latest import io

CAMERA_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "03"
NAMES = ["LingBotCameraKeys", "LingBotCameraLoad", "LingBotControls", "LingBotWorldEvents", "LingBotControlsRecord"]


@pytest.fixture
def camera(pack):
    return importlib.import_module(f"{pack.__name__}.nodes.camera")


@pytest.fixture
def core(pack):
    """``core("engine.route")``: a module of the pack's own engine."""
    return lambda name: importlib.import_module(f"{pack.__name__}.lingbot_core.{name}")


@pytest.fixture
def error(core):
    """The pack's family of errors."""
    return core("errors").LingBotError


@pytest.fixture
def inputs(tmp_path, monkeypatch) -> Path:
    """An empty input folder."""
    folder = tmp_path / "input"
    folder.mkdir()
    monkeypatch.setattr(folder_paths, "input_directory", str(folder))
    return folder


def call(node: type[io.ComfyNode], **values) -> tuple:
    """The outputs of a node, which is cloned and locked as the server does."""
    return node.PREPARE_CLASS_CLONE(None).EXECUTE_NORMALIZED(**values).result


def line(poses: int) -> np.ndarray:
    out = np.tile(np.eye(4, dtype=np.float32), (poses, 1, 1))
    out[:, 2, 3] = np.arange(poses) * 0.05
    return out


# Schemas


def test_every_node_is_listed_once_and_every_input_and_output_explains_itself(pack, camera):
    assert [node.GET_SCHEMA().node_id for node in camera.NODES] == NAMES
    listed = asyncio.run(asyncio.run(pack.comfy_entrypoint()).get_node_list())
    assert [node.GET_SCHEMA().node_id for node in listed if node in camera.NODES] == NAMES
    for node in camera.NODES:
        schema = node.GET_SCHEMA()
        assert schema.category.startswith("LingBot World")
        assert schema.description
        assert len(schema.search_aliases) >= 3
        assert all(one.tooltip for one in schema.inputs)
        assert all(one.tooltip and one.display_name for one in schema.outputs)


def test_scripts_need_only_the_inputs_without_which_there_is_nothing(camera):
    required = {
        node.GET_SCHEMA().node_id: [i.id for i in node.GET_SCHEMA().inputs if not i.optional] for node in camera.NODES
    }
    assert required == {
        "LingBotCameraKeys": ["keys"],
        "LingBotCameraLoad": ["file"],
        "LingBotControls": ["preset"],
        "LingBotWorldEvents": ["script", "preset"],
        "LingBotControlsRecord": ["world"],
    }  # fmt: skip


# Keys


def test_keys_make_a_path_with_its_length_and_a_text(camera, core):
    path, frames, text = call(camera.LingBotCameraKeys, keys="w-16, none-8")
    assert isinstance(path, core("camera.trajectory").CameraTrajectory)
    assert (len(path), frames) == (25, 25)
    assert text.startswith("25 frames, 1.56 s at 16 fps")
    fast, frames, _ = call(camera.LingBotCameraKeys, keys="w-6", key_steps="per-latent", speed=2.0)
    assert frames == 25
    assert fast.poses[-1, 2, 3] == pytest.approx(0.6, abs=1e-5)


@pytest.mark.parametrize("keys", ["", "q-3", "w", "w-1000000000", "w-999999,w-1", "w-0", "\0-3"])
def test_keys_that_are_none_are_refused(camera, error, keys):
    with pytest.raises(error):
        call(camera.LingBotCameraKeys, keys=keys)


# Files


def test_a_folder_of_the_input_folder_is_listed_and_read_with_all_that_lies_in_it(camera, inputs):
    (inputs / "walks" / "one").mkdir(parents=True)
    for name in ("poses", "intrinsics", "action"):
        (inputs / "walks" / "one" / f"{name}.npy").write_bytes((CAMERA_FOLDER / f"{name}.npy").read_bytes())
    np.save(inputs / "alone.npy", line(9))
    (inputs / "picture.png").write_bytes(b"")
    choice = next(i for i in camera.LingBotCameraLoad.define_schema().inputs if i.id == "file")
    assert choice.options[1:] == [
        "walks/one/", "alone.npy", "walks/one/action.npy", "walks/one/intrinsics.npy", "walks/one/poses.npy"
    ]  # fmt: skip
    for name in ("walks/one/", "walks/one/poses.npy"):
        path, frames, text = call(camera.LingBotCameraLoad, file=name)
        assert (len(path), frames, path.actions.shape) == (269, 269, (269, 4))
        np.testing.assert_array_equal(path.poses, np.load(CAMERA_FOLDER / "poses.npy").astype(np.float64))
        np.testing.assert_allclose(path.intrinsics, np.load(CAMERA_FOLDER / "intrinsics.npy"))
        assert "with actions" in text
    bare, _, _ = call(camera.LingBotCameraLoad, file="walks/one/", intrinsics="default", actions=False)
    assert bare.intrinsics_are_default
    assert bare.actions is None
    np.save(inputs / "lens.npy", np.array([[250.0, 250, 208, 240]]))
    other, _, _ = call(camera.LingBotCameraLoad, file="alone.npy", intrinsics="lens.npy", width=416)
    assert (len(other), other.width, other.intrinsics_are_default) == (9, 416, False)


def test_links_that_lead_in_circles_are_followed_once(camera, inputs):
    (inputs / "a").mkdir()
    np.save(inputs / "a" / "poses.npy", line(9))
    (inputs / "a" / "again").symlink_to(inputs)
    choice = next(i for i in camera.LingBotCameraLoad.define_schema().inputs if i.id == "file")
    assert choice.options[1:] == ["a/", "a/poses.npy"]


def test_a_typed_path_is_read_wherever_it_is(camera, tmp_path):
    for path in (CAMERA_FOLDER, CAMERA_FOLDER / "poses.npy", f' "{CAMERA_FOLDER}" '):
        camera_path, _, _ = call(camera.LingBotCameraLoad, file="(path below)", path=str(path))
        assert (len(camera_path), camera_path.intrinsics_are_default) == (269, False)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.npy",
        "/etc/passwd",
        "a/../../secret.npy",
        "..\\secret.npy",
        "C:\\secret.npy",
        "",
        " ",
        "a\0b",
        "gone.npy",
    ]
    + ["x" * 300, "secret.npy [output]"],
)
def test_names_that_lead_out_of_the_input_folder_are_refused(camera, inputs, error, name):
    np.save(inputs.parent / "secret.npy", line(9))
    with pytest.raises(error, match="input folder"):
        call(camera.LingBotCameraLoad, file=name)
    with pytest.raises(error, match="input folder"):
        call(camera.LingBotCameraLoad, file="(path below)", path=str(CAMERA_FOLDER), intrinsics=name)
    assert isinstance(camera.LingBotCameraLoad.validate_inputs(file=name), str)


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickles_are_never_loaded(camera, inputs, error):
    trap = inputs / "sprung"
    np.save(inputs / "objects.npy", np.array([Trap(trap)], dtype=object), allow_pickle=True)
    (inputs / "pickle.npy").write_bytes(__import__("pickle").dumps(Trap(trap)))
    with pytest.raises(error, match="holds pickled objects, which are never loaded"):
        call(camera.LingBotCameraLoad, file="objects.npy")
    with pytest.raises(error, match=r"is not a \.npy file"):
        call(camera.LingBotCameraLoad, file="pickle.npy")
    assert not trap.exists()


def test_bad_poses_are_refused_with_their_row(camera, inputs, error):
    nan, scaled, mirrored = line(9), line(9), line(9)
    nan[3, 0, 3] = np.nan
    scaled[4, :3, :3] *= 2
    mirrored[5, 0, 0] = -1
    for array, message in (
        (nan, "row 3 holds NaN"),
        (scaled, "row 4 is not rigid.*divide its rotation by its scale 2"),
        (mirrored, "row 5 is left-handed"),
        (line(9)[:, 0], r"has shape \[9, 4\]"),
        (np.zeros((9, 5, 5)), r"has shape \[9, 5, 5\]"),
        (np.zeros((100_001, 1)), "at most 100000 rows"),
        (np.array(["w"]), "dtype"),
    ):
        np.save(inputs / "bad.npy", array)
        with pytest.raises(error, match=f"bad.npy.*{message}"):
            call(camera.LingBotCameraLoad, file="bad.npy")
    (inputs / "cut").mkdir()
    data = (CAMERA_FOLDER / "poses.npy").read_bytes()
    (inputs / "cut" / "poses.npy").write_bytes(data[:-100])
    with pytest.raises(error, match="truncated"):
        call(camera.LingBotCameraLoad, file="cut/")
    (inputs / "none").mkdir()
    with pytest.raises(error, match="does not exist"):
        call(camera.LingBotCameraLoad, file="none")
    np.save(inputs / "none" / "poses.npy", line(9))
    np.save(inputs / "none" / "action.npy", np.zeros((8, 4)))
    with pytest.raises(error, match="8 rows of actions for 9 poses"):
        call(camera.LingBotCameraLoad, file="none/")


@pytest.mark.parametrize(
    ("file", "path", "message"),
    [
        ("(path below)", "", "no camera is given"),
        ("(path below)", "poses.npy", "is not absolute"),
        ("(path below)", "/nowhere/at/all", "does not exist"),
        ("(path below)", "/dev/zero", "is not a file"),
        ("(path below)", "/tmp\0", "NUL"),
        ("(path below)", "/" + "x" * 5000, "cannot be read"),
        ("(path below)", "~nobody-of-that-name/poses.npy", "cannot be used"),
        ("alone.npy", "/tmp", "both the file"),
    ],
)
def test_bad_paths_are_refused(camera, inputs, error, file, path, message):
    np.save(inputs / "alone.npy", line(9))
    with pytest.raises(error, match=message):
        call(camera.LingBotCameraLoad, file=file, path=path)


def test_a_file_is_read_again_when_it_has_changed(camera, inputs):
    (inputs / "a").mkdir()
    np.save(inputs / "a" / "poses.npy", line(9))
    before = camera.LingBotCameraLoad.fingerprint_inputs(file="a/")
    assert camera.LingBotCameraLoad.fingerprint_inputs(file="a/") == before
    assert str(inputs) not in str(before)  # ComfyUI saves it with pictures and videos
    np.save(inputs / "a" / "intrinsics.npy", np.array([500.0, 500, 416, 240]))
    assert camera.LingBotCameraLoad.fingerprint_inputs(file="a/") != before
    assert camera.LingBotCameraLoad.fingerprint_inputs(file=None, path=None) is None


# Controls


def test_controls_from_each_source(camera, core):
    path, _, _ = call(camera.LingBotCameraKeys, keys="w-100")
    route, chunks, frames, text = call(camera.LingBotControls, preset="v1-fast", camera=path)
    assert isinstance(route, core("engine.route").Route)
    assert (chunks, frames, route.chunk, route.unit, route.first_delta) == (8, 93, 3, "clip", "identity")
    assert "8 chunks, 93 frames" in text
    assert "translation unit" in text
    cut = call(camera.LingBotControls, preset="v2-causal-fast", camera=path, frames=100, length="cut", snap="down")
    assert cut[1:3] == (6, 93)
    keys = call(camera.LingBotControls, preset="v1-fast", keys="w-6", chunks=4, length="hold")
    assert (keys[1], keys[0].unit, keys[0].first_delta) == (4, "key", "from_rest")
    held = call(
        camera.LingBotControls, preset="v1-fast", keys="w", chunks=5, translation_unit="0.5", first_delta="identity"
    )
    assert (held[1], held[0].translation_unit(), held[0].first_delta) == (5, (0.5, "number"), "identity")
    rows = call(camera.LingBotControls, preset="v1-fast", events="0: Noon | w\n3: Night", speed=2.0)
    assert (rows[1], rows[0].prompts, rows[0].translation_unit()[0]) == (4, ("Noon", "Night"), 0.1)
    assert call(camera.LingBotControls, preset="v1-fast", keys="w", chunk=5)[0].chunk == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "nothing is given; give exactly one"),
        ({"keys": "w-3", "events": "0: a"}, "keys and events are given"),
        ({"keys": "q-3"}, "'q' is not a key"),
        ({"keys": "w-3", "chunks": 4}, "4 chunks were asked for, but .* have 1"),
        ({"keys": "w-1000000000"}, "not a number of frames"),
        ({"keys": "w-3", "frames": 5}, "5 frames are less than one chunk"),
        ({"keys": "w-3", "frames": 9, "chunks": 1}, "give one of them"),
        ({"keys": "w-3", "translation_unit": "mile"}, "'mile' is unknown"),
        ({"keys": "w-3", "translation_unit": "-1"}, "must be a number above 0"),
        ({"keys": "w-3", "speed": float("nan")}, "speed=nan must be a number"),
        ({"keys": "w-3", "preset": "none"}, "there is no preset 'none'"),
        ({"events": "0: a\nb"}, "line 2"),
        ({"events": '{"event_id": 1, "frames": []}'}, "event script, line 1: frames has 0 entries"),
        ({"events": "/etc/passwd"}, "does not begin with a chunk"),
        ({"record": "{}"}, "line 1 is not the head"),
    ],
)
def test_bad_controls_are_refused(camera, error, values, message):
    with pytest.raises(error, match=message):
        call(camera.LingBotControls, **{"preset": "v1-fast", **values})


def test_a_path_that_is_too_short_says_what_would_do(camera, error):
    path, _, _ = call(camera.LingBotCameraKeys, keys="w-48")
    with pytest.raises(error, match=r"49 poses for 93 frames: ask for 49 frames or less, use a longer path, or stand"):
        call(camera.LingBotControls, preset="v1-fast", camera=path, chunks=8)
    assert call(camera.LingBotControls, preset="v1-fast", camera=path, chunks=8, length="hold")[1] == 8
    with pytest.raises(TypeError, match="camera input got a dict of another pack"):
        call(camera.LingBotControls, preset="v1-fast", camera={"poses": []})


# Events


def test_events_make_prompts_and_keys_per_chunk(camera):
    route, chunks, frames, text = call(
        camera.LingBotWorldEvents, script="0: Noon | w\n2: Night | wj j none", preset="v1-fast", chunks=4
    )
    assert (chunks, frames, route.prompts) == (4, 45, ("Noon", "Night"))
    assert "4 of 4 script lines" in text
    lines = "\n".join(json.dumps({"event_id": i, "frames": [["w"], [], []]}) for i in range(2))
    assert call(camera.LingBotWorldEvents, script=lines, preset="v1-fast")[1] == 2
    assert call(camera.LingBotWorldEvents, script=lines, preset="v1-fast", chunks=5, stand_still=True)[1] == 5


@pytest.mark.parametrize(
    ("script", "chunks", "message"),
    [
        ("", 0, "there are no events"),
        ("0: a\n\nnight", 0, "events, line 3"),
        ("0: a | zz", 0, "line 1: .*'z' is not a key"),
        ('{"event_id": 0}', 3, "3 chunks were asked for, but .* have 1"),
        ('{"event_id": 0}\n{"event_id": 0}', 0, "line 2: event_id 0 follows 0"),
        ("999999999: a", 0, "beyond the 10000 chunks"),
    ],
)
def test_bad_events_are_refused_by_line(camera, error, script, chunks, message):
    with pytest.raises(error, match=message):
        call(camera.LingBotWorldEvents, script=script, preset="v1-fast", chunks=chunks)


# The record of a run


@pytest.fixture
def history(core):
    """Two chunks of keys, as a session would have made them."""
    torch, h = importlib.import_module("torch"), core("engine.history")
    preset = core("presets").get_preset("tiny")
    start = h.StartRecord(
        preset, "A road", "", 5, "seeded", "d1", 48, 80, (50.0, 50.0, 40, 24), 0.05, "key", "from_rest", 16, None, "m"
    )  # fmt: skip
    controls, carry = core("camera.controls"), core("camera.controls").CameraCarry.start()
    out = h.History(start)
    for index, keys in enumerate((("w", "w", "wj"), ("", "l", ""))):
        motion = controls.KeyMotion(keys, core("camera.keys").PER_LATENT)
        made, carry = controls.to_controls(
            motion, latents=3, unit=0.05, first_delta="from_rest", carry=carry, prompt="Night" if index else None
        )
        out = out.append(h.ChunkRecord(index, made, made.prompt or "A road", "seeded", torch.zeros(1), None, {}))
    return out


class Handle:
    """What the WORLD socket carries, as far as this node looks."""

    def __init__(self, history) -> None:
        self.history = history


class Session:
    """A session that was just started, as far as a route looks."""

    def __init__(self, history) -> None:
        self.history, self.carry = history, history.carry


def test_a_run_is_written_down_and_replayed_exactly(camera, history, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    route, text, file = call(camera.LingBotControlsRecord, world=Handle(history), filename_prefix="runs/road")
    assert file == str(tmp_path / "runs" / "road_00001_.jsonl")
    assert Path(file).read_text(encoding="utf-8") == text
    assert call(camera.LingBotControlsRecord, world=Handle(history), filename_prefix="runs/road")[2].endswith(
        "00002_.jsonl"
    )
    again, chunks, frames, shown = call(camera.LingBotControls, preset="tiny", record=text)
    assert (chunks, frames) == (2, 21)
    assert "2 recorded chunks (preset tiny, seed 5)" in shown
    begun = Session(history.first(0))
    recorded = list(again.controls(begun, None, act=False))
    assert [one.relative.tobytes() for one in recorded] == [c.controls.relative.tobytes() for c in history.chunks]
    assert recorded == list(route.controls(begun, None, act=False))
    assert [one.prompt for one in recorded] == [None, "Night"]


def test_a_record_is_repeated_as_it_was_or_not_at_all(camera, history, core, error):
    _, text, file = call(camera.LingBotControlsRecord, world=Handle(history))
    assert file == ""
    for values in (
        {"chunks": 1},
        {"frames": 9},
        {"translation_unit": "clip"},
        {"first_delta": "identity"},
        {"snap": "up"},
    ):
        with pytest.raises(error, match="a record is repeated as it was"):
            call(camera.LingBotControls, preset="tiny", record=text, **values)
    with pytest.raises(error, match="chunks of 3 latent frames, but the preset v2-causal-fast has 4"):
        call(camera.LingBotControls, preset="v2-causal-fast", record=text)
    with pytest.raises(error, match="cut off: it has 1 of 2 chunks"):
        call(camera.LingBotControls, preset="tiny", record="\n".join(text.splitlines()[:2]))
    with pytest.raises(error, match="no chunks yet"):
        call(camera.LingBotControlsRecord, world=Handle(history.first(0)))
    with pytest.raises(TypeError, match="world input got a dict of another pack"):
        call(camera.LingBotControlsRecord, world={})
    (route, *_) = call(camera.LingBotControls, preset="tiny", record=text)
    other = importlib.import_module("dataclasses").replace(history.start, seed=6)
    with pytest.raises(error, match="recorded with seed=5, but this world has seed=6"):
        route.controls(Session(core("engine.history").History(other)), None, act=False)


@pytest.mark.parametrize("prefix", ["../out", "/etc/out", "a/../../out", "a\0b", "x" * 300])
def test_files_outside_the_output_folder_are_not_written(camera, history, error, tmp_path, monkeypatch, prefix):
    folder = tmp_path / "output"
    folder.mkdir()
    monkeypatch.setattr(folder_paths, "output_directory", str(folder))
    with pytest.raises(error):
        call(camera.LingBotControlsRecord, world=Handle(history), filename_prefix=prefix)
    assert [path.name for path in tmp_path.rglob("*")] == ["output"]


def test_a_record_of_any_prompt_is_saved_and_comes_back(camera, history, core, tmp_path, monkeypatch):
    replace = importlib.import_module("dataclasses").replace
    half = replace(history, start=replace(history.start, prompt="half \ud83d"))
    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    _, text, file = call(camera.LingBotControlsRecord, world=Handle(half), filename_prefix="half \ud83d")
    assert Path(file).read_bytes() == text.encode()
    assert core("engine.controls_file").load_controls(text).start.prompt == "half \ud83d"


# Through ComfyUI's own checks


def test_the_queue_takes_a_file_that_was_uploaded_after_the_list_was_made(camera, inputs, monkeypatch):
    for node in camera.NODES:
        monkeypatch.setitem(comfy_nodes.NODE_CLASS_MAPPINGS, node.GET_SCHEMA().node_id, node)
    prompt = {
        "1": {"class_type": "LingBotCameraLoad", "inputs": {"file": "late/poses.npy"}},
        "2": {"class_type": "LingBotControls", "inputs": {"preset": "tiny", "camera": ["1", 0], "chunks": 2}},
        "3": {"class_type": "PreviewAny", "inputs": {"source": ["2", 3]}},
    }
    monkeypatch.setitem(comfy_nodes.NODE_CLASS_MAPPINGS, "PreviewAny", _preview_any())
    valid, problem, *_ = asyncio.run(execution.validate_prompt("a", prompt, None))
    assert not valid
    assert "is not in the input folder" in json.dumps(_)
    (inputs / "late").mkdir()
    np.save(inputs / "late" / "poses.npy", line(33))
    valid, problem, *_ = asyncio.run(execution.validate_prompt("a", prompt, None))
    assert valid, problem


def _preview_any():
    return importlib.import_module("comfy_extras.nodes_preview_any").PreviewAny
