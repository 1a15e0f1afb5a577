"""What the pack promises about its own files: dependencies, imports, layers, examples."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "lingbot_core"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

COMFYUI = {
    "alembic_db", "api_server", "app", "comfy", "comfy_api", "comfy_api_nodes", "comfy_config", "comfy_execution",
    "comfy_extras", "execution", "folder_paths", "latent_preview", "node_helpers", "nodes", "server",
}  # fmt: skip

# What each part of lingbot_core may import besides itself. Arrows go one way; a new part gets its line here.
LEAVES = {"encodable", "errors", "presets", "version"}
BELOW_ENGINE = LEAVES | {"schedule", "solver", "camera", "models", "weights"}
LAYERS: dict[str, set[str]] = {
    "encodable": set(),
    "errors": {"encodable"},
    "version": set(),
    "presets": {"errors"},
    "schedule": LEAVES,
    "solver": LEAVES | {"schedule"},
    "camera": LEAVES,
    "models": LEAVES,
    "weights": LEAVES | {"models"},
    "engine": BELOW_ENGINE,
    "realtime": BELOW_ENGINE | {"engine"},
    "cli": BELOW_ENGINE | {"engine", "realtime"},
    "__init__": BELOW_ENGINE | {"engine", "realtime"},
    "__main__": {"cli"},
}


def core_modules() -> list[Path]:
    return sorted(CORE.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str, int]]:
    """(line, absolute or relative dotted name, level) of every import in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, 0
        elif isinstance(node, ast.ImportFrom):
            if node.module:
                yield node.lineno, node.module, node.level
            else:
                for alias in node.names:
                    yield node.lineno, alias.name, node.level


def part_of(path: Path) -> str:
    first = path.relative_to(CORE).parts[0]
    return first.removesuffix(".py")


def imported_part(path: Path, name: str, level: int) -> str:
    """The part of lingbot_core that a relative import reaches; its own for one that stays inside."""
    package = path.relative_to(CORE).parts[:-1]
    assert level <= len(package) + 1, f"{path}: the relative import {'.' * level}{name} leaves lingbot_core"
    target = (*package[: len(package) - level + 1], *name.split("."))
    return target[0]


def test_requirements_txt_lists_the_dependencies_of_pyproject():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == PROJECT["project"]["dependencies"]


@pytest.mark.parametrize("name", ["torch", "numpy", "transformers", "opencv-python"])
def test_packages_shared_with_comfyui_have_at_most_a_lower_bound(name):
    requirement = {r.name: r for r in map(Requirement, PROJECT["project"]["dependencies"])}[name]
    assert {s.operator for s in requirement.specifier} <= {">="}


def test_only_lingbot_core_is_packaged_and_with_all_of_its_data():
    assert PROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["lingbot_core*"]
    packaged = {
        path for glob in PROJECT["tool"]["setuptools"]["package-data"]["lingbot_core"] for path in CORE.glob(glob)
    }
    data = {p for p in CORE.rglob("*") if p.is_file() and p.suffix not in {".py", ".pyc"}}
    assert data <= packaged


def test_the_embedded_weights_are_small():
    assert sum(path.stat().st_size for path in (CORE / "assets").rglob("*.safetensors")) <= 25_000_000


def test_core_never_imports_comfyui():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in core_modules()
        for line, name, level in imports(path)
        if level == 0 and name.split(".")[0] in COMFYUI
    ]
    assert not found


def test_core_imports_itself_only_relatively():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in core_modules()
        for line, name, level in imports(path)
        if level == 0 and name.split(".")[0] == "lingbot_core"
    ]
    assert not found


def test_core_reads_no_environment_variables():
    found = []
    for path in core_modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in {"environ", "environb", "getenv", "getenvb"}:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                found += [f"{path.relative_to(ROOT)}:{node.lineno}: {a.name}" for a in node.names if "env" in a.name]
    assert not found


def test_arrows_between_the_parts_of_core_go_one_way():
    found = []
    for path in core_modules():
        part = part_of(path)
        assert part in LAYERS, f"lingbot_core/{part} has no line in LAYERS: say what it may import"
        for line, name, level in imports(path):
            target = imported_part(path, name, level) if level else part
            if target not in LAYERS[part] | {part}:
                found.append(f"{path.relative_to(ROOT)}:{line}: {part} imports {target}")
    assert not found


def test_opencv_pyav_and_transformers_are_imported_where_they_are_used():
    found = []
    for path in core_modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            heavy = {name.split(".")[0] for name in names} & {"cv2", "av", "transformers"}
            found += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in heavy]
    assert not found


def test_the_front_door_imports_nothing_at_module_level():
    body = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8")).body
    assert not [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.mark.parametrize(("name", "poses"), [("03", 269), ("04", 533)])
def test_examples_are_whole(name, poses):
    folder = ROOT / "examples" / name
    assert np.load(folder / "poses.npy").shape == (poses, 4, 4)
    assert np.load(folder / "intrinsics.npy").shape == (poses, 4)
    assert np.load(folder / "wasd_action.npy").shape == (poses, 4)
    assert cv2.imread(str(folder / "image.jpg")).shape == (480, 832, 3)
    assert (folder / "prompt.txt").read_text(encoding="utf-8").strip()
