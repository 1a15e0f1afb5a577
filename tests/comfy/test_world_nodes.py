"""Worlds as nodes make them: going on, branching, coming back, closing; what they report and what they refuse."""

from __future__ import annotations

import json

import av
import numpy as np
import pytest
import torch
from comfy_api.latest import InputImpl, io

pytestmark = pytest.mark.usefixtures("wg")


def part(name):
    import world_graph

    return world_graph.part(name)


def routes():
    return part("lingbot_core.engine.route")


def preset(world):
    return world.history.start.preset


def latents(world):
    return torch.cat([record.latents for record in world.history.chunks], dim=1)


def trajectory(wg, poses):
    track = np.tile(np.eye(4), (poses, 1, 1))
    track[:, 0, 3] = np.linspace(0, 1, poses) ** 2
    track[:, 2, 3] = np.linspace(0, 2, poses)
    return wg.part("lingbot_core").CameraTrajectory.from_arrays(track, None, fps=16.0)


def test_every_node_has_an_id_of_ours_a_description_and_tooltips(graph, wg):
    nodes = wg.part("nodes.world").NODES
    assert len(nodes) == 7
    for cls in nodes:
        schema = cls.GET_SCHEMA()
        assert schema.node_id.startswith("LingBot")
        assert schema.category == "LingBot World"
        assert schema.description
        assert schema.search_aliases
        assert [i.id for i in (*schema.inputs, *schema.outputs) if not i.tooltip] == []


def test_a_world_is_frames_a_file_a_place_and_a_report(graph, tmp_path):
    images, video, after, report = graph.advance(graph.start(), 2, keys="w-6")
    assert images.shape == (21, 16, 32, 3)
    assert images.dtype == torch.float32
    assert 0 <= images.min() <= images.max() <= 1
    assert video.get_frame_count() == 21
    assert video.get_dimensions() == (32, 16)
    assert float(video.get_frame_rate()) == 16
    shown = video.get_components().images
    with part("lingbot_core.engine.video").VideoWriter(tmp_path / "again.mp4", width=32, height=16, fps=16) as again:
        again.write(images.mul(255).to(torch.uint8).numpy())
    assert torch.equal(shown, InputImpl.VideoFromFile(str(tmp_path / "again.mp4")).get_components().images)
    assert after.chunks == 2
    assert report["chunks"] == 2
    assert report["preset"] == "tiny (selection=indices [0, 500])"
    assert (report["translation_unit"], report["translation_unit_rule"]) == (0.05, "key")
    assert report["length"] == "2 chunks asked: 2 chunks of 3 latent frames, 21 frames, 1.31 seconds"
    assert len(report["made"]["by_chunk"]) == 2
    assert report["made"]["frames"] == 21


def test_the_node_path_gives_what_lingbot_core_gives(graph, wg):
    """Independent of handles and memory management: the same session driven by hand."""
    world = graph.start()
    images, _, after, _ = graph.advance(world, 2, keys="w-6")
    source = world.source
    session = wg.part("lingbot_core").WorldSession.start(
        source.host.world,
        source.picture.image,
        "by hand",
        preset=preset(world),
        seed=3,
        translation_unit=0.05,
        first_delta="from_rest",
        prompt_states=graph.positive[0][0][0][:20],
    )
    route = routes().route_from_keys("w-6", preset(world))
    chunks = [session.advance(controls) for controls in route.controls(session, source.picture.image, act=False)]
    assert torch.equal(torch.cat([c.latents for c in chunks], dim=1), latents(after))
    frames = torch.cat([c.frames for c in chunks], dim=1).movedim(0, -1)
    assert torch.equal(frames.add(1).div(2), images)


@pytest.mark.parametrize("forgotten", ["nothing", "caches", "everything"])
def test_continue_is_one_long_run(graph, wg, forgotten):
    controls = routes().route_from_keys("w-6, wd-3, none-3", preset(graph.start()))
    whole, _, end, _ = graph.advance(graph.start(), 4, controls=controls)
    world, parts = graph.start(), []
    for chunks in (1, 2, 1):
        images, _, world, report = graph.advance(world, chunks, controls=controls)
        parts.append(images)
        assert report["made"]["chunks_reused"] == 0
        if forgotten == "caches":
            assert wg.worlds().free() > 0
        elif forgotten == "everything":
            wg.forget_everything()
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(latents(world), latents(end))
    assert report["controls"]["begins_at_chunk"] == 3


def test_a_camera_goes_on_along_its_path_bitwise(graph, wg):
    path = trajectory(wg, 45)
    world = graph.start(camera=path)
    whole, _, _, report = graph.advance(world, length="all of the controls", camera=path)
    assert report["chunks"] == 4
    assert report["translation_unit_rule"] == "clip"
    parts, place = [], graph.start(camera=path)
    for _ in range(2):
        images, _, place, report = graph.advance(place, 2, camera=path)
        parts.append(images)
    assert torch.equal(torch.cat(parts), whole)
    assert report["controls"]["begins_at_chunk"] == 2


def test_where_controls_begin_can_be_chosen(graph, wg):
    path = trajectory(wg, 45)
    _, _, world, _ = graph.advance(graph.start(camera=path), 2, camera=path)
    begins = {
        entry: graph.advance(world, 1, camera=path, controls_from=entry)[3]["controls"]["begins_at_chunk"]
        for entry in ("auto", "continue", "beginning")
    }
    assert begins == {"auto": 2, "continue": 2, "beginning": 0}
    _, _, other, _ = graph.advance(graph.start(), 2, keys="a-6")
    assert graph.advance(other, 1, camera=path)[3]["controls"]["begins_at_chunk"] == 0
    # A path that is used up begins anew.
    _, _, end, _ = graph.advance(world, 2, camera=path)
    assert graph.advance(end, 1, camera=path)[3]["controls"]["begins_at_chunk"] == 0


@pytest.mark.parametrize("forgotten", ["nothing", "caches", "everything"])
def test_branches_share_their_beginning_bitwise(graph, wg, forgotten):
    forget = {"nothing": lambda: None, "caches": wg.worlds().free, "everything": wg.forget_everything}[forgotten]
    _, _, fork, _ = graph.advance(graph.start(), 2, keys="w-6")
    forget()
    left, _, at_left, _ = graph.advance(fork, 1, keys="a-3", output="all frames")
    forget()
    right, _, at_right, _ = graph.advance(fork, 1, keys="d-3", output="all frames")
    assert torch.equal(left[:21], right[:21])
    assert not torch.equal(left[21:], right[21:])
    assert torch.equal(latents(at_left)[:, :6], latents(at_right)[:, :6])
    # Each is what it would have been alone.
    _, _, alone, _ = graph.advance(graph.start(), 2, keys="w-6")
    assert torch.equal(graph.advance(alone, 1, keys="d-3")[0], right[21:])


def test_worlds_that_are_driven_in_turn_never_mix(graph):
    other = graph.conditioning("a blue house at night")
    kinds = [{"seed": 3}, {"seed": 4}, {"positive": other}]
    alone = [graph.advance(graph.start(**kind), 3, keys="w-9")[0] for kind in kinds]
    assert not torch.equal(alone[0], alone[1])
    assert not torch.equal(alone[0], alone[2])
    places = [graph.start(**kind) for kind in kinds]
    parts = [[], [], []]
    for _ in range(3):
        for i, place in enumerate(places):
            images, _, places[i], _ = graph.advance(place, 1, keys="w-3")
            parts[i].append(images)
    for pieces, whole in zip(parts, alone, strict=True):
        assert torch.equal(torch.cat(pieces), whole)


def test_queueing_the_same_again_decodes_only(graph, wg, monkeypatch):
    world = graph.start()
    first, *_ = graph.advance(world, 2, keys="w-6")
    dit = world.source.host.world.dit

    def denoised(*args, **kwargs):
        raise AssertionError("denoised again")

    monkeypatch.setattr(dit, "forward", denoised)
    again, video, _, report = graph.advance(world, 2, keys="w-6")
    assert torch.equal(again, first)
    assert video.get_frame_count() == 21
    assert report["made"]["chunks_reused"] == 2


def test_all_frames_are_those_that_were_handed_out(graph):
    first, _, world, _ = graph.advance(graph.start(), 2, keys="w-6")
    second, *_ = graph.advance(world, 1)
    everything, video, _, report = graph.advance(world, 1, output="all frames")
    assert torch.equal(everything, torch.cat([first, second]))
    assert video.get_frame_count() == 33
    assert report["made"]["frames"] == 12


def test_images_may_be_the_last_frame_only(graph):
    world = graph.start()
    images, *_ = graph.advance(world, 2)
    last, video, _, _ = graph.advance(world, 2, all_images=False)
    assert torch.equal(last, images[-1:])
    assert video.get_frame_count() == 21


def test_seconds_become_whole_chunks(graph):
    images, _, world, report = graph.advance(graph.start(), length="seconds", seconds=1.0)
    assert len(images) == 21  # 16 asked; 9 or 21 are possible
    assert report["length"] == "1 seconds asked: 2 chunks of 3 latent frames, 21 frames, 1.31 seconds"
    more, *_ = graph.advance(world, length="seconds", seconds=0.75)
    assert len(more) == 12


def test_nothing_that_steers_stands_still(graph):
    _, _, world, report = graph.advance(graph.start(), 2)
    poses = np.concatenate([record.controls.relative for record in world.history.chunks])
    assert np.array_equal(poses, np.tile(np.eye(4), (6, 1, 1)))
    assert report["controls"]["source"] == "standing still"


def test_a_prompt_changes_the_world_from_here_on(graph, wg):
    _, _, fork, _ = graph.advance(graph.start(), 1)
    same, *_ = graph.advance(fork, 1)
    changed, _, world, report = graph.advance(fork, 1, prompt="a huge blue dragon appears")
    assert not torch.equal(same, changed)
    assert report["prompt_changes"] == [{"chunk": 1, "prompt": "a huge blue dragon appears"}]
    # It stays, also when the world has to be rebuilt, and it is not the branch's.
    further, *_ = graph.advance(world, 1)
    wg.forget_everything()
    assert torch.equal(graph.advance(world, 1)[0], further)
    assert graph.advance(fork, 1)[3]["prompt_changes"] == []


def test_prompts_of_a_script_are_encoded_before_it_runs(graph):
    lines = [{"event_id": 0}, {"event_id": 1, "prompt": "it snows"}]
    start = graph.start()
    route = routes().route_from_events("\n".join(map(json.dumps, lines)), preset(start))
    images, _, world, report = graph.advance(start, 2, controls=route)
    assert report["prompt_changes"] == [{"chunk": 1, "prompt": "it snows"}]
    plain, *_ = graph.advance(graph.start(), 2)
    assert torch.equal(images[:9], plain[:9])
    assert not torch.equal(images[9:], plain[9:])
    assert torch.equal(graph.advance(graph.start(), 2, controls=route)[0], images)
    del world


def test_a_prompt_without_clip_says_where_to_connect_it(graph):
    with pytest.raises(Exception, match="connect clip on the node that starts the world"):
        graph.advance(graph.start(clip=None), 1, prompt="a dragon")


def test_start_overrides_reach_the_recipe_and_the_report(graph, wg):
    _, report = graph.start_with_report(window=6, sink=3, shift=5.0, fps=8.0, translation_unit="0.5", steps="0, 300")
    assert report["preset"].startswith("tiny (")
    for change in ("window=6", "sink=3", "shift=5.0", "indices [0, 300]"):
        assert change in report["preset"]
    assert (report["fps"], report["translation_unit"], report["translation_unit_rule"]) == (8.0, 0.5, "number")
    _, report = graph.start_with_report(first_delta="identity", reuse_last_step_kv="on", still_window=6, rewind_depth=2)
    assert report["first_delta"] == "identity"
    assert "reuse_last_step_kv=True" in report["preset"]
    assert "still_window=6" in report["preset"]


def test_overrides_that_a_preset_cannot_honour_are_refused(graph):
    error = errors("PresetError")
    with pytest.raises(error, match="no preset 'v9'"):
        graph.start(preset="v9")
    with pytest.raises(error, match=r"steps='many'.*indices such as 0,179,358,679"):
        graph.start(steps="many")
    with pytest.raises(error, match="guidance_scale=4"):
        graph.start(guidance_scale=4.0)
    with pytest.raises(error, match="disconnect negative"):
        graph.start(negative=graph.positive)
    with pytest.raises(error, match="window=2 cannot hold"):
        graph.start(window=2)


def test_a_guided_world_takes_negative_or_encodes_its_own(graph):
    options = {"preset": "v2-causal-pretrain", "steps": "2", "chunk": 3, "window": 9}
    with pytest.raises(errors("PromptError"), match="connect negative"):
        graph.start(clip=None, **options)
    own, _, at_own, report = graph.advance(graph.start(**options), 1)
    assert report["negative_prompt"].startswith("画面突变")
    given, *_ = graph.advance(graph.start(negative=graph.conditioning("ugly"), **options), 1)
    assert own.shape == given.shape == (9, 16, 32, 3)
    assert not torch.equal(own, given)
    forget_and_go_on(graph, at_own)


def forget_and_go_on(graph, place):
    import world_graph

    there, *_ = graph.advance(place, 1)
    world_graph.forget_everything()
    assert torch.equal(graph.advance(place, 1)[0], there)


def errors(name):
    return getattr(part("lingbot_core.errors"), name)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"chunks": 0}, "LengthError", "chunks=0"),
        ({"chunks": 3, "keys": "w-6"}, "LengthError", "3 chunks were asked for.*have 2 in all"),
        ({"chunks": 10**7}, "LengthError", "at most"),
        ({"length": "seconds", "seconds": 0.0}, "LengthError", "seconds=0.0"),
        ({"length": "all of the controls"}, "LengthError", "needs controls"),
        ({"output": "some"}, "LingBotError", "output='some'"),
        ({"keys": "q-6"}, "CameraError", "q"),
        ({"keys": "w-6", "camera": "path"}, "CameraError", "camera and keys both steer"),
    ],
)
def test_runs_that_cannot_be_are_refused(graph, wg, inputs, error, message):
    if inputs.get("camera"):
        inputs = {**inputs, "camera": trajectory(wg, 21)}
    world = graph.start()
    with pytest.raises(errors(error), match=message):
        graph.advance(world, **inputs)
    assert wg.call("LingBotWorldInfo", world=world)[0] == "ready"


def test_a_camera_shorter_than_the_chunks_names_both_lengths(graph, wg):
    with pytest.raises(errors("LengthError"), match=r"4 chunks were asked for, but .* have 2 in all"):
        graph.advance(graph.start(), 4, camera=trajectory(wg, 21))


@pytest.mark.parametrize("kind", ["controls", "camera", "keys"])
def test_the_camera_may_stand_still_where_the_controls_end(graph, wg, kind):
    start = graph.start()
    given = {
        "controls": lambda: routes().route_from_keys("w-3", preset(start)),
        "camera": lambda: trajectory(wg, 13),
        "keys": lambda: "w-3",
    }[kind]()
    _, _, world, _ = graph.advance(start, 3, hold=True, **{kind: given})
    steps = [record.controls.relative for record in world.history.chunks]
    assert not np.allclose(steps[0], np.eye(4))
    assert np.allclose(steps[2], np.eye(4))


@pytest.mark.parametrize("poses", [2, 32])
def test_a_camera_with_hold_is_what_controls_that_hold_make_of_it(graph, wg, poses):
    """Its unit included, which two ways of planning one path do not share."""
    path, recipe = trajectory(wg, poses), preset(graph.start())
    route = routes().route_from_camera(path, recipe, length="hold")
    _, _, expected, report = graph.advance(graph.start(controls=route), 3, controls=route)
    assert report["warnings"] == []
    start = graph.start(camera=path, hold=True)
    _, _, world, report = graph.advance(start, 3, camera=path, hold=True)
    assert start.history.start.translation_unit == expected.history.start.translation_unit
    assert [r.controls for r in world.history.chunks] == [r.controls for r in expected.history.chunks]
    assert report["warnings"] == []
    _, _, world, _ = graph.session(f"held {poses}", "restart", 3, camera=path, hold=True)
    assert [r.controls for r in world.history.chunks] == [r.controls for r in expected.history.chunks]


def test_a_camera_that_is_too_short_without_hold_says_so_wherever_it_is_connected(graph, wg):
    path = trajectory(wg, 2)
    for attempt in (lambda: graph.start(camera=path), lambda: graph.session("short", "restart", camera=path)):
        with pytest.raises(errors("LengthError"), match=r"2 poses is shorter than one chunk of 9 .* \(hold\)"):
            attempt()


@pytest.mark.parametrize("hold", [False, True])
def test_a_camera_that_is_held_in_one_place_only_is_told(graph, wg, hold):
    path = trajectory(wg, 32)
    start = graph.start(camera=path, hold=hold)
    [warning] = graph.advance(start, 1, camera=path, hold=not hold)[3]["warnings"]
    # 21 frames of 29 poses: the steps of the path that is spread are 28 / 20 as long, and somewhat more or less where
    # it speeds up.
    words = ("on", "off") if hold else ("off", "on")
    assert f"hold {words[0]}, here hold is {words[1]}: its longest step is " in warning
    ratio = float(warning.split("longest step is ")[1].split()[0])
    assert ratio == pytest.approx(1 / 1.4 if not hold else 1.4, rel=0.1)
    assert "Set hold alike" in warning
    assert graph.advance(start, 1, camera=path, hold=hold)[3]["warnings"] == []
    assert graph.advance(start, 1, camera=trajectory(wg, 45), hold=not hold)[3]["warnings"] == []


def test_objects_of_other_packs_are_named(graph):
    with pytest.raises(TypeError, match=r"WORLD input got a str of another pack.*LingBotStartWorld"):
        graph.advance("their world", 1)
    with pytest.raises(TypeError, match=r"CONTROLS input got a dict of another pack.*LingBotControls"):
        graph.advance(graph.start(), 1, controls={})
    with pytest.raises(TypeError, match=r"CAMERA input got a list of another pack"):
        graph.advance(graph.start(), 1, camera=[])
    with pytest.raises(TypeError, match=r"START_IMAGE input got a Tensor of another pack"):
        graph.start(start_image=torch.zeros(1, 8, 8, 3))


def test_a_closed_world_is_refused_and_its_branch_is_not(graph, wg):
    _, _, fork, _ = graph.advance(graph.start(), 1)
    _, _, main, _ = graph.advance(fork, 1, keys="w-3")
    _, _, side, _ = graph.advance(fork, 1, keys="d-3")
    [text] = wg.call("LingBotCloseWorld", world=main)
    assert "closed a world of 2 chunks" in text
    for place in (fork, main):
        with pytest.raises(errors("SessionError"), match="this world was closed; start a new one"):
            graph.advance(place, 1)
        assert wg.call("LingBotWorldInfo", world=place)[0] == "closed"
    graph.advance(side, 1)
    wg.call("LingBotCloseWorld", world=main)


def test_a_node_whose_world_was_closed_runs_again(graph, wg):
    """ComfyUI would else give its next node the closed world for ever."""
    node = wg.node("LingBotStartWorld").PREPARE_CLASS_CLONE({"hidden_inputs": {io.Hidden.unique_id: "7"}})
    world = graph.start()
    before = node.fingerprint_inputs(model=None, seed=3)
    assert node.fingerprint_inputs(model=None, seed=3) == before
    _, _, after, _ = graph.advance(world, 1)
    wg.call("LingBotCloseWorld", world=after)
    again = node.fingerprint_inputs(model=None, seed=3)
    assert again != before
    assert node.fingerprint_inputs(model=None, seed=3) == again
    graph.advance(graph.start(), 1)
    assert node.fingerprint_inputs(model=None, seed=3) == again


def test_a_file_that_cannot_be_written_stops_the_run_and_keeps_the_chunks(graph, wg, monkeypatch):
    whole, *_ = graph.advance(graph.start(), 4)
    start = graph.start()
    writer = part("lingbot_core.engine.video").VideoWriter
    full = part("lingbot_core.errors").VideoError("the disk is full")
    write, calls = writer.write, []

    def fails(self, frames):
        calls.append(1)
        if len(calls) == 2:
            raise full
        return write(self, frames)

    monkeypatch.setattr(writer, "write", fails)
    with pytest.raises(errors("VideoError"), match="the disk is full"):
        graph.advance(start, 4)
    assert wg.worlds().info(start).head >= 3
    images, _, _, report = graph.advance(start, 4)
    assert torch.equal(images, whole)
    assert report["made"]["chunks_reused"] >= 3


def test_info_tells_state_length_and_bytes(graph, wg):
    _, _, world, _ = graph.advance(graph.start(), 2)
    state, chunks, frames, seconds, held, text = wg.call("LingBotWorldInfo", world=world)
    assert (state, chunks, frames, seconds) == ("ready", 2, 21, 21 / 16)
    session = wg.worlds().living(world).session
    assert held == session.cache_nbytes + world.history.nbytes
    assert json.loads(text)["world"]["preset"].startswith("tiny")
    wg.worlds().free()
    state, _, _, _, held, _ = wg.call("LingBotWorldInfo", world=world)
    assert (state, held) == ("asleep", world.history.nbytes)
    nan = wg.node("LingBotWorldInfo").fingerprint_inputs()
    assert nan != nan


def test_latents_are_in_the_scale_of_core_nodes(graph, wg):
    import nodes

    images, _, world, _ = graph.advance(graph.start(), 2, keys="w-6")
    [latent] = wg.call("LingBotWorldLatents", world=world)
    assert latent["samples"].shape == (1, 16, 6, 2, 4)
    [decoded] = nodes.VAEDecode().decode(graph.vae, latent)
    assert decoded.shape == images.shape
    assert (decoded - images).abs().max() < 1e-3
    [later] = wg.call("LingBotWorldLatents", world=world, first_chunk=1)
    assert torch.equal(later["samples"], latent["samples"][:, :, 3:])
    with pytest.raises(errors("LengthError"), match="none from chunk 2 on"):
        wg.call("LingBotWorldLatents", world=world, first_chunk=2)


def test_the_file_has_the_workflow_also_after_savevideo(graph, wg, tmp_path):
    hidden = {"PROMPT": {"7": {"class_type": "LingBotAdvanceWorld"}}, "EXTRA_PNGINFO": {"workflow": {"nodes": [1, 2]}}}
    _, video, _, _ = wg.call("LingBotAdvanceWorld", hidden, world=graph.start(), chunks=1)
    video.save_to(str(tmp_path / "saved.mp4"))
    for path in (video.get_stream_source(), str(tmp_path / "saved.mp4")):
        with av.open(path) as file:
            assert json.loads(file.metadata["prompt"]) == hidden["PROMPT"]
            assert json.loads(file.metadata["workflow"]) == {"nodes": [1, 2]}
            assert json.loads(file.metadata["lingbot_world"])["seed"] == 3
            assert "frag" not in file.metadata.get("major_brand", "")
            assert sum(1 for _ in file.decode(video=0)) == 9


def test_metadata_can_be_switched_off(graph, wg, monkeypatch):
    from comfy.cli_args import args

    monkeypatch.setattr(args, "disable_metadata", True)
    _, video, _, _ = wg.call("LingBotAdvanceWorld", {"PROMPT": {"7": {}}}, world=graph.start(), chunks=1)
    with av.open(video.get_stream_source()) as file:
        assert "prompt" not in file.metadata


def test_hidden_inputs_are_asked_for(wg):
    for name in ("LingBotAdvanceWorld", "LingBotWorldSession"):
        asked = set(wg.node(name).GET_SCHEMA().hidden)
        assert asked >= {io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo}
