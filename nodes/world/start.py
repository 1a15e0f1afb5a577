"""Nodes that begin a world: its picture, and the world."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..host.begin import choose_preset, start_world
from ..host.named import Closings
from ..host.report import about_world, as_json
from ..host.run import WORLDS
from ..host.source import WorldSource, shared_host
from ..host.start_image import StartPicture, describe_picture, encode_picture, prepare_picture
from ..host.steering import Steering
from ..sockets import StartImage, World, expect
from ..widgets import widgets_checked
from .inputs import (
    CATEGORY,
    hold_input,
    picture_inputs,
    preset_input,
    seed_input,
    start_overrides,
    start_wish,
    steering_sockets,
)

CLOSINGS = Closings()


class LingBotStartImage(io.ComfyNode):
    """IMAGE -> START_IMAGE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotStartImage",
            display_name="LingBot Start Image",
            category=CATEGORY,
            description="Brings a picture to the size of a world and encodes it, so that any number of worlds can "
            "begin with it. The encoder runs in float32 whatever the VAE's precision.",
            search_aliases=["first frame", "world image", "resize for lingbot", "image to world"],
            inputs=[
                io.Image.Input("image", tooltip="The first frame of the world. Of a batch, frame 0 counts."),
                io.Vae.Input("vae", tooltip="The Wan 2.1 VAE: VAELoader or LingBotLoadWorldFolder."),
                *picture_inputs(),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="The world model: for size 'model', and to see the memory that a world takes.",
                ),
            ],
            outputs=[
                StartImage.Output("start_image", tooltip="For LingBotStartWorld."),
                io.Int.Output("width", tooltip="Width in pixels."),
                io.Int.Output("height", tooltip="Height in pixels."),
                io.String.Output("info", tooltip="Size, tokens, memory, and what was done to the picture."),
            ],
        )

    @classmethod
    @widgets_checked
    def execute(
        cls,
        image: Any,
        vae: Any,
        fit: str = "area",
        size: str = "480p",
        width: int = 832,
        height: int = 480,
        model: Any = None,
    ) -> io.NodeOutput:
        world = None if model is None else shared_host(model, vae).world
        area = None if world is None else world.area
        picture = prepare_picture(image, vae, fit=fit, size=size, width=width, height=height, area=area)
        made = picture.image
        estimate = None if world is None else world.estimate(world.preset, made.height, made.width)
        encode_picture(picture)
        return io.NodeOutput(picture, made.width, made.height, describe_picture(picture, estimate))


class LingBotStartWorld(io.ComfyNode):
    """A world that has made nothing yet."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        where = "Here only its unit, first step and lens are taken; steer with it in LingBotAdvanceWorld."
        return io.Schema(
            node_id="LingBotStartWorld",
            display_name="LingBot Start World",
            category=CATEGORY,
            description="Begins a world from a picture and a prompt. Connect LingBotAdvanceWorld to walk through it: "
            "one after another goes on, two on one output are branches.",
            search_aliases=["new world", "begin world", "world session", "lingbot sampler"],
            inputs=[
                io.Model.Input("model", tooltip="From LingBotLoadWorldModel or LingBotLoadWorldFolder; LoRAs work."),
                io.Vae.Input("vae", tooltip="The Wan 2.1 VAE."),
                io.Conditioning.Input("positive", tooltip="What the world is: CLIPTextEncode with umT5."),
                StartImage.Input("start_image", tooltip="From LingBotStartImage."),
                preset_input(),
                seed_input(),
                io.Conditioning.Input(
                    "negative", optional=True, tooltip="For presets with guidance; others refuse it."
                ),
                io.Clip.Input("clip", optional=True, tooltip="Needed to change the prompt in words later."),
                *steering_sockets(where),
                *start_overrides(),
                hold_input(
                    "For a camera path: set as where it steers the world, in LingBotAdvanceWorld. On: it keeps its own "
                    "speed and may be as short as you like; off: it is spread over whole chunks. The unit follows "
                    "from that."
                ),
            ],
            outputs=[
                World.Output("world", tooltip="A place in the world; any number of nodes may go on from it."),
                io.String.Output("report", tooltip="Recipe, unit, size and model as JSON."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> int:
        """Another number once the world was closed, so that a new one is begun."""
        return CLOSINGS.count(str(cls.hidden.unique_id), WORLDS.is_closed)

    @classmethod
    @widgets_checked
    def execute(
        cls,
        model: Any,
        vae: Any,
        start_image: Any,
        clip: Any = None,
        controls: Any = None,
        camera: Any = None,
        **more: Any,
    ) -> io.NodeOutput:
        picture = expect(start_image, StartPicture, "START_IMAGE", "LingBotStartImage")
        source = WorldSource.of(model, vae, clip, picture)
        wish = start_wish(more)
        steering = Steering.of(controls, camera, None, choose_preset(source, wish), hold=more.get("hold", False))
        handle = start_world(source, wish, steering.route)
        if cls.hidden is not None and cls.hidden.unique_id is not None:
            CLOSINGS.began(str(cls.hidden.unique_id), handle.session)
        return io.NodeOutput(handle, as_json(about_world(handle, source)))
