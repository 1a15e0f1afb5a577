"""Tests inside a real ComfyUI, on the CPU. scripts/test runs them in .venv-comfy, apart from all others:
``COMFYUI_DIR=... .venv-comfy/bin/python -m pytest tests/comfy``.

ComfyUI's folder takes the place of this repository's on sys.path, because ``nodes`` and ``tests`` are names in both;
the pack itself is installed in .venv-comfy.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMFYUI = Path(os.environ.get("COMFYUI_DIR") or Path.home() / ".cache" / "lingbot-world" / "ComfyUI")

if not (COMFYUI / "main.py").is_file():
    raise pytest.UsageError(f"tests/comfy needs a ComfyUI, and {COMFYUI} is none; set COMFYUI_DIR")

sys.path[:] = [str(COMFYUI), *(path for path in sys.path if Path(path).resolve() != ROOT)]

from comfy.cli_args import args  # noqa: E402

# Before any other module of ComfyUI is imported; they read these while they are.
args.cpu = True
args.base_directory = mkdtemp(prefix="comfyui-")


@pytest.fixture(scope="session", autouse=True)
def base_folder() -> Iterator[Path]:
    """ComfyUI's base directory: its own ``models`` folder and whatever it writes."""
    yield Path(args.base_directory)
    shutil.rmtree(args.base_directory, ignore_errors=True)


@pytest.fixture
def models(base_folder: Path) -> Iterator[Path]:
    """An empty ``models`` folder that ComfyUI's loaders look into."""
    import folder_paths

    folder = base_folder / "models"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)
    folder_paths.filename_list_cache.clear()  # it fails on folders that were there and are gone


PACK = "lingbot_world_pack"


@pytest.fixture(scope="session")
def pack() -> ModuleType:
    """This folder as ComfyUI imports it: a package of some name, whose modules are reached as ``PACK.nodes.world``."""
    spec = importlib.util.spec_from_file_location(PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACK] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def graph(pack: ModuleType) -> Any:
    """The nodes of a small graph of worlds: see world_graph.py."""
    spec = importlib.util.spec_from_file_location("world_graph", Path(__file__).with_name("world_graph.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["world_graph"] = module
    spec.loader.exec_module(module)
    return module.Graph()


@pytest.fixture
def wg(graph: Any) -> Iterator[ModuleType]:
    """world_graph.py, for a test with worlds of its own, run as ComfyUI runs nodes."""
    import comfy.model_management
    import torch

    module = sys.modules["world_graph"]
    with torch.inference_mode():
        yield module
    comfy.model_management.interrupt_current_processing(False)
    module.forget_everything()
    comfy.model_management.unload_all_models()
