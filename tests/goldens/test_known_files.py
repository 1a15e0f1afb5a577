"""A golden folder holds nothing that is silently left out."""

from __future__ import annotations

import importlib.util
from pathlib import Path

FILES: tuple[str, ...] = ()


def _known() -> set[str]:
    names = {"README.md"}
    for module in Path(__file__).parent.glob("test_*.py"):
        spec = importlib.util.spec_from_file_location(f"known_{module.stem}", module)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        if module != Path(__file__):
            spec.loader.exec_module(loaded)
            names |= set(loaded.FILES) | set(getattr(loaded, "ALSO_READS", ()))
    return names


def test_every_file_of_the_folder_is_checked_by_some_test(golden_dir: Path) -> None:
    assert golden_dir.is_dir(), f"{golden_dir} is not a folder"
    files = {f.name for f in golden_dir.iterdir()}
    sessions = {name for name in files if name.startswith("session_") and name.endswith(".safetensors")}
    unknown = files - sessions - _known()
    assert not unknown, f"no test reads {sorted(unknown)}"
    assert files - {"README.md"}, f"{golden_dir} is empty"
