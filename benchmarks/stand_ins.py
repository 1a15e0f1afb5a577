"""Takes the place of packages that ComfyUI imports and measurements do without, where they are not installed.

Without PyAV a run's frames are counted and dropped: no file is written. Without SQLAlchemy ComfyUI's server cannot be
imported: there is nobody to send previews to, as in any process that does not serve. Beside PyTorch, NumPy, SciPy,
OpenCV and transformers nothing works without comfy-aimdo, comfy-kitchen, and ftfy with wcwidth.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from .comfy_pack import part


def stand_in() -> list[str]:
    """Before ComfyUI's modules are imported. Returns what is not the real one, for people."""
    found = []
    if importlib.util.find_spec("av") is None:
        sys.meta_path.append(_NamesOnly("av"))
        found.append("av: frames are counted, no video file is written")
    if importlib.util.find_spec("sqlalchemy") is None:
        server: Any = ModuleType("server")
        server.PromptServer = type("PromptServer", (), {})  # without an instance, as before a server starts
        sys.modules["server"] = server
        found.append("server: nobody is sent previews")
    return found


def stand_in_for_writer() -> None:
    """After the pack was loaded: without PyAV its frames go to a writer that counts them."""
    if getattr(importlib.import_module("av"), "names_only", False):
        part("nodes.host.video").VideoWriter = FrameCounter


class FrameCounter:
    """What a run asks of lingbot_core's VideoWriter."""

    def __init__(self, path: str, **_: Any) -> None:
        self.path, self.frames = path, 0

    def write(self, frames: Any) -> None:
        self.frames += len(frames)

    def close(self) -> int:
        return self.frames

    def abort(self) -> int:
        return self.frames


class _AnyName(type):
    """Of classes with every attribute: enumerations are read, and methods looked up, while modules are imported."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _NamesOnly(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a package whose modules have classes of every name, enough for imports and annotations."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self._package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        def named(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _AnyName(name, (), {})

        module.__dict__.update(names_only=True, __getattr__=named)
