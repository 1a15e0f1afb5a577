"""The start picture of the shipped workflows is offered to ComfyUI, and never in the way of anything."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path

import folder_paths
import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "lingbot_tiny_day.png"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folder_paths, "get_input_directory", lambda: str(tmp_path))
    return tmp_path


def load(pack) -> None:
    asyncio.run(asyncio.run(pack.comfy_entrypoint()).on_load())


def test_it_is_there_once_the_pack_is_loaded(pack, folder):
    load(pack)
    assert (folder / NAME).read_bytes() == (ROOT / "examples" / NAME).read_bytes()
    assert [path.name for path in folder.iterdir()] == [NAME]


def test_a_file_of_that_name_stays_what_it_is(pack, folder):
    (folder / NAME).write_bytes(b"mine")
    load(pack)
    assert (folder / NAME).read_bytes() == b"mine"


def test_a_folder_that_is_missing_or_full_keeps_nothing_from_loading(pack, folder, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    module = importlib.import_module(f"{pack.__name__}.nodes.host.example_picture")
    monkeypatch.setattr(module.shutil, "copyfile", full)
    load(pack)
    assert not list(folder.iterdir())
    monkeypatch.setattr(folder_paths, "get_input_directory", lambda: str(folder / "none"))
    load(pack)
    assert not (folder / "none").exists()
