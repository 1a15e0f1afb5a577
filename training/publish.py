"""Puts what was measured and seen into the documents: figures, contact sheets and the first picture of the README.

    python -m training.publish outputs/evaluation [--no-walk]

Reads what ``training.run evaluate`` wrote and rewrites, of this repository: ``docs/tiny/evaluation.json``, the sheets
``docs/tiny/KEY.jpg``, the figures in ``docs/tiny.md`` and in the model card, and ``docs/tiny/walk.webp``, the walk of
``scripts/demo``. What the words around them say of the pictures is for a person who has looked at them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .evaluate import as_text, table
from .export import fence
from .sheets import Picture
from .walks import CHUNK

ROOT = Path(__file__).resolve().parents[1]
PAGE, FOLDER = Path("docs/tiny.md"), Path("docs/tiny")
CARD = Path("lingbot_core/assets/tiny/README.md")
EXAMPLES = Path("examples/tiny")
BEGIN, END = "<!-- figures: written by training.publish -->", "<!-- end of figures -->"
MOST_BYTES = 1_500_000  # of the sheets together, and of the walk
SHEET_QUALITY, WALK_QUALITY = 75, 75
SCALE, LINE, INK = 3, 26, (225, 225, 225)
MEANING = {"w": "forward", "s": "back", "a": "left", "d": "right", "i": "look up", "k": "look down",
           "j": "look left", "l": "look right"}  # fmt: skip
START_PROMPT = "a sunny day"


def figures(result: dict[str, Any]) -> str:
    """The table in Markdown, and below it in words what is under its mark and what was not measured."""
    rows = table(result)
    under = [f"* {what.strip()}: {value:.4g} {unit}".rstrip() + f" (must {must:g})" for what, value, must, _, unit in
             rows if value is not None and value < must]  # fmt: skip
    absent = [f"* {what.strip()}" for what, value, *_ in rows if value is None]
    parts = [fence(as_text(result))]
    parts.append(f"Below must, {len(under)} of {len(rows)}:\n\n" + "\n".join(under) if under else "None is below must.")
    if absent:
        parts.append("Not measured yet:\n\n" + "\n".join(absent))
    return "\n\n".join(parts)


def replaced(text: str, begin: str, end: str, inside: str) -> str:
    """Text with other lines between two marks; ValueError unless both are there once, in this order."""
    before, found, rest = text.partition(begin)
    old, closed, after = rest.partition(end)
    if not found or not closed or begin in rest or end in old + after:
        raise ValueError(f"{begin!r} and {end!r} must be there once each, in this order")
    return f"{before}{begin}\n\n{inside}\n\n{end}{after}"


def page(text: str, result: dict[str, Any]) -> str:
    """docs/tiny.md with these figures."""
    return replaced(text, BEGIN, END, figures(result))


def card(text: str, result: dict[str, Any]) -> str:
    """The model card with these figures."""
    return replaced(text, "## Measured", "## Limits", figures(result))


def write_sheets(source: Path, target: Path) -> int:
    """Makes a JPEG of every sheets/KEY.png; returns their bytes. Raises ValueError above MOST_BYTES."""
    from PIL import Image

    for path in sorted(source.glob("*.png")):
        with Image.open(path) as picture:
            picture.convert("RGB").save(
                target / f"{path.stem}.jpg", quality=SHEET_QUALITY, optimize=True, progressive=True
            )
    return _bounded(sorted(target.glob("*.jpg")))


def captions(events: Path) -> list[str]:
    """The prompt and the keys of every video frame of a script that holds keys."""
    out, prompt = [], START_PROMPT
    for number, line in enumerate(events.read_text(encoding="utf-8").split("\n")):
        if not line.strip():
            continue
        event = json.loads(line)
        prompt = event.get("prompt") or prompt
        for place, keys in enumerate(event["frames"]):
            held = ", ".join(f"{key.upper()} {MEANING[key]}" for key in keys) or "no key"
            out += [f'{held}   "{prompt}"'] * (1 if number == place == 0 else 4)
    return out


def captioned(frame: Picture, caption: str) -> Picture:
    """A frame enlarged, with a line below it; uint8 RGB."""
    import cv2

    height, width = (side * SCALE for side in frame.shape[:2])
    out: Picture = np.zeros((height + LINE, width, 3), np.uint8)
    out[:height] = cv2.resize(frame, (width, height), interpolation=cv2.INTER_CUBIC)
    cv2.putText(out, caption, (8, height + 18), cv2.FONT_HERSHEY_SIMPLEX, 0.5, INK, 1, cv2.LINE_AA)
    return out


def write_walk(target: Path, root: Path = ROOT) -> int:
    """Makes the demo's walk with ``lingbot-world generate`` and an animated WebP of it; returns its bytes."""
    import av
    from PIL import Image

    from lingbot_core.cli import main as lingbot_world

    events = root / EXAMPLES / "walk.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        video = Path(folder) / "world.mp4"
        words = ["generate", "--model", "tiny", "--image", root / EXAMPLES / "day.png", "--prompt", START_PROMPT]
        words += ["--events", events, "--key-steps", "per-video", "--crf", "12", "--output", video]
        if code := lingbot_world([str(word) for word in words]):
            raise RuntimeError(f"lingbot-world generate ended with {code}")
        with av.open(str(video)) as file:
            frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    if len(frames) != len(lines := captions(events)):
        raise RuntimeError(f"{len(frames)} frames, but {len(lines)} captions; chunks have {CHUNK} latent frames")
    shown = [Image.fromarray(captioned(frame, line)) for frame, line in zip(frames, lines, strict=True)]
    times = [62] * (len(shown) - 1) + [1500]  # ms: 16 frames a second, and a rest at the end
    shown[0].save(
        target, save_all=True, append_images=shown[1:], duration=times, loop=0, quality=WALK_QUALITY, method=6
    )
    return _bounded([target])


def _bounded(files: Sequence[Path]) -> int:
    total = sum(file.stat().st_size for file in files)
    if total > MOST_BYTES:
        raise ValueError(f"{files[0].parent}: {total} bytes of pictures; at most {MOST_BYTES}")
    return total


def publish(evaluation: Path, root: Path = ROOT) -> None:
    """Everything but the walk."""
    result = json.loads((evaluation / "evaluation.json").read_text(encoding="utf-8"))
    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    if (evaluation / "evaluation.json").resolve() != (folder / "evaluation.json").resolve():
        shutil.copyfile(evaluation / "evaluation.json", folder / "evaluation.json")
    print(f"sheets: {write_sheets(evaluation / 'sheets', folder)} bytes")
    for path, change in ((root / PAGE, page), (root / CARD, card)):
        path.write_text(change(path.read_text(encoding="utf-8"), result), encoding="utf-8")
        print(f"{path.relative_to(root)}: figures written")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.publish", description=__doc__.splitlines()[0])
    parser.add_argument("evaluation", type=Path, help="the folder that `training.run evaluate` wrote")
    parser.add_argument("--no-walk", action="store_true", help="leave docs/tiny/walk.webp as it is")
    args = parser.parse_args(argv)
    publish(args.evaluation)
    if not args.no_walk:
        print(f"walk: {write_walk(ROOT / FOLDER / 'walk.webp')} bytes")


if __name__ == "__main__":
    main()
