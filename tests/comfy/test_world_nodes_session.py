"""The one node for a whole world, queued again and again."""

from __future__ import annotations

import comfy.model_management as mm
import pytest
import torch
from comfy_api.latest import io

pytestmark = pytest.mark.usefixtures("wg")


@pytest.fixture
def name(request):
    """Names are for ever; each test has its own."""
    return request.node.name


def errors(wg, kind):
    return getattr(wg.part("lingbot_core.errors"), kind)


def fingerprint(wg, **inputs):
    cls = wg.node("LingBotWorldSession")
    cls.GET_SCHEMA()
    asked = cls.PREPARE_CLASS_CLONE({"hidden_inputs": {io.Hidden.unique_id: "77"}})
    return asked.fingerprint_inputs(**{"model": None, **inputs})


@pytest.mark.parametrize("forgotten", ["nothing", "caches", "everything"])
def test_continue_is_one_long_run(graph, wg, name, forgotten):
    controls = wg.part("lingbot_core.engine.route").route_from_keys("w-6, d-3", graph.model.model.preset)
    whole, *_ = graph.session("whole", "restart", 3, controls=controls)
    parts = []
    for mode in ("restart", "continue", "continue"):
        images, video, world, _ = graph.session(name, mode, 1, controls=controls)
        parts.append(images)
        if forgotten == "caches":
            wg.worlds().free()
        elif forgotten == "everything":
            wg.forget_everything()
    assert torch.equal(torch.cat(parts), whole)
    assert world.chunks == 3
    assert video.get_frame_count() == 12


def test_continue_begins_a_world_that_is_not_there_and_says_so(graph, name):
    images, _, _, report = graph.session(name, "continue", 1)
    assert len(images) == 9
    assert report["chunks"] == 1
    assert report["warnings"][0].startswith(f"there was no world {name!r} to continue")
    _, _, _, report = graph.session(name, "continue", 1)
    assert "no world" not in str(report["warnings"])


def test_restart_begins_anew(graph, name):
    first, *_ = graph.session(name, "restart", 1)
    graph.session(name, "continue", 1)
    again, _, world, _ = graph.session(name, "restart", 1)
    assert torch.equal(again, first)
    assert world.chunks == 1
    other, *_ = graph.session(name, "restart", 1, seed=9)
    assert not torch.equal(other, first)


def test_names_are_different_worlds(graph, name):
    graph.session(name, "restart", 1)
    graph.session(name + " 2", "restart", 1, seed=5)
    one, _, world, _ = graph.session(name, "continue", 1)
    assert world.history.start.seed == 3
    two, *_ = graph.session(name + " 2", "continue", 1, seed=5)
    assert not torch.equal(one, two)


def test_continue_always_runs_and_restart_runs_when_the_world_has_gone_on(graph, wg, name):
    assert fingerprint(wg, name=name, mode="continue") != fingerprint(wg, name=name, mode="continue")
    # ComfyUI gives None for what is linked.
    assert fingerprint(wg, name=None, mode="restart") != fingerprint(wg, name=None, mode="restart")
    before = fingerprint(wg, name=name, mode="restart")
    graph.session(name, "restart", 1)
    assert fingerprint(wg, name=name, mode="restart") == before
    graph.session(name, "continue", 1)
    assert fingerprint(wg, name=name, mode="restart") != before


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"window": 6}, "preset"),
        ({"shift": 4.0}, "preset"),
        ({"noise": "reference", "declared_chunks": 4}, "noise"),
    ],
)
def test_what_cannot_change_is_named(graph, wg, name, change, field):
    graph.session(name, "restart", 1)
    with pytest.raises(errors(wg, "HistoryError"), match=f"begun with {field}=.*set mode to restart"):
        graph.session(name, "continue", 1, **change)
    graph.session(name, "continue", 1)


def test_another_size_or_picture_is_named(graph, wg, name):
    graph.session(name, "restart", 1)
    for field, changed in (("width", {"width": 64}), ("height", {"height": 48})):
        [image, *_] = wg.call("LingBotStartImage", image=wg.picture(), vae=graph.vae, **{**wg.SIZE, **changed})
        with pytest.raises(errors(wg, "HistoryError"), match=f"begun with {field}="):
            graph.session(name, "continue", 1, start_image=image)
    [image, *_] = wg.call("LingBotStartImage", image=wg.picture(5), vae=graph.vae, **wg.SIZE)
    with pytest.raises(errors(wg, "HistoryError"), match="begun with image="):
        graph.session(name, "continue", 1, start_image=image)


def test_another_model_is_named_and_an_equal_one_goes_on(graph, wg, name):
    whole, *_ = graph.session("whole", "restart", 2)
    graph.session(name, "restart", 1)
    patched = graph.model.clone()
    key = next(k for k in patched.model.state_dict() if k.endswith("ffn.0.weight"))
    weight = patched.model.state_dict()[key]
    patched.add_patches({key: ("diff", (torch.ones_like(weight),))}, 0.5)
    with pytest.raises(errors(wg, "HistoryError"), match="begun with model="):
        graph.session(name, "continue", 1, model=patched)
    model, _, vae = wg.call("LingBotLoadWorldFolder", folder="tiny", weight_dtype="as stored", preset="auto")
    mm.unload_all_models()
    images, *_ = graph.session(name, "continue", 1, model=model, vae=vae)
    assert torch.equal(images, whole[9:])


def test_prompts_change_by_words_and_by_conditioning(graph, wg, name):
    plain, *_ = graph.session("plain", "restart", 2)
    graph.session(name, "restart", 1)
    images, _, _, report = graph.session(name, "continue", 1, prompt="a dragon")
    assert report["prompt_changes"] == [{"chunk": 1, "prompt": "a dragon"}]
    assert not torch.equal(images, plain[9:])
    # The words stay until something else is said.
    _, _, _, report = graph.session(name, "continue", 1)
    assert len(report["prompt_changes"]) == 1
    snow = graph.conditioning("it snows")
    _, _, _, report = graph.session(name, "continue", 1, positive=snow)
    assert [c["chunk"] for c in report["prompt_changes"]] == [1, 3]
    _, _, _, report = graph.session(name, "continue", 1, positive=snow)
    assert len(report["prompt_changes"]) == 2


def test_a_cancelled_restart_is_taken_up(graph, wg, name, monkeypatch):
    whole, *_ = graph.session("whole", "restart", 2)
    dit, calls = graph.model.model.diffusion_model, []
    forward = dit.forward

    def cancelled(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            wg.cancel()
        return forward(*args, **kwargs)

    monkeypatch.setattr(dit, "forward", cancelled)
    with pytest.raises(mm.InterruptProcessingException):
        graph.session(name, "restart", 2)
    images, _, _, report = graph.session(name, "restart", 2)
    assert torch.equal(images, whole)
    assert report["made"]["chunks_reused"] == 1


def test_a_cancelled_continue_is_taken_up(graph, wg, name, monkeypatch):
    whole, *_ = graph.session("whole", "restart", 3)
    graph.session(name, "restart", 1)
    dit, calls = graph.model.model.diffusion_model, []
    forward = dit.forward

    def cancelled(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            wg.cancel()
        return forward(*args, **kwargs)

    monkeypatch.setattr(dit, "forward", cancelled)
    with pytest.raises(mm.InterruptProcessingException):
        graph.session(name, "continue", 2)
    images, _, world, report = graph.session(name, "continue", 2)
    assert torch.equal(images, whole[9:])
    assert (world.chunks, report["made"]["chunks_reused"]) == (3, 1)


def test_an_image_serves_as_well_as_a_start_image(graph, wg, name):
    images, *_ = graph.session(name, "restart", 1)
    direct, *_ = graph.session(name, "restart", 1, start_image=None, image=wg.picture(), **wg.SIZE)
    assert torch.equal(direct, images)
    for given in ({"start_image": None}, {"image": wg.picture()}):
        with pytest.raises(errors(wg, "ImageError"), match="either image or start_image"):
            graph.session(name, "restart", 1, **given)


def test_a_name_does_not_keep_the_model_alive(graph, wg, name):
    graph.session(name, "restart", 1)
    assert wg.part("nodes.world.session").NAMED.get(name).handle.source is None


def test_a_closed_world_cannot_be_continued(graph, wg, name):
    _, _, world, _ = graph.session(name, "restart", 1)
    before = fingerprint(wg, name=name, mode="restart")
    wg.call("LingBotCloseWorld", world=world)
    with pytest.raises(errors(wg, "SessionError"), match="closed"):
        graph.session(name, "continue", 1)
    assert fingerprint(wg, name=name, mode="restart") != before
    graph.session(name, "restart", 1)


def test_names_and_modes_are_checked(graph, wg):
    with pytest.raises(errors(wg, "SessionError"), match="name is empty"):
        graph.session("  ", "restart")
    with pytest.raises(errors(wg, "SessionError"), match="mode='again'"):
        graph.session("world", "again")


def test_a_bounded_number_of_names_is_remembered(wg, graph, name):
    named = wg.part("nodes.host.named")
    worlds = named.NamedWorlds()
    handle = graph.start()
    for number in range(named.LIMIT + 3):
        worlds.put(f"{name} {number}", named.NamedWorld(handle, "p"))
    assert worlds.get(f"{name} 2") is None
    assert worlds.get(f"{name} 3") is not None
