"""Which prompts one call queues: the workflow once for each picture and each seed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from .workflow import Workflow, WorkflowError

PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"}
MOST_RUNS = 10_000


@dataclass
class Run:
    """One prompt of the batch and what became of it."""

    name: str
    workflow: Workflow
    image: Path | None = None
    prompt_id: str | None = None
    state: str = "not submitted"
    problems: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    seconds: float | None = None

    @property
    def over(self) -> bool:
        return self.state not in ("not submitted", "queued", "running")

    def fail(self, *problems: str) -> None:
        self.state = "failed"
        self.problems.extend(problems)


def parse_seeds(text: str) -> list[int]:
    """``1-6``, ``3``, ``1-3,7,9``: the seeds in that order."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise WorkflowError(f"--seeds {text!r}: {part.strip()!r} is no seed and no range such as 1-6")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise WorkflowError(f"--seeds {text!r}: the range {part.strip()} ends before it begins")
        if last - first >= MOST_RUNS:
            raise WorkflowError(f"--seeds {text!r}: {last - first + 1} seeds; at most {MOST_RUNS} in one call")
        seeds.extend(range(first, last + 1))
    return seeds


def find_pictures(path: Path) -> list[Path]:
    """The pictures of a folder by name (2 before 10), or the one file."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise WorkflowError(f"--images {path}: there is no such folder or file")
    found = [file for file in path.iterdir() if file.is_file() and file.suffix.lower() in PICTURES]
    if not found:
        raise WorkflowError(f"--images {path}: no picture in it ({', '.join(sorted(PICTURES))})")
    return sorted(found, key=lambda file: _natural(file.name))


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part.casefold()) for part in re.split(r"(\d+)", name)]


def plan_runs(
    workflow: Workflow, images: list[Path], seeds: list[int], image_input: tuple[str, str] | None
) -> list[Run]:
    """One run for each pair; names are unique and can be part of a file's name."""
    places = workflow.seed_inputs()
    if seeds and not places:
        raise WorkflowError(f"--seeds: no node of {workflow.path.name} has a seed; use --set to change what it has")
    total = max(1, len(images)) * max(1, len(seeds))
    if total > MOST_RUNS:
        raise WorkflowError(f"{total} runs; at most {MOST_RUNS} in one call")
    width = len(str(total))
    runs = []
    for image in images or [None]:
        for seed in seeds or [None]:
            changed, parts = workflow, [] if total == 1 else [f"{len(runs) + 1:0{width}}"]
            if image is not None and image_input is not None:
                changed = changed.with_value(*image_input, image.name)
                parts.append(safe_name(image.stem))
            if seed is not None:
                for node, name in places:
                    changed = changed.with_value(node, name, seed)
                parts.append(f"seed{seed}")
            runs.append(Run("_".join(parts) or safe_name(workflow.path.stem), changed, image))
    return runs


def safe_name(text: str) -> str:
    """``text`` as part of a file's name on every system; never empty and never a path."""
    return re.sub(r'[\x00-\x1f<>:"/\\|?*]+', "_", text).strip(" .")[:100] or "run"
