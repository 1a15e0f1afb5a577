"""The start image of a world, from every kind of IMAGE there is."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def as_in_a_node(graph):
    with torch.inference_mode():
        yield


@pytest.fixture
def prepare(graph):
    import world_graph

    def run(image, **inputs):
        return world_graph.call("LingBotStartImage", **{"image": image, "vae": graph.vae, **inputs})

    return run


def picture(*args, **kwargs):
    import world_graph

    return world_graph.picture(*args, **kwargs)


def errors(name):
    import world_graph

    return getattr(world_graph.part("lingbot_core.errors"), name)


@pytest.mark.parametrize(
    ("inputs", "size"),
    [
        ({"size": "custom", "width": 96, "height": 64}, (96, 64)),
        ({"size": "custom", "width": 96, "height": 64, "fit": "pad"}, (96, 64)),
        ({"size": "480p", "fit": "crop"}, (832, 480)),
        ({"size": "720p", "fit": "stretch"}, (1280, 720)),
        ({"size": "480p"}, (768, 512)),  # 3:2 at about 832 * 480 pixels, both sides floored
        ({"size": "480p", "fit": "pad", "upright": True}, (480, 832)),
        ({"size": "480p", "upright": True}, (512, 768)),
    ],
)
def test_sizes(graph, inputs, size):
    """Of the prepared picture; nothing is encoded."""
    import world_graph

    settings = {"fit": "area", "width": 0, "height": 0, **inputs}
    shape = (60, 40) if settings.pop("upright", False) else (40, 60)
    host = world_graph.part("nodes.host.start_image")
    made = host.prepare_picture(picture(height=shape[0], width=shape[1]), graph.vae, **settings)
    assert (made.image.width, made.image.height) == size
    assert made.image.pixels.shape == (3, size[1], size[0])
    assert made.condition.encoded == 0


def test_the_text_says_size_and_tokens(prepare):
    start, width, height, text = prepare(picture(), size="custom", width=96, height=64)
    assert (width, height) == (96, 64)
    assert text.splitlines()[:2] == ["96x64 from 60x40 (stretch)", "24 tokens per latent frame"]
    assert start.tokens == 24


def test_the_models_own_size_and_the_memory_of_a_world(prepare, graph):
    _, width, height, text = prepare(picture(), size="model", model=graph.model)
    area = graph.model.model.area
    assert 0.7 * area < width * height <= area
    assert "a world takes" in text
    assert "K/V cache" in text
    with pytest.raises(errors("ImageError"), match="size 'model' needs the model"):
        prepare(picture(), size="model")


def test_the_condition_is_encoded_for_a_first_chunk_and_the_world_uses_it(prepare, graph):
    start, *_ = prepare(picture(), size="custom", width=48, height=32)
    assert start.condition.encoded == 4
    world = graph.start(start_image=start)
    assert world.source.picture is start
    assert world.source.picture.condition.uses(world.source.host.world.vae)


def test_a_picture_encoded_by_another_vae_is_encoded_again(prepare, graph):
    import world_graph

    [_, _, vae] = world_graph.call("LingBotLoadWorldFolder", folder="tiny", weight_dtype="as stored", preset="auto")
    start, *_ = prepare(picture(), vae=vae, **world_graph.SIZE)
    world = graph.start(start_image=start)
    assert world.source.picture is not start
    assert world.source.picture.condition.uses(world.source.host.world.vae)
    assert torch.equal(graph.advance(world, 1)[0], graph.advance(graph.start(), 1)[0])


def test_of_a_batch_frame_0_counts_and_it_says_so(prepare):
    batch = torch.cat([picture(1), picture(2)])
    start, _, _, text = prepare(batch, size="custom", width=48, height=32)
    alone, *_ = prepare(batch[:1], size="custom", width=48, height=32)
    assert start.image.digest == alone.image.digest
    assert "the batch has 2 images: frame 0 is used" in text


def test_alpha_is_dropped_and_it_says_so(prepare):
    rgba = picture(channels=4)
    start, _, _, text = prepare(rgba, size="custom", width=48, height=32)
    plain, *_ = prepare(rgba[..., :3], size="custom", width=48, height=32)
    assert start.image.digest == plain.image.digest
    assert "the alpha channel is dropped" in text


def test_values_a_little_outside_are_clamped(prepare):
    image = picture() * 1.2 - 0.1
    start, *_ = prepare(image, size="custom", width=48, height=32)
    clamped, *_ = prepare(image.clamp(0, 1), size="custom", width=48, height=32)
    assert start.image.digest == clamped.image.digest


@pytest.mark.parametrize(("height", "width"), [(17, 31), (101, 33), (333, 500)])
def test_odd_sizes_are_resized(prepare, height, width):
    _, got_width, got_height, _ = prepare(picture(height=height, width=width), size="custom", width=64, height=48)
    assert (got_width, got_height) == (64, 48)


def test_the_picture_goes_through_a_file_like_any_other(prepare):
    """8-bit values as floats are the picture of the file."""
    levels = (picture() * 255).round()
    start, *_ = prepare(levels / 255, size="custom", width=48, height=32)
    import world_graph

    direct = world_graph.part("lingbot_core.engine.image").prepare_image(levels[0].to(torch.uint8), size=(32, 48))
    assert start.image.digest == direct.digest


@pytest.mark.parametrize(
    ("image", "inputs", "message"),
    [
        (torch.full((1, 32, 32, 3), float("nan")), {}, "NaN or infinity"),
        (torch.zeros(0, 32, 32, 3), {}, "batch is empty"),
        (torch.zeros(32, 32, 3), {}, r"must be an IMAGE.*not float32 \[32, 32, 3\]"),
        (torch.zeros(1, 32, 32, 3, dtype=torch.uint8), {}, "must be an IMAGE.*not uint8"),
        ("picture.png", {}, "not str; connect LoadImage"),
        (torch.zeros(1, 32, 32, 3), {"size": "8k"}, "size='8k' is unknown"),
        (torch.zeros(1, 32, 32, 3), {"fit": "squeeze"}, "fit='squeeze' is unknown"),
        (torch.zeros(1, 32, 32, 3), {"size": "custom", "width": 50, "height": 32}, "50"),
        (torch.zeros(1, 32, 32, 3), {"size": "custom", "width": 160000, "height": 160000}, "160000"),
        (torch.zeros(1, 8, 8, 3), {}, "at least 16"),
    ],
)
def test_what_is_no_start_image_is_refused(prepare, image, inputs, message):
    with pytest.raises(errors("ImageError"), match=message):
        prepare(image, **inputs)


def test_another_vae_is_refused_by_name(prepare):
    with pytest.raises(errors("WeightsError"), match="VAE"):
        prepare(picture(), vae=object())
