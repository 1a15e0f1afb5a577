"""ComfyUI's Python modules and this pack in one process, without a server: its nodes called as ComfyUI calls them."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACK = "lingbot_world_pack"


def has_cuda() -> bool:
    """Whether there is a driver for an NVIDIA GPU; asks without importing PyTorch."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


def find_comfyui() -> Path:
    """The folder that COMFYUI_DIR names. Exits where there is no ComfyUI."""
    comfyui = Path(os.environ.get("COMFYUI_DIR") or Path.home() / ".cache" / "lingbot-world" / "ComfyUI")
    if not (comfyui / "main.py").is_file():
        sys.exit(f"{comfyui} is no ComfyUI; set COMFYUI_DIR")
    return comfyui.resolve()


def load_comfyui(**flags: Any) -> None:
    """Begins ComfyUI as its main.py does, up to the allocator. flags: its command line's, by attribute.

    ComfyUI's own folder takes this repository's place on sys.path, because ``nodes`` is a name in both.
    """
    comfyui = find_comfyui()
    sys.path[:] = [str(comfyui), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    from comfy.cli_args import args

    # Other modules read these while they are imported.
    for name, value in flags.items():
        setattr(args, name, value)
    # It chooses PyTorch's allocator, which is possible only before PyTorch is imported.
    importlib.import_module("cuda_malloc")


def load_pack() -> None:
    """This folder as ComfyUI imports it; after load_comfyui."""
    spec = importlib.util.spec_from_file_location(PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[PACK] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def part(name: str) -> Any:
    """A module of the pack."""
    return importlib.import_module(f"{PACK}.{name}")


def call(module: str, node_id: str, **inputs: Any) -> Any:
    """The outputs of a node, called as ComfyUI calls it."""
    from comfy_api.latest import io

    [node] = [cls for cls in part(module).NODES if cls.define_schema().node_id == node_id]
    node.GET_SCHEMA()
    hidden = {io.Hidden("UNIQUE_ID"): "1", io.Hidden("PROMPT"): None, io.Hidden("EXTRA_PNGINFO"): None}
    try:
        return node.PREPARE_CLASS_CLONE({"hidden_inputs": hidden}).execute(**inputs).args
    finally:
        _after_a_node()


def _after_a_node() -> None:
    """What ComfyUI's executor does after each node where weights are loaded on demand."""
    import comfy.memory_management

    if not comfy.memory_management.aimdo_enabled:
        return
    import comfy.model_management
    import comfy.model_prefetch
    import comfy_aimdo.model_vbar

    comfy.model_management.reset_cast_buffers()
    comfy.model_prefetch.cleanup_prefetch_queues()
    comfy_aimdo.model_vbar.vbars_reset_watermark_limits()
