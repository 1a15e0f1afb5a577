"""What the shipped workflows are: nodes, links and places. scripts/make_workflows.py draws them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PICTURE = "lingbot_tiny_day.png"
"""In examples/. LoadImage knows only files that lie in ComfyUI's input folder itself."""
PROMPT = "a sunny day"


@dataclass(frozen=True)
class Node:
    """One node: where it lies, what its widgets hold, and ``key.output`` of another node for each linked input."""

    key: str
    type: str
    at: tuple[int, int]
    values: dict[str, Any] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    title: str = ""
    size: tuple[int, int] | None = None


@dataclass(frozen=True)
class Group:
    """A titled box around nodes."""

    title: str
    box: tuple[int, int, int, int]
    color: str = "#3f789e"


@dataclass(frozen=True)
class Drawing:
    nodes: tuple[Node, ...]
    groups: tuple[Group, ...]


def model_and_start(prompt: str = PROMPT, **more: str) -> tuple[Node, ...]:
    """Model, prompt, picture, and the world that begins with them: the left half of every workflow. more: its links."""
    links = {"model": "model.MODEL", "vae": "model.VAE", "positive": "prompt.CONDITIONING"}
    links |= {"start_image": "start.start_image", **more}
    return (
        Node("model", "LingBotLoadWorldFolder", (40, 80), {"folder": "tiny"}, title="Model", size=(340, 0)),
        Node("image", "LoadImage", (40, 420), {"image": PICTURE}, title="Start Picture", size=(340, 380)),
        Node("prompt", "CLIPTextEncode", (460, 80), {"text": prompt}, {"clip": "model.CLIP"}, "Prompt", (380, 180)),
        Node(
            "start", "LingBotStartImage", (460, 420), {"size": "model"},
            {"image": "image.IMAGE", "vae": "model.VAE", "model": "model.MODEL"}, "Start Image", (380, 0),
        ),
        Node("world", "LingBotStartWorld", (920, 80), {"seed": 42}, links, "Start World", (360, 0)),
    )  # fmt: skip


def advance(key: str, at: tuple[int, int], world: str, title: str, **values: Any) -> Node:
    links = {"world": f"{world}.world"} | {name: values.pop(name) for name in ("controls",) if name in values}
    return Node(key, "LingBotAdvanceWorld", at, values, links, title, (360, 420))


def save(key: str, at: tuple[int, int], source: str, prefix: str, title: str) -> Node:
    values = {"filename_prefix": f"lingbot_world/{prefix}", "format": "mp4", "format.codec": "h264"}
    return Node(key, "SaveVideo", at, values, {"video": f"{source}.video"}, title, (420, 420))


def note(at: tuple[int, int], text: str, size: tuple[int, int] = (340, 300)) -> Node:
    return Node("note", "MarkdownNote", at, {"": text}, title="About", size=size)


LEFT = (Group("Model and start", (20, 0, 1280, 840)),)
ABOUT = (
    "**Start picture**: drop one onto *Start Picture*; the pack put *lingbot_tiny_day.png* into ComfyUI's *input* "
    "folder.\n\n"
    "**Model**: *tiny* is embedded and runs anywhere. For a real world choose the folder of its weights in *Model*, "
    "and *480p* in *Start Image*.\n"
)

DRAWINGS = {
    "image_to_world": Drawing(
        (
            *model_and_start(),
            advance("walk", (1380, 80), "world", "Walk", chunks=4, keys="w-4, wl-4, w-4"),
            save("save", (1820, 80), "walk", "image_to_world", "Save Video"),
            note((40, 900), "## Image to world\n\nFour chunks from one picture, steered by keys.\n\n" + ABOUT),
        ),
        (*LEFT, Group("Walk", (1360, 0, 900, 840), "#3f7e4e")),
    ),
    "continue": Drawing(
        (
            *model_and_start(),
            advance("first", (1380, 80), "world", "First Part", chunks=2, keys="w-6"),
            save("save_first", (1820, 80), "first", "continue_1", "Save First Part"),
            advance("second", (1380, 640), "first", "Second Part", chunks=2, keys="wj-6", output="all frames"),
            save("save_second", (1820, 640), "second", "continue_2", "Save Whole Walk"),
            note(
                (40, 900),
                "## Continue\n\n*Second Part* goes on where *First Part* ended: together they are the same, "
                "frame by frame, as one long run. Change only the second one and queue again: the first is not "
                "computed anew.\n\n" + ABOUT,
            ),
        ),
        (
            *LEFT,
            Group("First part", (1360, 0, 900, 540), "#3f7e4e"),
            Group("Second part", (1360, 560, 900, 540), "#7e6b3f"),
        ),
    ),
    "branch": Drawing(
        (
            *model_and_start(),
            advance("trunk", (1380, 80), "world", "To the Fork", chunks=2, keys="w-6"),
            advance("left", (1820, 80), "trunk", "Left", chunks=2, keys="wj-6", output="all frames"),
            save("save_left", (2260, 80), "left", "branch_left", "Save Left"),
            advance("right", (1820, 640), "trunk", "Right", chunks=2, keys="wl-6", output="all frames"),
            save("save_right", (2260, 640), "right", "branch_right", "Save Right"),
            note(
                (40, 900),
                "## Branch\n\nTwo ways on from the same place. Both videos begin with the same frames; the common "
                "part is computed once.\n\n" + ABOUT,
            ),
        ),
        (
            *LEFT,
            Group("To the fork", (1360, 0, 400, 540), "#3f7e4e"),
            Group("Left", (1800, 0, 900, 540), "#7e6b3f"),
            Group("Right", (1800, 560, 900, 540), "#7e3f4e"),
        ),
    ),
    "live_world": Drawing(
        (
            *model_and_start(clip="model.CLIP"),
            Node("live", "LingBotLiveWorld", (1380, 80), {"keep_going": False}, {"world": "world.world"},
                 "Walk", (520, 900)),
            save("save", (1980, 80), "live", "live_world", "Save the Walk"),
            advance("again", (1980, 580), "world", "Walk It Again", controls="live.controls",
                    length="all of the controls"),
            save("save_again", (2440, 580), "again", "live_world_again", "Save It Again"),
            note(
                (40, 900),
                "## Live world\n\nQueue it, click the picture on *Walk*, and hold W A S D. It runs until *Stop*; then "
                "the walk is saved, and walked again from its controls: both videos are the same, frame by frame. "
                "*snapshot* and *world* of *Walk* are places to go on from.\n\n" + ABOUT,
            ),
        ),
        (
            *LEFT,
            Group("Walk", (1360, 0, 560, 1040), "#3f7e4e"),
            Group("What comes out", (1960, 0, 920, 1040), "#7e6b3f"),
        ),
    ),
    "events": Drawing(
        (
            *model_and_start(clip="model.CLIP", controls="events.controls"),
            Node(
                "events", "LingBotWorldEvents", (460, 940),
                {"script": "0: | w\n1: an orange sunset | wl\n3: a moonlit night | wj\n4:", "preset": "tiny"},
                title="Events", size=(380, 440),
            ),
            advance(
                "walk", (1380, 80), "world", "Walk", controls="events.controls", length="all of the controls"
            ),
            save("save", (1820, 80), "walk", "events", "Save Video"),
            note(
                (40, 900),
                "## Events\n\nA script says what happens in which chunk: a new prompt, other keys. What a row leaves "
                "out stays as it is. *Start World* has the text encoder connected, for the prompts, and the script, "
                "for its unit of movement.\n\n" + ABOUT,
            ),
        ),
        (
            *LEFT,
            Group("What happens", (440, 860, 420, 540), "#7e6b3f"),
            Group("Walk", (1360, 0, 900, 840), "#3f7e4e"),
        ),
    ),
}  # fmt: skip
