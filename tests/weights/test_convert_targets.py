"""What lies at a target of ``convert`` already: made from other weights, part of the source, links and pipes."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lingbot_core.cli import main
from lingbot_core.errors import InputFileError
from lingbot_core.weights.layout import EMBEDDED_TINY, find_layout

VAE = "vae/own_vae.safetensors"


@pytest.fixture
def own(tmp_path) -> Path:
    """A copy of the embedded model under a name of its own."""
    folder = shutil.copytree(EMBEDDED_TINY, tmp_path / "own")
    (folder / "world.json").write_text('{"name": "own", "preset": "tiny", "trained": false}')
    return folder


def run(source: Path, target: Path, *options: str) -> int:
    return main(["convert", str(source), str(target), *options])


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Made from other weights.


def change_first_value(path: Path, keep_time: bool) -> None:
    times = path.stat()
    tensors = load_file(path)
    tensors["conv1.bias" if "conv1.bias" in tensors else min(tensors)].view(-1)[0] += 1
    save_file(tensors, path, {"format": "pt"})
    if keep_time:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_file_made_from_other_weights_is_not_taken_for_this_one(own, tmp_path, capsys, keep_time):
    stored = own / "vae" / "diffusion_pytorch_model.safetensors"
    change_first_value(stored, True)
    before = stored.stat().st_size
    assert run(own, tmp_path / "out") == 0
    made = tree(tmp_path / "out")
    if keep_time:
        # Everywhere else, so that the samples see it whatever they miss.
        times = stored.stat()
        save_file({name: tensor + 1 for name, tensor in load_file(stored).items()}, stored, {"format": "pt"})
        os.utime(stored, ns=(times.st_atime_ns, times.st_mtime_ns))
    else:
        change_first_value(stored, False)
    assert stored.stat().st_size == before
    capsys.readouterr()
    assert run(own, tmp_path / "out") == 2
    assert f"{VAE} exists and is another file than this would make; --overwrite" in capsys.readouterr().err
    assert tree(tmp_path / "out") == made
    assert run(own, tmp_path / "out", "--overwrite") == 0
    now = load_file(tmp_path / "out" / VAE)
    assert all(torch.equal(tensor, now[name]) for name, tensor in load_file(stored).items() if name in now)
    assert tree(tmp_path / "out") != made


def test_a_finished_file_is_kept_and_said_not_to_have_been_read(own, tmp_path, capsys):
    assert run(own, tmp_path / "out") == 0
    made = tree(tmp_path / "out")
    capsys.readouterr()
    assert run(own, tmp_path / "out") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("is there already, made from this source; its values were not read again (--overwrite") == 3
    assert tree(tmp_path / "out") == made


# Part of the source.


@pytest.mark.parametrize(
    ("inside", "options"),
    [
        ("", []),
        ("", ["--only", "vae"]),
        ("", ["--only", "dit"]),
        ("", ["--only", "text"]),
        ("transformer/..", []),
    ],
)
def test_nothing_is_made_where_it_would_be_taken_for_the_source(own, capsys, inside, options):
    before = tree(own)
    assert run(own, own / inside, *options) == 2
    assert "looked for" in capsys.readouterr().err
    assert tree(own) == before


def test_a_link_to_the_source_is_the_source(own, tmp_path, capsys):
    (tmp_path / "link").symlink_to(own)
    assert run(own, tmp_path / "link") == 2
    assert run(tmp_path / "link", own) == 2
    assert main(["inspect", str(own)]) == 0


@pytest.mark.parametrize("place", ["root", "root/lingbot_world_fast"])
@pytest.mark.parametrize("given", ["root", "root/lingbot_world_fast"])
def test_a_published_folder_is_not_made_ambiguous(checkpoints, tmp_path, place, given):
    checkpoints.v1(tmp_path / "root")
    before = tree(tmp_path)
    assert run(tmp_path / given, tmp_path / place) == 2
    assert tree(tmp_path) == before


@pytest.mark.parametrize("place", ["models", "models/diffusion_models", "models/diffusion_models/deep"])
def test_a_folder_of_models_keeps_one_transformer(checkpoints, tmp_path, place):
    models = tmp_path / "models"
    checkpoints.comfy(models)
    before = tree(tmp_path)
    assert run(models, tmp_path / place, "--only", "dit", "--dtype", "fp16") == 2
    assert tree(tmp_path) == before
    assert find_layout(models).transformer.files[0].name == "lingbot_world_fast_bf16.safetensors"


def test_a_part_of_its_own_folder_keeps_it(own, checkpoints, tmp_path, capsys):
    given = checkpoints.write_file(tmp_path / "other" / "vae" / "my.safetensors", checkpoints.vae).parent
    assert run(own, tmp_path / "other", "--vae", str(given), "--only", "vae") == 2
    assert "looked for" in capsys.readouterr().err
    assert [path.name for path in given.iterdir()] == ["my.safetensors"]


def test_a_folder_inside_or_beside_the_source_is_free(own, checkpoints, tmp_path):
    expected = {part: load for part, load in vars(find_layout(own)).items() if part in ("vae", "text", "transformer")}
    assert run(own, own / "converted") == 0
    assert {part: vars(find_layout(own))[part] for part in expected} == expected
    # A release that was downloaded into ComfyUI's folder of models, and a file there that is wanted in another dtype.
    root = checkpoints.v1(tmp_path / "models" / "diffusion_models" / "lingbot-world-base-cam")
    assert run(root, tmp_path / "models") == 0
    [made] = (tmp_path / "models" / "diffusion_models").glob("*.safetensors")
    assert run(made, tmp_path / "models", "--only", "dit", "--dtype", "fp16") == 0
    assert run(root, tmp_path / "models") == 0


# Links and pipes under the names of unfinished files.


@pytest.mark.parametrize("suffix", [".part", ".part.jsonl"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "folder"])
def test_what_has_the_name_of_an_unfinished_file_is_not_written_to(own, tmp_path, capsys, suffix, kind):
    precious = own / "vae" / "diffusion_pytorch_model.safetensors"
    before = tree(own)
    place = tmp_path / "out" / (VAE + suffix)
    place.parent.mkdir(parents=True)
    if kind == "hard link":
        os.link(precious, place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(precious if kind == "link" else tmp_path / "nothing")
    assert run(own, tmp_path / "out", "--only", "vae") in (1, 2)
    said = " ".join(capsys.readouterr().err.split())
    expected = {"hard link": "is a hard link", "folder": "is no ordinary file"}.get(kind, "is a symbolic link")
    assert f"{VAE}{suffix} {expected}" in said
    assert tree(own) == before
    assert not (tmp_path / "nothing").exists()
    assert not (tmp_path / "out" / VAE).exists()
    shutil.rmtree(place) if kind == "folder" else place.unlink()
    assert run(own, tmp_path / "out", "--only", "vae") == 0


@pytest.mark.parametrize("suffix", ["", ".part", ".part.jsonl"])
def test_a_pipe_is_not_waited_for(own, tmp_path, capsys, suffix):
    pipe = tmp_path / "out" / (VAE + suffix)
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    codes = []
    # A thread, not a process: the time limit is for a moment's work, not for the start of Python on a busy machine.
    thread = threading.Thread(target=lambda: codes.append(run(own, tmp_path / "out", "--only", "vae")), daemon=True)
    thread.start()
    thread.join(60)
    waited = thread.is_alive()
    if waited:
        os.close(os.open(pipe, os.O_RDWR))  # both ends, so that it goes on
        thread.join(60)
    assert not waited
    assert codes[0] in (1, 2)
    assert ("is another file" if not suffix else "is no ordinary file") in " ".join(capsys.readouterr().err.split())


def test_a_link_that_appears_after_the_look_is_not_followed(own, tmp_path, monkeypatch):
    from lingbot_core.weights import stream

    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (tmp_path / "x.part").symlink_to(precious)
    monkeypatch.setattr(stream, "_is_own", lambda path: False)
    with pytest.raises(OSError, match="symbolic links"):
        stream._open_own(tmp_path / "x.part")
    os.remove(tmp_path / "x.part")
    os.link(precious, tmp_path / "x.part")
    with pytest.raises(InputFileError, match="hard link"):
        stream._open_own(tmp_path / "x.part")
    assert precious.read_bytes() == b"precious"
