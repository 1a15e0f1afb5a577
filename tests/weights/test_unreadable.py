"""Folders that may not be read are named, whichever part of a model they hold.

The tests may run as root, who may read everything, so the system's answer is imitated.
"""

from __future__ import annotations

import os
import shutil

import pytest

from lingbot_core.cli import main
from lingbot_core.engine.inspection import inspect_model
from lingbot_core.errors import InputFileError
from lingbot_core.weights import convert
from lingbot_core.weights.layout import EMBEDDED_TINY, find_layout, part_of_file


@pytest.fixture
def lock(monkeypatch):
    """Makes a folder one that may neither be listed nor passed through, as mode 000 does for a user."""
    locked = []

    def refuse(path):
        path = os.path.abspath(os.fspath(path))
        raise PermissionError(13, "Permission denied", path)

    def guarded(function, itself):
        def call(path=".", *args, **options):
            if not isinstance(path, int):
                for folder in locked:
                    below = os.path.abspath(os.fspath(path))
                    if below.startswith(folder + os.sep) or (itself and below == folder):
                        refuse(path)
            return function(path, *args, **options)

        return call

    for name, itself in (("stat", False), ("lstat", False), ("listdir", True), ("scandir", True)):
        monkeypatch.setattr(os, name, guarded(getattr(os, name), itself))
    return lambda folder: locked.append(str(folder))


@pytest.fixture
def own(tmp_path):
    return shutil.copytree(EMBEDDED_TINY, tmp_path / "own")


@pytest.mark.parametrize("name", ["", "transformer", "vae", "text_encoder", "tokenizer"])
def test_an_unreadable_folder_of_a_model_is_named(name, own, lock, capsys):
    lock(own / name if name else own)
    for look in (find_layout, inspect_model, lambda path: convert.plan(path, own.parent / "out", preset="v1-fast")):
        with pytest.raises(InputFileError, match=rf"own/?{name}\S* cannot be read: Permission denied; change its perm"):
            look(own)
    assert main(["inspect", str(own)]) == 2
    said = capsys.readouterr().err
    assert "cannot be read: Permission denied" in said
    assert "PermissionError" not in said


def test_what_lies_in_an_unreadable_folder_cannot_be_reached(own, lock):
    lock(own)
    with pytest.raises(InputFileError, match=r"model '.*own/m' cannot be reached: Permission denied"):
        find_layout(own / "m")
    for part in ("vae", "text_encoder", "tokenizer"):
        with pytest.raises(InputFileError, match="cannot be reached: Permission denied"):
            find_layout("tiny", **{part: own / "x"})
    for look in (
        lambda path: find_layout("tiny", vae=path),
        lambda path: find_layout("tiny", text_encoder=path),
        part_of_file,
    ):
        with pytest.raises(InputFileError, match=r"own\S* cannot be read: Permission denied"):
            look(own)


@pytest.mark.parametrize("name", ["diffusion_models", "vae", "text_encoders"])
def test_an_unreadable_folder_of_comfyui_is_named(name, checkpoints, tmp_path, lock):
    models = tmp_path / "models"
    checkpoints.comfy(models)
    lock(models / name)
    with pytest.raises(InputFileError, match=rf"models/{name}\S* cannot be read: Permission denied"):
        find_layout(models)


def test_an_unreadable_folder_beside_the_model_is_passed_over(own, lock):
    for name in ("tokenizer", "lingbot-world-base-cam"):
        (own.parent / name).mkdir()
        lock(own.parent / name)
    shutil.rmtree(own / "vae")
    shutil.rmtree(own / "tokenizer")
    assert set(find_layout(own).missing) == {"VAE", "tokenizer"}


def test_an_unreadable_target_is_named(own, tmp_path, lock):
    target = tmp_path / "target"
    (target / "vae").mkdir(parents=True)
    lock(target)
    with pytest.raises(InputFileError, match=r"target\S* cannot be read: Permission denied"):
        convert.plan(own, target, only="vae")
