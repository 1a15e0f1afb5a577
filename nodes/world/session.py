"""The one node for a whole world, which remembers it from one queue run to the next."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import Any

from comfy_api.latest import io

from ...lingbot_core.engine.history import StartRecord
from ...lingbot_core.errors import ImageError, SessionError
from ..host.begin import choose_preset, name_of, start_record, start_world
from ..host.named import Closings, NamedWorld, NamedWorlds, require_same_start
from ..host.run import WORLDS, make_chunks
from ..host.source import WorldSource, shared_host
from ..host.start_image import StartPicture, prepare_picture
from ..host.steering import Steering
from ..host.text import states_of
from ..host.video import VIDEOS
from ..sockets import StartImage, expect
from ..widgets import widgets_checked
from .advance import HIDDEN, as_output, run_outputs, run_wish
from .inputs import (
    CATEGORY,
    chunks_input,
    picture_inputs,
    preset_input,
    run_inputs,
    seed_input,
    start_overrides,
    start_wish,
    steering_sockets,
)

MODES = ("restart", "continue")
NAMED = NamedWorlds()
CLOSINGS = Closings()
_revisions = itertools.count()


class LingBotWorldSession(io.ComfyNode):
    """Picture, prompt and controls in; frames out; queued again, it goes on or begins anew."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotWorldSession",
            display_name="LingBot World Session",
            category=CATEGORY,
            description="A whole world in one node. mode restart begins it; mode continue adds to the world of the "
            "same name every time the workflow is queued, with other controls or prompts if you like.",
            search_aliases=["image to world", "image to video", "world model", "continue video", "lingbot"],
            inputs=[
                io.Model.Input("model", tooltip="From LingBotLoadWorldModel or LingBotLoadWorldFolder."),
                io.Vae.Input("vae", tooltip="The Wan 2.1 VAE."),
                io.Conditioning.Input("positive", tooltip="What the world is; may change while it goes on."),
                io.String.Input("name", default="world", tooltip="The world's name; other names are other worlds."),
                io.Combo.Input(
                    "mode",
                    options=list(MODES),
                    default=MODES[0],
                    tooltip="restart: begin the world anew. continue: add chunks to it; begins it if there is none.",
                ),
                chunks_input(),
                *picture_inputs(),
                preset_input(),
                seed_input(),
                io.Image.Input("image", optional=True, tooltip="The first frame; or connect start_image."),
                StartImage.Input("start_image", optional=True, tooltip="From LingBotStartImage, in place of image."),
                io.Conditioning.Input(
                    "negative", optional=True, tooltip="For presets with guidance; others refuse it."
                ),
                io.Clip.Input("clip", optional=True, tooltip="Needed to change the prompt in words."),
                *steering_sockets("At most one of controls, camera and keys; none stands still."),
                *run_inputs(),
                *start_overrides(),
            ],
            outputs=run_outputs(),
            hidden=HIDDEN,
        )

    @classmethod
    def fingerprint_inputs(cls, name: Any = None, mode: Any = None, **_: Any) -> str:
        """continue always runs; restart runs again once the world went on or was closed, or its file is gone."""
        if mode == MODES[0] and isinstance(name, str):
            lost = VIDEOS.lost(str(cls.hidden.unique_id))
            return f"restart after {NAMED.continued(name)}, {CLOSINGS.count(name, WORLDS.is_closed)}, {lost}"
        return f"continue {next(_revisions)}"

    @classmethod
    @widgets_checked
    def execute(
        cls,
        model: Any,
        vae: Any,
        name: str = "world",
        mode: str = MODES[0],
        image: Any = None,
        start_image: Any = None,
        clip: Any = None,
        controls: Any = None,
        camera: Any = None,
        keys: str = "",
        **more: Any,
    ) -> io.NodeOutput:
        if mode not in MODES:
            raise SessionError(f"mode={mode!r} is unknown; use one of {', '.join(MODES)}")
        if not name.strip():
            raise SessionError("name is empty; give the world a name")
        picture = _picture(model, vae, image, start_image, more)
        source = WorldSource.of(model, vae, clip, picture)
        wish = start_wish(more)
        preset = choose_preset(source, wish)
        entry, hold = more.get("controls_from", "auto"), more.get("hold", False)
        steering = Steering.of(controls, camera, keys, preset, entry=entry, hold=hold)
        positive = states_of(more["positive"], source.host.world.dit.config.text_dim)
        run = run_wish(steering, cls.hidden, more)
        known = NAMED.get(name)
        if mode == MODES[1] and known is not None:
            require_same_start(name, known.handle.history.start, start_record(source, wish, steering.route))
            handle = known.handle.from_source(source)
            NAMED.count(name)
            if not run.prompt and name_of(positive) != known.positive:
                run = replace(run, prompt=name_of(positive), states=positive)
        elif known is not None and _was_cancelled(known, start_record(source, wish, steering.route)):
            handle = known.handle.from_source(source)
        else:
            if mode == MODES[1]:
                note = f"there was no world {name!r} to continue (worlds go with ComfyUI): it was begun"
                logging.warning("LingBot World: %s", note)
                run = replace(run, notes=(note,))
            handle = start_world(source, wish, steering.route)
            CLOSINGS.began(name, handle.session)
        NAMED.put(name, NamedWorld(handle, known.positive if known and mode == MODES[1] else name_of(positive)))
        made = make_chunks(handle, run)
        NAMED.put(name, NamedWorld(made.handle, name_of(positive)))
        return as_output(made)


def _was_cancelled(known: NamedWorld, start: StartRecord) -> bool:
    """Whether the same world was begun before and not finished: its chunks are still there to be taken up."""
    handle = known.handle
    return not handle.chunks and handle.history.start == start and WORLDS.info(handle).state != "closed"


def _picture(model: Any, vae: Any, image: Any, start_image: Any, more: dict[str, Any]) -> StartPicture:
    if (image is None) == (start_image is None):
        raise ImageError("connect either image or start_image; one of them is the world's first frame")
    if start_image is not None:
        return expect(start_image, StartPicture, "START_IMAGE", "LingBotStartImage")
    return prepare_picture(
        image,
        vae,
        fit=more.get("fit", "area"),
        size=more.get("size", "480p"),
        width=more.get("width", 832),
        height=more.get("height", 480),
        area=shared_host(model, vae).world.area,
    )
