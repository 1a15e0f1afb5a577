"""A living world: how it begins, what a chunk is made of, and that nothing of one session reaches another."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch

from lingbot_core.camera.controls import KeyMotion, to_controls
from lingbot_core.camera.keys import PER_LATENT
from lingbot_core.camera.rays import action_rays, camera_rays
from lingbot_core.engine.noise import InjectedNoise, ReferenceNoise, SeededNoise
from lingbot_core.engine.session import WorldSession
from lingbot_core.errors import CameraError, LengthError, PresetError, PromptError, SessionBusyError, SessionError
from lingbot_core.models import dit as dit_module
from lingbot_core.presets import Preset, TableSteps


def storages(session) -> set[int]:
    """Where the tensors lie that a session changes or derives."""
    tensors = [t for cache in session._derived.caches for t in (*cache._keys, *cache._values)]
    tensors += [slot for slot in session._derived.decoder.slots if slot is not None]
    tensors += [*session._derived.prompts._current[1].keys, *session._derived.prompts._current[1].values]
    tensors += [record.latents for record in session.history.chunks]
    return {t.untyped_storage().data_ptr() for t in tensors}


# What a chunk is


def test_a_chunk_carries_frames_latents_poses_prompt_and_timings(small, walks, recipe):
    walk = walks[recipe]
    preset = walk.session.history.start.preset
    for index, chunk in enumerate(walk.chunks):
        frames = 4 * preset.chunk - (3 if index == 0 else 0)
        assert chunk.index == index
        assert chunk.frames.shape == (3, frames, 16, 32)
        assert chunk.frames.dtype == chunk.latents.dtype == torch.float32
        assert chunk.frames.abs().max() <= 1
        assert chunk.latents.shape == (16, preset.chunk, 2, 4)
        assert np.array_equal(chunk.poses, small.controls(index, preset.chunk).relative)
        assert chunk.prompt == ("a" if index < 3 else "b")
        stages = {"prepare", "denoise", "decode"} | (set() if preset.reuse_last_step_kv else {"commit"})
        assert set(chunk.timings) == stages
        assert all(seconds >= 0 for seconds in chunk.timings.values())
        assert walk.session.history.chunks[index].timings == chunk.timings
        assert torch.equal(walk.session.history.chunks[index].latents, chunk.latents)


def test_frames_chunk_by_chunk_are_the_whole_clip_decoded_at_once(small, walks, recipe):
    walk = walks[recipe]
    whole = small.world.vae.decode(torch.cat([chunk.latents for chunk in walk.chunks], dim=1))
    assert torch.equal(torch.cat([chunk.frames for chunk in walk.chunks], dim=1), whole)
    assert walk.session.history.frames == whole.shape[1]


def test_every_input_changes_the_chunk(small, walks):
    """What the bitwise tests compare would otherwise be equal for the wrong reason."""
    expected = walks["window"].chunks[0].latents
    straight = small.controls(0, 3)
    other_path = small.controls(1, 3)
    assert torch.equal(small.start().advance(straight).latents, expected)
    assert not torch.equal(small.start(seed=8).advance(straight).latents, expected)
    assert not torch.equal(small.start().advance(other_path).latents, expected)
    session = small.start()
    session.set_prompt("b", states=small.states(1))
    assert not torch.equal(session.advance(straight).latents, expected)
    assert not torch.equal(small.start(intrinsics=(20.0, 20.0, 16.0, 8.0)).advance(straight).latents, expected)
    pixels = -small.condition.image.pixels
    image = type(small.condition.image)(pixels, 16, 32, 16, 32, "area", digest="another")
    assert not torch.equal(small.start(image=image).advance(straight).latents, expected)
    # The past alone: same noise, camera, prompt and place, after another first chunk.
    session = small.start(seed=8)
    small.step(session)
    second = session.advance(small.controls(1, 3), noise=InjectedNoise(*_draws(1)))
    assert not torch.equal(second.latents, walks["window"].chunks[1].latents)


def _draws(chunk: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    source = SeededNoise(7, (16, 3, 2, 4))
    return source.draw(chunk, 0), [source.draw(chunk, 1)]


def test_the_latents_do_not_depend_on_who_asks_for_frames_and_steps(small, walks):
    session = small.start()
    steps, shown = [], []
    for expected in walks["window"].chunks[:4]:
        chunk = small.step(session, on_step=lambda *step: steps.append(step), on_frames=shown.append)
        small.assert_same_chunk(chunk, expected)
    assert steps == [(0, 2), (1, 2)] * 4
    for early, expected in zip(shown, walks["window"].chunks, strict=False):
        small.assert_same_chunk(early, expected)
        assert "commit" not in early.timings


# Isolation


@pytest.mark.parametrize("recipe", ["window", "partial-eviction", "guided"])
def test_interleaved_sessions_equal_sessions_on_their_own(small, walks, recipe):
    """A0 B0 A1 B1 ... = A0 A1 ..., B0 B1 ...; both share the world and the encoded image."""
    other = {"seed": 21, "intrinsics": (20.0, 20.0, 16.0, 8.0)}
    alone = small.steps(small.start(recipe, **other), 5)
    first, second = small.start(recipe), small.start(recipe, **other)
    for a, b in zip(walks[recipe].chunks[:5], alone, strict=True):
        small.assert_same_chunk(small.step(first), a)
        small.assert_same_chunk(small.step(second), b)
    small.assert_same_caches(first._derived.caches, walks[recipe].caches[4])
    assert not storages(first) & storages(second)


def test_sessions_of_different_recipes_do_not_disturb_each_other(small, walks):
    names = ["window", "partial-eviction", "guided", "reuse-last-step"]
    sessions = {name: small.start(name) for name in names}
    for index in range(4):
        for name, session in sessions.items():
            small.assert_same_chunk(small.step(session), walks[name].chunks[index])


def test_each_chunk_may_come_from_another_thread(small, walks):
    session = small.start()
    for expected in walks["window"].chunks[:4]:
        with ThreadPoolExecutor(1) as pool:
            chunk = pool.submit(small.step, session).result()
        small.assert_same_chunk(chunk, expected)


def test_no_gradient_is_kept_whatever_the_weights_and_the_thread_want(small, walks):
    """Inference mode belongs to a thread; a session enters it by itself."""
    contexts = []
    encode = small.world.dit.encode_camera
    small.world.dit.requires_grad_(True)
    small.world.dit.encode_camera = lambda rays: contexts.append(encode(rays)) or contexts[-1]
    try:
        with torch.enable_grad():
            session = small.start()
            chunk = small.step(session)
            session.set_prompt("b", states=small.states(1))
    finally:
        small.world.dit.requires_grad_(False)
        del small.world.dit.encode_camera
    small.assert_same_chunk(chunk, walks["window"].chunks[0])
    cross = session._derived.prompts._current[1]
    kept = (*cross.keys, *cross.values, *contexts[0].scales, *contexts[0].shifts, chunk.frames, chunk.latents)
    assert not any(t.requires_grad for t in kept)


def test_sessions_in_several_threads_at_once_equal_sessions_on_their_own(small, walks):
    sessions = {name: small.start(name) for name in ("window", "whole-past", "partial-eviction")}
    with ThreadPoolExecutor(3) as pool:
        runs = {name: pool.submit(small.steps, session, 4) for name, session in sessions.items()}
    for name, run in runs.items():
        for chunk, expected in zip(run.result(), walks[name].chunks, strict=False):
            small.assert_same_chunk(chunk, expected)


def test_a_second_thread_is_refused_at_once(small, walks):
    session = small.start()
    inside, leave = threading.Event(), threading.Event()

    def wait(step: int, total: int) -> None:
        inside.set()
        assert leave.wait(30)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(small.step, session, on_step=wait)
        try:
            assert inside.wait(30)
            assert session.state == "running"
            calls = (
                lambda: small.step(session),
                session.resume,
                session.fork,
                session.close,
                lambda: session.rewind(0),
                lambda: session.set_prompt("b", states=small.states(1)),
            )
            for call in calls:
                with pytest.raises(SessionBusyError):
                    call()
        finally:
            leave.set()
        small.assert_same_chunk(running.result(), walks["window"].chunks[0])
    assert session.state == "ready"
    small.assert_same_chunk(small.step(session), walks["window"].chunks[1])


def test_a_closed_session_refuses_and_keeps_its_history(small):
    session = small.start(noise="reference", chunks=4)
    chunk = small.step(session)
    held = session.nbytes
    session.close()
    session.close()
    assert session.state == "closed"
    assert session.nbytes == session.history.nbytes < held
    assert torch.equal(session.history.chunks[0].latents, chunk.latents)
    calls = (
        lambda: session.advance(small.controls(1, 3)),
        session.resume,
        session.fork,
        lambda: session.rewind(0),
        lambda: session.set_prompt("b", states=small.states(1)),
    )
    for call in calls:
        with pytest.raises(SessionError, match="closed"):
            call()


def test_nbytes_counts_cache_cross_attention_decoder_and_history(small):
    session = small.start(rewind_depth=1)
    cache = 2 * 3 * 9 * 2 * 64 * 4  # k and v, layers, frames of the window, tokens of a frame, width, bytes
    cross = 2 * 3 * 12 * 64 * 4
    states = session._derived.prompts._states["a"].nbytes
    assert session.nbytes == cache + cross + states
    small.steps(session, 2)
    decoder = session._derived.decoder.nbytes
    snapshot = session._derived.decoders[-1][1].nbytes
    assert decoder > 0
    assert session.nbytes == cache + cross + states + decoder + snapshot + session.history.nbytes


# Prompt, camera, control


def test_the_camera_of_a_chunk_is_evaluated_once_per_layer(small):
    session = small.start()
    calls: list[str] = []
    modules = {name: module for name, module in small.world.dit.named_modules() if "cam" in name or "c2ws" in name}
    hooks = [m.register_forward_hook(lambda *_, name=n: calls.append(name)) for n, m in modules.items()]
    try:
        small.steps(session, 2)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(modules) == 3 + 4 * small.world.dit.config.num_layers
    assert sorted(calls) == sorted(2 * list(modules))


def test_the_commit_sees_bitwise_the_camera_of_the_denoising(small, monkeypatch):
    session = small.start()
    seen: list[dit_module.ChunkContext] = []
    for name in ("forward", "remember"):
        run = getattr(small.world.dit, name)
        monkeypatch.setattr(small.world.dit, name, lambda x, t, c, run=run: seen.append(c) or run(x, t, c))
    small.step(session)
    assert len(seen) == 3
    expected = small.world.dit.encode_camera(
        camera_rays(small.controls(0, 3).relative, session.history.start.intrinsics, 16, 32)
    )
    for context in seen:
        assert context.camera is seen[0].camera
        for got, wanted in zip(context.camera.scales, expected.scales, strict=True):
            assert torch.equal(got, wanted)


def test_the_time_embedding_runs_for_one_row(small):
    session = small.start()
    rows: list[int] = []
    layers = (*small.world.dit.time_embedding, *small.world.dit.time_projection)
    hooks = [layer.register_forward_hook(lambda m, args, out: rows.append(args[0].shape[0])) for layer in layers]
    try:
        small.step(session)
    finally:
        for hook in hooks:
            hook.remove()
    assert rows == [1] * 5 * 3  # three forwards


def test_a_new_prompt_rebuilds_cross_attention_only(small, walks):
    session = walks.fork("guided", 4)
    small.step(session)
    before = [cache.clone() for cache in session._derived.caches]
    negative = session._derived.prompts._negative
    calls: dict[str, int] = {}
    hooks = [
        module.register_forward_hook(lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1}))
        for name, module in small.world.dit.named_modules()
    ]
    try:
        session.set_prompt("new", states=small.states(2))
    finally:
        for hook in hooks:
            hook.remove()
    layers = range(small.world.dit.config.num_layers)
    text = {"text_embedding", "text_embedding.0", "text_embedding.1", "text_embedding.2"}
    cross = {f"blocks.{i}.cross_attn.{name}" for i in layers for name in ("k", "v", "norm_k")}
    assert calls == dict.fromkeys(text | cross, 1)
    small.assert_same_caches(session._derived.caches, before)
    assert session._derived.prompts._negative is negative
    assert session._derived.prompts._current[0] == "new"
    # The next chunk is made with it, and the K/V of what was there before stay as they are.
    kept = [frame for frame in before[0].slot_frames if frame < 3 or frame >= 15 - 3]
    small.step(session)
    assert session.history.chunks[-1].prompt == "new"
    assert session._derived.prompts._negative is negative
    for mine, old in zip(session._derived.caches, before, strict=True):
        for frame in kept:
            for layer in layers:
                for a, b in zip(mine.view(layer), old.view(layer), strict=True):
                    tokens = mine.shape.frame_tokens
                    here, there = mine.slot_frames.index(frame) * tokens, old.slot_frames.index(frame) * tokens
                    assert torch.equal(a[here : here + tokens], b[there : there + tokens])


def test_a_prompt_in_the_controls_equals_one_that_was_set(small, walks):
    session = walks.fork("window", 3)
    session.set_prompt("b", states=small.states(1))
    session.set_prompt("a")
    assert session.prompt == "a"
    chunk = session.advance(small.controls(3, 3, "b"))
    small.assert_same_chunk(chunk, walks["window"].chunks[3])
    assert session.prompt == "b"
    small.assert_same_chunk(small.step(session), walks["window"].chunks[4])


def test_states_that_do_not_fit_are_refused_and_change_nothing(small, walks):
    session = walks.fork("window", 4)
    for wrong, message in (
        (torch.zeros(13, 20), "text states of 13 tokens do not fit this model, which takes 1 to 12"),
        (torch.zeros(0, 20), "text states of 0 tokens"),
        (torch.zeros(4, 21), r"shape \[4, 21\] do not fit this model, which takes \[L, 20\]"),
        (torch.zeros(1, 4, 20), r"shape \[1, 4, 20\]"),
    ):
        with pytest.raises(PromptError, match=message):
            session.set_prompt("wrong", states=wrong)
        with pytest.raises(PromptError, match=message):
            WorldSession.start(small.world, small.condition, "x", prompt_states=wrong)
    assert session.prompt == "b"
    with pytest.raises(PromptError, match="without a text encoder"):
        session.set_prompt("wrong")
    small.assert_same_chunk(small.step(session), walks["window"].chunks[4])


def test_one_text_cannot_stand_for_two_sets_of_states_in_a_history(small, walks):
    session = walks["window"].session.fork()
    with pytest.raises(PromptError, match="'a' is in this session's history with other text states"):
        session.set_prompt("a", states=small.states(3))
    session.set_prompt("a", states=small.states(0))
    session.set_prompt("unused", states=small.states(3))
    session.set_prompt("unused", states=small.states(4))
    assert session.prompt == "unused"


def test_controls_are_made_in_the_sessions_unit_and_go_on_from_its_pose(small):
    session = small.start(translation_unit=0.5, first_delta="from_rest")
    poses = np.tile(np.eye(4), (3, 1, 1))
    poses[:, 2, 3] = [1.0, 2.0, 4.0]
    first = session.controls(poses)
    assert np.allclose(first.relative[:, 2, 3], [2.0, 2.0, 4.0])
    session.advance(first)
    assert np.array_equal(session.carry.pose, poses[-1])
    assert session.carry.latents == 3
    keys = KeyMotion(("w", "", "w"), PER_LATENT)
    second = session.controls(keys)
    expected, _ = to_controls(keys, latents=3, unit=0.5, first_delta="from_rest", carry=session.carry)
    assert second == expected
    assert np.allclose(second.relative[:, 2, 3], [0.1, 0.0, 0.1])


def test_controls_of_another_length_or_control_are_refused(small, walks):
    session = walks.fork("window", 1)
    with pytest.raises(CameraError, match="controls hold 4 poses; preset window takes 3 per chunk"):
        session.advance(small.controls(1, 4))
    poses = np.tile(np.eye(4), (3, 1, 1))
    with pytest.raises(CameraError, match="takes no actions"):
        session.advance(session.controls(poses, actions=np.zeros((3, 4))))
    small.assert_same_chunk(small.step(session), walks["window"].chunks[1])


def test_an_act_model_is_steered_by_actions(small, act_world):
    session = WorldSession.start(act_world, small.condition, "a", prompt_states=small.states(0))
    with pytest.raises(CameraError, match="give w a s d rows"):
        small.step(session)
    poses = np.tile(np.eye(4), (3, 1, 1))
    held = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]])
    seen = []
    encode = act_world.dit.encode_camera
    act_world.dit.encode_camera = lambda rays: seen.append(rays) or encode(rays)
    try:
        walked = session.fork().advance(session.controls(poses, actions=held))
        still = session.advance(session.controls(poses, actions=0 * held))
    finally:
        del act_world.dit.encode_camera
    assert torch.equal(seen[0], action_rays(poses, session.history.start.intrinsics, held, 16, 32))
    assert not torch.equal(walked.latents, still.latents)


# Guidance


def test_guidance_runs_two_branches_with_own_caches_and_the_same_camera(small, monkeypatch):
    session = small.start("guided")
    forward = small.world.dit.forward
    seen: list[tuple[dit_module.ChunkContext, torch.Tensor]] = []

    def record(x, t, context):
        flow = forward(x, t, context)
        seen.append((context, flow))
        return flow

    monkeypatch.setattr(small.world.dit, "forward", record)
    small.step(session)
    assert len(seen) == 2 * 3
    positive, negative = session._derived.caches
    keys = [{t.untyped_storage().data_ptr() for t in (*c._keys, *c._values)} for c in (positive, negative)]
    assert not keys[0] & keys[1]
    for (first, flow), (second, other_flow) in zip(seen[::2], seen[1::2], strict=True):
        assert first.cache is positive
        assert second.cache is negative
        assert first.camera is second.camera
        assert not torch.equal(first.cross.keys[0], second.cross.keys[0])
        assert not torch.equal(flow, other_flow)
    assert positive.slot_frames == negative.slot_frames
    assert not torch.equal(positive.view(1)[0], negative.view(1)[0])


def test_guidance_five_is_negative_plus_five_times_the_difference(small, monkeypatch):
    preset = Preset("one step", chunk=3, selection=small.start("guided").history.start.preset.selection, shift=5.0)
    plain = small.start(preset).advance(small.controls(0, 3)).latents
    guided = small.start("guided")
    positive = torch.full((16, 3, 2, 4), 2.0)
    monkeypatch.setattr(
        small.world.dit, "forward", lambda x, t, c: positive * (1.0 if c.cache is guided._derived.caches[0] else 0.25)
    )
    expected = 0.5 + 5 * (2.0 - 0.5)
    strong = guided.advance(small.controls(0, 3)).latents
    monkeypatch.setattr(small.world.dit, "forward", lambda x, t, c: torch.full_like(x, expected))
    assert torch.allclose(small.start(preset).advance(small.controls(0, 3)).latents, strong, atol=1e-5)
    assert not torch.equal(plain, strong)


# Noise


def test_injected_noise_is_used_and_recorded(small, walks):
    session = small.start(seed=999)
    for index in range(2):
        chunk = session.advance(small.controls(index, 3), noise=InjectedNoise(*_draws(index)))
        small.assert_same_chunk(chunk, walks["window"].chunks[index])
    assert [record.noise for record in session.history.chunks] == ["injected", "injected"]
    with pytest.raises(LengthError, match="injected noise has 1 tensors; this preset draws 2 a chunk"):
        session.advance(small.controls(2, 3), noise=InjectedNoise(torch.zeros(16, 3, 2, 4)))
    assert session.state == "ready"


def test_reference_noise_is_the_declared_clips_also_after_going_back(small):
    session = small.start(noise="reference", chunks=3)
    source = ReferenceNoise(7, (16, 3, 2, 4), chunks=3, steps=2, device=torch.device("cpu"))
    by_hand = small.start()
    straight = []
    for index in range(3):
        noise = InjectedNoise(source.draw(index, 0), [source.draw(index, 1)])
        straight.append(by_hand.advance(small.controls(index, 3), noise=noise))
        small.assert_same_chunk(session.advance(small.controls(index, 3)), straight[-1])
    session.rewind(1)
    for index in (1, 2):
        small.assert_same_chunk(session.advance(small.controls(index, 3)), straight[index])
    small.assert_same_chunk(session.fork(2).advance(small.controls(2, 3)), straight[2])
    with pytest.raises(LengthError, match="declared to have 3 chunks"):
        session.advance(small.controls(3, 3))
    assert session.state == "ready"
    assert len(session.history) == 3


# What cannot be started


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"noise": "reference"}, SessionError, "declare its length with chunks=N"),
        ({"noise": "reference", "chunks": 0}, LengthError, "chunks=0 must be a whole number of at least 1"),
        ({"chunks": -1}, LengthError, "chunks=-1 must be a whole number"),
        ({"noise": "white"}, SessionError, "noise='white' is unknown; use one of seeded, reference"),
        ({"seed": -1}, SessionError, "seed=-1 must be a whole number from 0"),
        ({"seed": 2**63}, SessionError, "must be a whole number from 0"),
        ({"seed": 1.5}, SessionError, "seed=1.5"),
        ({"translation_unit": 0.0}, CameraError, "translation_unit=0.0 must be a positive number"),
        ({"translation_unit": float("nan")}, CameraError, "translation_unit=nan"),
        ({"first_delta": "somewhere"}, CameraError, "first_delta='somewhere' is unknown"),
        ({"intrinsics": (0.0, 1.0, 1.0, 1.0)}, CameraError, "intrinsics"),
        ({"rewind_depth": -1}, LengthError, "rewind_depth=-1"),
        ({"negative_prompt": "ugly"}, PresetError, "no effect at guidance 1"),
        ({"negative_states": torch.zeros(1, 20)}, PresetError, "no effect at guidance 1"),
    ],
)
def test_a_start_that_cannot_be_honoured_is_refused(small, options, error, message):
    with pytest.raises(error, match=message):
        small.start("window", **options)


def test_a_start_is_recorded_in_full(small):
    session = small.start("guided", seed=11, translation_unit=2.5, unit_rule="key", fps=24, chunks=5)
    start = session.history.start
    assert (start.preset.name, start.prompt, start.negative_prompt) == ("guided", "a", "ugly")
    assert (start.seed, start.noise, start.chunks, start.fps) == (11, "seeded", 5, 24.0)
    assert (start.image, start.height, start.width) == ("a picture of noise", 16, 32)
    assert (start.translation_unit, start.unit_rule, start.first_delta) == (2.5, "key", "identity")
    assert start.model == small.world.fingerprint
    assert session.state == "ready"
    assert session.prompt == "a"
    assert session.carry.latents == 0


# Memory


def live_tensor_bytes() -> int:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_forty_chunks_with_a_window_keep_memory_flat(small):
    preset = Preset("one step", chunk=3, selection=TableSteps((0,)), shift=5.0, window=9, sink=3)
    session = small.start(preset, rewind_depth=2)

    def held() -> tuple[int, int, int]:
        tensors = live_tensor_bytes() - session.history.nbytes
        return tensors, session.nbytes - session.history.nbytes, psutil.Process().memory_info().rss

    for index in range(12):
        session.advance(small.controls(index, 3))
    small.condition.latents(120, 1)  # the condition has its last latent by now or here
    tensors, own, resident = held()
    for index in range(12, 40):
        session.advance(small.controls(index, 3))
    assert len(session.history) == 40
    # Nothing but the history grows, not by a byte; and the process as a whole stays where it was.
    assert held()[:2] == (tensors, own)
    assert abs(held()[2] / resident - 1) <= 0.05
