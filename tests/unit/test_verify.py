"""``lingbot-world verify``: the evidence of a run, and its comparison with an earlier one."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lingbot_core.camera import clip_controls, load_camera, translation_unit
from lingbot_core.cli import build_parser, main, verify
from lingbot_core.cli.contact_sheet import COLUMNS, LINE, MARGIN, MAX_ROWS, ContactSheet
from lingbot_core.cli.evidence import write_png
from lingbot_core.cli.progress import Progress
from lingbot_core.engine.image import frames_to_uint8, read_image
from lingbot_core.engine.probe import probe
from lingbot_core.engine.session import WorldSession
from lingbot_core.engine.similarity import ssim
from lingbot_core.engine.world import World
from lingbot_core.errors import ImageError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "03"
VAE = ROOT / "lingbot_core" / "assets" / "tiny" / "vae"
PNGS = ("first_frame.png", "last_frame.png", "contact_sheet.png")
FILES = sorted((*PNGS, "report.json", "world.mp4"))


@pytest.fixture(scope="module")
def tiny() -> World:
    return World.load("tiny")


@pytest.fixture
def loaded(tiny, monkeypatch) -> World:
    """The tiny model is loaded once for all runs of this file."""
    monkeypatch.setattr(World, "load", classmethod(lambda cls, model, **options: tiny))
    return tiny


@pytest.fixture
def unloaded(monkeypatch) -> None:
    """Whatever is tested must be known before any weights are read."""

    def load(*args: object, **options: object) -> World:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(World, "load", load)


@pytest.fixture(scope="module")
def earlier(tiny, tmp_path_factory) -> Path:
    """The folder of a run of two chunks."""
    folder = tmp_path_factory.mktemp("earlier") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "load", classmethod(lambda cls, model, **options: tiny))
        assert main(words(folder)) == 0
    return folder


def words(folder: Path, *more: object, chunks: int = 2) -> list[str]:
    return [str(word) for word in ("verify", "tiny", "--chunks", chunks, "--output", folder, *more)]


def report_of(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def changed(earlier: Path, folder: Path, **changes: object) -> Path:
    """A copy of a run whose report says something else; returns the report."""
    shutil.copytree(earlier, folder)
    file = folder / "report.json"
    file.write_text(json.dumps({**report_of(folder), **changes}))
    return file


# The evidence


def test_the_evidence_is_that_of_a_session_with_the_example_inputs(earlier, tiny):
    path = load_camera(EXAMPLE).first(21).to_latent(3, 2, "compress")
    unit = translation_unit("clip", latent_poses=path.poses)
    prompt = (EXAMPLE / "prompt.txt").read_text(encoding="utf-8").strip()
    report = report_of(earlier)
    session = WorldSession.start(
        tiny, EXAMPLE / "image.jpg", prompt, seed=42, translation_unit=unit, intrinsics=report["intrinsics"]
    )
    made = [
        session.advance(controls)
        for controls in clip_controls(path, chunk=3, unit=unit, first_delta="identity", width=160, height=80)
    ]

    assert sorted(os.listdir(earlier)) == FILES
    assert report["stopped"] is None
    assert (report["seed"], report["chunks"], report["frames"], report["prompt"]) == (42, 2, 21, prompt)
    assert report["translation_unit"] == pytest.approx(unit)
    for found, chunk in zip(report["verify"]["latents"], made, strict=True):
        values = chunk.latents.numpy().astype(np.float64)
        assert (found["chunk"], found["finite"]) == (chunk.index, True)
        np.testing.assert_allclose(
            [found["minimum"], found["maximum"], found["mean"], found["std"]],
            [values.min(), values.max(), values.mean(), values.std()],
            atol=1e-5,
        )
    first, last = (read_image(earlier / name).astype(int) for name in PNGS[:2])
    assert np.abs(first - frames_to_uint8(made[0].frames)[0]).max() <= 1
    assert np.abs(last - frames_to_uint8(made[1].frames)[-1]).max() <= 1
    assert (probe(earlier / "world.mp4").frames, report["video"]["frames"]) == (21, 21)


def test_the_report_has_times_memory_versions_and_the_hashes_of_what_was_made(earlier):
    report = report_of(earlier)
    assert report["seconds"]["load"] > 0
    assert [set(chunk) for chunk in report["seconds"]["by_chunk"]] == [
        {"prepare", "denoise", "decode", "commit", "write"}
    ] * 2
    assert report["fps_made"] > 0
    assert report["peak_memory"]["host"] > 50_000_000
    assert report["versions"]["torch"] == torch.__version__
    assert (report["preset"], report["machine"]["device"], len(report["model_fingerprint"])) == ("tiny", "cpu", 16)
    for name in ("first_frame", "last_frame"):
        pixels = cv2.imread(str(earlier / f"{name}.png"))[..., ::-1].tobytes()
        assert report["verify"][f"{name}_sha256"] == hashlib.sha256(pixels).hexdigest()
    assert len(report["verify"]["latents_sha256"]) == 64
    assert report["verify"]["comparison"] is None


def test_the_contact_sheet_has_a_row_for_each_chunk(earlier):
    sheet, first = read_image(earlier / "contact_sheet.png"), read_image(earlier / "first_frame.png")
    assert sheet.shape[1] == MARGIN + COLUMNS * (256 + MARGIN)
    top = sheet.shape[0] - MARGIN - 2 * (LINE + 128 + MARGIN) + LINE
    enlarged = cv2.resize(first, (256, 128), interpolation=cv2.INTER_NEAREST)
    np.testing.assert_array_equal(sheet[top : top + 128, MARGIN : MARGIN + 256], enlarged)


@pytest.mark.parametrize(("chunks", "rows"), [(3, 3), (500, MAX_ROWS)])
def test_a_contact_sheet_is_bounded_and_shows_the_first_and_the_last_frame(chunks, rows):
    sheet = ContactSheet(chunks, 16.0)
    for chunk in range(chunks):
        frames = np.full((12, 96, 48, 3), 100, np.uint8)
        frames[0] += 50 if chunk == 0 else 0
        frames[-1] += 100 if chunk == chunks - 1 else 0
        sheet.add(chunk, frames)
    drawn = sheet.draw(["A model näme"])
    pitch = LINE + 256 + MARGIN
    assert (drawn.shape[0] - 2 * MARGIN) // pitch == rows
    top, bottom = drawn.shape[0] - MARGIN - pitch * rows, drawn.shape[0] - MARGIN - pitch
    assert (drawn[top + LINE : top + LINE + 256, MARGIN : MARGIN + 128] == 150).all()
    x = drawn.shape[1] - MARGIN - 232  # frames in portrait leave room for their captions
    assert (drawn[bottom + LINE : bottom + LINE + 256, x : x + 128] == 200).all()


def test_an_interrupt_keeps_video_report_and_pictures_of_what_is_made(loaded, tmp_path, monkeypatch):
    finish = Progress.finish_chunk

    def finish_and_interrupt(self: Progress, frames: int) -> None:
        finish(self, frames)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Progress, "finish_chunk", finish_and_interrupt)
    assert main(words(tmp_path / "run", chunks=7)) == 130
    report = report_of(tmp_path / "run")
    assert (report["stopped"], report["chunks"], len(report["verify"]["latents"])) == ("interrupted", 1, 1)
    assert sorted(os.listdir(tmp_path / "run")) == FILES
    assert probe(tmp_path / "run" / "world.mp4").frames == 9


def test_numbers_that_are_not_finite_do_not_pass(loaded, tmp_path, monkeypatch, capsys):
    decode = loaded.vae.decode
    monkeypatch.setattr(loaded.vae, "decode", lambda *args: decode(*args) * math.nan)
    assert main(words(tmp_path / "run")) == 1
    assert "NaN or infinity" in capsys.readouterr().err
    assert os.listdir(tmp_path / "run") == []


def test_a_picture_that_cannot_be_written_is_named_and_the_rest_is_kept(loaded, tmp_path, capsys):
    (tmp_path / "run" / "last_frame.png").mkdir(parents=True)
    assert main(words(tmp_path / "run", chunks=1)) == 1
    assert "last_frame.png could not be written: Is a directory" in capsys.readouterr().err
    assert report_of(tmp_path / "run")["chunks"] == 1
    assert sorted(os.listdir(tmp_path / "run")) == FILES
    assert read_image(tmp_path / "run" / "contact_sheet.png").shape[2] == 3


# Which run


def asked(*more: object) -> object:
    return verify.as_generate(build_parser().parse_args([str(word) for word in ("verify", "tiny", *more)]))


def test_the_default_is_seven_chunks_of_example_03_with_seed_42(unloaded):
    args = asked()
    assert (args.seed, args.num_frames, args.noise, args.size) == (42, 81, "seeded", None)
    assert (args.image, args.action_path) == (EXAMPLE / "image.jpg", EXAMPLE)
    assert args.prompt.startswith("A trail leads through deep snow")
    assert args.output == Path("outputs/verify/tiny/world.mp4")
    assert args.report == Path("outputs/verify/tiny/report.json")


def test_options_reach_the_run(unloaded):
    args = asked("--preset", "v2-causal-fast", "--noise", "reference", "--seed", 7, "--prompt=-- words")
    assert (args.preset, args.num_frames, args.noise, args.seed) == ("v2-causal-fast", 109, "reference", 7)
    assert args.prompt == "-- words"
    args = asked("--dtype", "float16", "--attention", "math", "--vae", VAE, "--poses", EXAMPLE / "poses.npy")
    assert (args.dtype, args.attention, args.vae) == ("float16", "math", str(VAE))
    assert (args.poses, args.action_path) == (EXAMPLE / "poses.npy", None)


def test_without_the_examples_the_options_to_give_are_named(unloaded, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verify, "EXAMPLES", tmp_path / "none")
    assert main(words(tmp_path / "run", "--prompt", "A trail")) == 2
    error = capsys.readouterr().err
    assert "come with a git clone" in error
    assert "Give --image, --poses, and --intrinsics" in error
    args = asked("--prompt", "A trail", "--image", EXAMPLE / "image.jpg", "--poses", EXAMPLE)
    assert (args.prompt, args.action_path) == ("A trail", EXAMPLE)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--chunks", 30), "--chunks 30 makes 357 frames, but .* has 269 poses, one per frame; give --chunks 22 or"),
        (("--against", "{run}/report.json"), "would be overwritten; name another --output"),
        (("--image", "{run}/first_frame.png"), "lies in the folder that this run writes to"),
        (("--output", "{run}/world.mp4"), "is a file; name a folder"),
        (("--output", "{new}", "--against", "{run}/world.mp4"), "is not JSON"),
        (("--output", "{new}", "--against", "/dev/null"), "is not a regular file; name a report.json"),
        (("--output", "{new}", "--against", "{run}/gone.json"), "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_run_is_refused_before_the_model_is_loaded(earlier, unloaded, tmp_path, capsys, more, message):
    before = {file.name: file.read_bytes() for file in earlier.iterdir()}
    filled = [str(word).format(run=earlier, new=tmp_path / "new") for word in more]
    assert main(words(earlier, *filled)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(message, error), error
    assert {file.name: file.read_bytes() for file in earlier.iterdir()} == before
    assert not (tmp_path / "new").exists()


def test_no_picture_is_written_over_an_input(unloaded, tmp_path, capsys):
    image = tmp_path / "image.jpg"
    shutil.copy(EXAMPLE / "image.jpg", image)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "first_frame.png").hardlink_to(image)
    assert main(words(tmp_path / "run", "--image", image)) == 2
    assert "first_frame.png is the input --image and would be overwritten" in capsys.readouterr().err


# The comparison


def test_a_run_like_the_stored_one_passes(loaded, earlier, tmp_path, capsys):
    against = earlier / "report.json"
    assert main(words(tmp_path / "run", "--against", against)) == 0
    found = report_of(tmp_path / "run")["verify"]["comparison"]
    assert (found["passed"], found["minimum_ssim"], found["notes"]) == (True, 0.85, [])
    assert found["ssim"] == pytest.approx({"first_frame": 1.0, "last_frame": 1.0}, abs=1e-6)
    assert f"SSIM against {against}: first_frame 1.0000, last_frame 1.0000" in capsys.readouterr().out


def test_a_frame_that_is_too_different_is_named_with_its_value(loaded, earlier, tmp_path, capsys):
    against = changed(earlier, tmp_path / "stored", model_fingerprint="another")
    other = 255 - read_image(earlier / "last_frame.png")
    write_png(tmp_path / "stored" / "last_frame.png", other)
    assert main(words(tmp_path / "run", "--against", against)) == 1
    printed = capsys.readouterr()
    value = ssim(other, read_image(tmp_path / "run" / "last_frame.png"))
    assert printed.err.splitlines()[-1] == (f"error: last_frame.png: SSIM {value:.4f} against {against} is below 0.85")
    assert "note: not the same weights in memory" in printed.out
    found = report_of(tmp_path / "run")["verify"]["comparison"]
    assert (found["passed"], found["ssim"]["last_frame"]) == (False, pytest.approx(value))
    assert found["ssim"]["first_frame"] > 0.999


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 7, "preset": "v1-fast"}, "preset v1-fast there and tiny here; seed 7 there and 42 here"),
        ({"width": 832, "height": 480}, "height 480 there and 80 here; width 832 there and 160 here"),
        ({"chunks": 1, "stopped": "interrupted"}, "it ended early (interrupted); chunks 1 there and 2 here"),
        ({"noise": "reference"}, "noise reference there and seeded here"),
        ({"translation_unit": 0.5}, "translation_unit 0.5 there and 0.0750235"),
        ({"intrinsics": [1, 2, 3, 4]}, "intrinsics [1, 2, 3, 4] there and"),
    ],
)
def test_runs_with_other_settings_are_not_comparable(unloaded, earlier, tmp_path, capsys, changes, message):
    against = changed(earlier, tmp_path / "stored", **changes)
    assert main(words(tmp_path / "run", "--against", against)) == 2
    assert f"{against} is not comparable with this run: {message}" in capsys.readouterr().err


def test_a_stored_run_must_be_whole(unloaded, earlier, tmp_path, capsys):
    against = changed(earlier, tmp_path / "stored")
    write_png(tmp_path / "stored" / "last_frame.png", np.zeros((80, 176, 3), np.uint8))
    assert main(words(tmp_path / "run", "--against", against)) == 2
    assert "last_frame.png is uint8 [80, 176, 3], but its report says 80x160" in capsys.readouterr().err
    (tmp_path / "stored" / "last_frame.png").unlink()
    assert main(words(tmp_path / "run", "--against", against)) == 2
    assert "last_frame.png does not exist" in capsys.readouterr().err
    against.write_text('{"seed": 42}')
    assert main(words(tmp_path / "run", "--against", against)) == 2
    assert "is no report of a run (preset, noise, height" in capsys.readouterr().err


# Structural similarity


def by_the_paper(first: np.ndarray, second: np.ndarray) -> float:
    """Equations 13 to 16 of Wang et al. 2004, a window at a time."""
    offsets = np.arange(-5, 6)
    weights = np.exp(-(offsets[:, None] ** 2 + offsets[None, :] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    values = []
    for channel in range(3):
        for row in range(first.shape[0] - 10):
            for column in range(first.shape[1] - 10):
                x, y = (p[row : row + 11, column : column + 11, channel].astype(float) for p in (first, second))
                mx, my = (weights * x).sum(), (weights * y).sum()
                vx, vy = (weights * (x - mx) ** 2).sum(), (weights * (y - my) ** 2).sum()
                cov = (weights * (x - mx) * (y - my)).sum()
                values.append((2 * mx * my + c1) * (2 * cov + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2)))
    return float(np.mean(values))


def noise(seed: int, shape: tuple[int, ...] = (24, 19, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("strength", [0, 10, 80, 255])
def test_ssim_is_that_of_the_paper(strength):
    picture = noise(1)
    other = np.clip(picture + (noise(2).astype(float) - 128) * strength / 255, 0, 255).astype(np.uint8)
    assert ssim(picture, other) == pytest.approx(by_the_paper(picture, other), abs=1e-9)
    assert ssim(other, picture) == pytest.approx(ssim(picture, other), abs=1e-12)


@given(st.integers(0, 255), st.integers(0, 255))
def test_ssim_of_flat_pictures_is_that_of_their_brightness(a, b):
    first, second = (np.full((12, 16, 3), value, np.uint8) for value in (a, b))
    c1 = (0.01 * 255) ** 2
    assert ssim(first, second) == pytest.approx((2 * a * b + c1) / (a * a + b * b + c1), abs=1e-6)


def test_ssim_knows_the_same_picture_its_negative_and_another():
    picture = noise(3, (64, 80, 3))
    assert ssim(picture, picture) == 1.0
    assert ssim(picture, 255 - picture) < -0.8
    assert abs(ssim(picture, noise(4, (64, 80, 3)))) < 0.05
    # A change of colour alone: the channels trade places, the grey picture stays about the same.
    assert ssim(picture, picture[..., ::-1]) < 0.5


def test_ssim_refuses_pictures_it_has_no_meaning_for():
    with pytest.raises(ImageError, match="24x19 and 19x24 cannot be compared"):
        ssim(noise(1), noise(1, (19, 24, 3)))
    with pytest.raises(ImageError, match="10x30 cannot be compared; both sides must have at least 11"):
        ssim(noise(1, (10, 30, 3)), noise(2, (10, 30, 3)))
    with pytest.raises(ImageError, match=r"must be uint8 \[H, W, 3\], not float64"):
        ssim(noise(1) / 255.0, noise(1))
