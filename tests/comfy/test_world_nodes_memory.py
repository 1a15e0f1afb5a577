"""Caches under ComfyUI's memory management: asked for, counted, given back, rebuilt; and what if it runs out."""

from __future__ import annotations

import gc
import importlib
import threading
import time
import weakref

import comfy.model_management as mm
import comfy.model_patcher
import pytest
import torch

pytestmark = pytest.mark.usefixtures("wg")


def errors(wg, name):
    return getattr(wg.part("lingbot_core.errors"), name)


def loaded_caches(wg):
    kind = wg.part("nodes.host.memory").CachePatcher
    return [m.model for m in mm.current_loaded_models if isinstance(m.model, kind)]


def session_of(wg, world):
    return wg.worlds().living(world).session


def tensors_of(session, condition):
    derived = session._derived
    found = [t for cache in derived.caches for t in (*cache._keys, *cache._values)]
    found += [slot for slot in (*derived.decoder.slots, *condition._state.slots) if slot is not None]
    found += [*derived.prompts._current[1].keys, *condition._latents]
    return found


@pytest.fixture
def asked(monkeypatch):
    """memory_required of every load."""
    calls = []
    load = mm.load_models_gpu

    def spy(models, memory_required=0, **options):
        calls.append((list(models), memory_required))
        return load(models, memory_required, **options)

    monkeypatch.setattr(mm, "load_models_gpu", spy)
    return calls


def test_what_a_session_needs_is_asked_for_before_it_is_taken(graph, wg, asked):
    start = graph.start()
    preset, picture = start.history.start.preset, start.source.picture.condition
    estimate = start.source.estimate(preset, chunks=1)
    models, needed = asked[-1]
    # What is there already is not asked for twice: first the encoded picture, then also what the session holds.
    assert needed == estimate.session - picture.nbytes < estimate.session
    assert graph.model in models
    held, encoded = session_of(wg, start).cache_nbytes, picture.nbytes
    assert held > 0
    _, _, world, _ = graph.advance(start, 2)
    estimate = start.source.estimate(preset, chunks=2)
    assert asked[-1][1] == max(estimate.session - held - encoded, estimate.workspace)
    wg.worlds().free()
    encoded = picture.nbytes
    graph.advance(world, 1)
    assert asked[-1][1] == start.source.estimate(preset, chunks=3).session - encoded


def test_caches_are_counted_as_long_as_they_are_held(graph, wg):
    _, _, world, _ = graph.advance(graph.start(), 1)
    sizes = {type(c.owner).__name__: c.loaded_size() for c in loaded_caches(wg)}
    assert sizes["Living"] == session_of(wg, world).cache_nbytes > 0
    assert sizes["ImageCondition"] == world.source.picture.condition.nbytes > 0
    _, _, fork, _ = graph.advance(world, 1, keys="w-3")
    _, _, side, _ = graph.advance(world, 1, keys="d-3")
    owners = [c.owner.name for c in loaded_caches(wg) if hasattr(c.owner, "name")]
    assert {fork.session, side.session} <= set(owners)
    assert len(owners) == len(set(owners))


def test_unload_models_returns_the_memory_and_the_world_goes_on_bitwise(graph, wg):
    whole, *_ = graph.advance(graph.start(), 3, keys="w-9")
    _, _, world, _ = graph.advance(graph.start(), 2, keys="w-9")
    session, condition = session_of(wg, world), world.source.picture.condition
    held = [weakref.ref(t) for t in tensors_of(session, condition)]
    gone = weakref.ref(session)
    del session
    mm.unload_all_models()
    gc.collect()
    assert [r for r in held if r() is not None] == []
    assert gone() is None
    assert condition.nbytes == 0
    assert loaded_caches(wg) == []
    assert wg.call("LingBotWorldInfo", world=world)[0] == "asleep"
    images, *_ = graph.advance(world, 1, keys="w-9", controls_from="continue")
    assert torch.equal(images, whole[21:])


@pytest.mark.parametrize("with_clip", [True, False])
def test_a_model_that_only_a_world_holds_may_go_while_comfyui_unloads(graph, wg, with_clip):
    """ComfyUI walks by number through a list that a dying model leaves at once."""
    model, clip, vae = wg.call("LingBotLoadWorldFolder", folder="tiny", weight_dtype="as stored", preset="auto")
    [image, *_] = wg.call("LingBotStartImage", image=wg.picture(), vae=vae, **wg.SIZE)
    start = graph.start(model=model, vae=vae, clip=clip if with_clip else None, start_image=image)
    graph.advance(start, 1)
    inside = [weakref.ref(part) for part in (model.model.diffusion_model, wg.part("nodes.host.vae").world_vae(vae)[0])]
    del model, clip, vae, image, start  # what the outputs of other nodes did in ComfyUI's cache
    gc.collect()
    # Loaded last, so unloaded after the caches.
    other = comfy.model_patcher.ModelPatcher(torch.nn.Linear(64, 64), graph.model.load_device, torch.device("cpu"))
    mm.load_models_gpu([other, graph.model])
    mm.unload_all_models()
    assert mm.current_loaded_models == []
    gc.collect()
    assert [part() for part in inside] == [None, None]


def test_a_model_can_be_moved_as_long_as_a_world_runs_on_it(graph, wg):
    model, _, vae = wg.call("LingBotLoadWorldFolder", folder="tiny", weight_dtype="as stored", preset="auto")
    [image, *_] = wg.call("LingBotStartImage", image=wg.picture(), vae=vae, **wg.SIZE)
    start = graph.start(model=model, vae=vae, clip=None, start_image=image)
    name, patcher = start.session, weakref.ref(model)
    del model, vae, image, start
    gc.collect()
    assert patcher() in [loaded.model for loaded in mm.current_loaded_models]
    wg.worlds()._living[name].sleep()
    gc.collect()
    assert patcher() is None


def test_an_idle_world_gives_its_caches_back_by_itself_and_its_model_with_the_next_run(graph, wg, monkeypatch):
    """The timer has a thread of its own, and only the prompt worker may change ComfyUI's list of loaded models."""
    registry, threads = wg.worlds(), []
    cleanup = mm.cleanup_models  # what ComfyUI calls when a loaded model dies, in the thread that let go of it
    monkeypatch.setattr(mm, "cleanup_models", lambda: threads.append(threading.current_thread()) or cleanup())
    if registry._timer is not None:  # of the usual time
        registry._timer.cancel()
        registry._timer = None
    monkeypatch.setattr(registry, "idle_seconds", 0.5)
    model, _, vae = wg.call("LingBotLoadWorldFolder", folder="tiny", weight_dtype="as stored", preset="auto")
    [image, *_] = wg.call("LingBotStartImage", image=wg.picture(), vae=vae, **wg.SIZE)
    _, _, world, _ = graph.advance(graph.start(model=model, vae=vae, clip=None, start_image=image), 1)
    # What stays is what ComfyUI knows of it: here the world, too, is forgotten by the cache of outputs.
    handle, patcher, inside = world.from_source(None), weakref.ref(model), weakref.ref(model.model)
    [caches] = [c for c in loaded_caches(wg) if getattr(c.owner, "name", None) == world.session]
    del model, vae, image, world
    gc.collect()
    threads.clear()
    before = list(mm.current_loaded_models)
    deadline = time.monotonic() + 60
    while registry.info(handle).state != "asleep":
        assert time.monotonic() < deadline, "the timer did not ring"
        time.sleep(0.02)
    assert (registry.info(handle).cache_bytes, caches.loaded_size()) == (0, 0)
    assert threads == []
    assert len(mm.current_loaded_models) == len(before)
    assert all(now is then for now, then in zip(mm.current_loaded_models, before, strict=True))
    assert patcher() is not None
    graph.start()
    gc.collect()
    assert (patcher(), inside()) == (None, None)
    assert set(threads) <= {threading.current_thread()}


def test_a_world_that_rests_may_go_while_comfyui_unloads(graph, wg):
    model, clip, vae = wg.call("LingBotLoadWorldFolder", folder="tiny", weight_dtype="as stored", preset="auto")
    [image, *_] = wg.call("LingBotStartImage", image=wg.picture(), vae=vae, **wg.SIZE)
    start = graph.start(model=model, vae=vae, clip=clip, start_image=image)
    graph.advance(start, 1)
    inside, living = weakref.ref(model.model.diffusion_model), wg.worlds().living(start)
    del model, clip, vae, image, start
    assert living.rest() > 0
    gc.collect()
    other = comfy.model_patcher.ModelPatcher(torch.nn.Linear(64, 64), graph.model.load_device, torch.device("cpu"))
    mm.load_models_gpu([other, graph.model])
    mm.unload_all_models()
    assert mm.current_loaded_models == []
    gc.collect()
    assert (living.session, inside()) == (None, None)


def test_room_for_other_models_is_made_from_caches(graph, wg, monkeypatch):
    """ComfyUI frees a part of a model when that is enough; caches go as a whole."""
    _, _, world, _ = graph.advance(graph.start(), 1)
    living = wg.worlds().living(world)
    [patcher] = [c for c in loaded_caches(wg) if c.owner is living]
    device = graph.model.load_device
    wanted = 1000.0
    monkeypatch.setattr(mm, "get_free_memory", lambda *a, **k: (0.0, 0.0) if k or len(a) > 1 else 0.0)
    keep = [m for m in mm.current_loaded_models if m.model is not patcher]
    mm.free_memory(wanted, device, keep_loaded=keep)
    assert living.session is None
    assert patcher.loaded_size() == 0
    graph.advance(world, 1)


def test_other_models_run_after_ours_and_ours_after_them(graph, wg):
    whole, *_ = graph.advance(graph.start(), 2)
    first, _, world, _ = graph.advance(graph.start(), 1)
    other = comfy.model_patcher.ModelPatcher(torch.nn.Linear(64, 64), graph.model.load_device, torch.device("cpu"))
    mm.load_models_gpu([other], memory_required=1 << 20)
    mm.unload_all_models()
    mm.load_models_gpu([other])
    images, *_ = graph.advance(world, 1)
    assert torch.equal(torch.cat([first, images]), whole)


def test_the_state_of_a_running_session_is_not_freed(graph, wg):
    _, _, world, _ = graph.advance(graph.start(), 1)
    living = wg.worlds().living(world)
    [patcher] = [c for c in loaded_caches(wg) if c.owner is living]
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with living.lock:
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(30)
    patcher.detach()
    assert living.session is not None
    leave.set()
    thread.join()
    patcher.detach()
    assert living.session is None


def test_patchers_go_with_their_worlds(graph, wg):
    memory = wg.part("nodes.host.memory")
    _, _, world, _ = graph.advance(graph.start(), 1)
    name = world.session
    patcher = weakref.ref(memory._patchers[id(wg.worlds().living(world))])
    wg.call("LingBotCloseWorld", world=world)
    del world
    gc.collect()
    graph.start()
    gc.collect()
    assert patcher() is None
    assert name not in [getattr(c.owner, "name", None) for c in loaded_caches(wg)]


def break_once(monkeypatch, owner, name, error, call):
    """``owner.name`` raises at the given call, once."""
    function, calls = getattr(owner, name), []

    def broken(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise error
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    return calls


@pytest.mark.parametrize(
    ("place", "call", "finished"),
    [("denoise", 2, 0), ("denoise", 3, 1), ("decode", 1, 0), ("decode", 2, 1), ("commit", 1, 1), ("commit", 2, 2)],
)
def test_out_of_memory_frees_what_the_run_took_and_the_next_run_works(graph, wg, monkeypatch, place, call, finished):
    whole, *_ = graph.advance(graph.start(), 3, keys="w-9")
    start = graph.start()
    world = start.source.host.world
    places = {"denoise": (world.dit, "forward"), "decode": (world.vae, "decode"), "commit": (world.dit, "remember")}
    owner, name = places[place]
    living = wg.worlds().living(start)
    held = [weakref.ref(t) for t in tensors_of(living.session, start.source.picture.condition)[:4]]
    break_once(monkeypatch, owner, name, mm.OOM_EXCEPTION("CUDA out of memory"), call)
    with pytest.raises(errors(wg, "MemoryPlanError")) as raised:
        graph.advance(start, 3, keys="w-9")
    text = str(raised.value)
    assert "GiB beside the weights" in text
    assert "K/V cache" in text
    assert not mm.is_oom(raised.value)
    frames = [0, 9, 21][finished]
    assert (f"({frames} finished frames are in " in text) == bool(frames)
    assert living.session is None
    del raised
    gc.collect()
    assert [r for r in held if r() is not None] == []
    made = len(living.history)
    images, _, _, report = graph.advance(start, 3, keys="w-9")
    assert torch.equal(images, whole)
    assert report["made"]["chunks_reused"] == made


def test_out_of_memory_at_the_start_is_explained_and_the_next_start_works(graph, wg, monkeypatch):
    cache = wg.part("lingbot_core.models.kv_cache").KVCache
    break_once(monkeypatch, cache, "_allocate", mm.OOM_EXCEPTION("CUDA out of memory"), 3)
    with pytest.raises(errors(wg, "MemoryPlanError"), match=r"ran out while the world was started; it needs .* GiB"):
        graph.start()
    graph.advance(graph.start(), 1)


def test_other_errors_keep_their_text_and_say_where_the_frames_are(graph, wg, monkeypatch):
    start = graph.start()
    break_once(monkeypatch, start.source.host.world.vae, "decode", RuntimeError("a cosmic ray"), 2)
    with pytest.raises(
        errors(wg, "LingBotError"), match=r"RuntimeError: a cosmic ray \(9 finished frames are in (.*)\)"
    ) as e:
        graph.advance(start, 2)
    path = str(e.value).split(" are in ")[1].rstrip(")")
    video = importlib.import_module("comfy_api.latest").InputImpl.VideoFromFile(path)
    assert video.get_frame_count() == 9


def test_a_failed_decode_is_retried_without_denoising(graph, wg, monkeypatch):
    whole, *_ = graph.advance(graph.start(), 2, keys="w-6")
    start = graph.start()
    world = start.source.host.world
    break_once(monkeypatch, world.vae, "decode", RuntimeError("a cosmic ray"), 2)
    with pytest.raises(errors(wg, "LingBotError"), match="a cosmic ray"):
        graph.advance(start, 2, keys="w-6")
    assert wg.call("LingBotWorldInfo", world=start)[0] == "failed"
    denoised = break_once(monkeypatch, world.dit, "forward", AssertionError(), 10**9)
    images, *_ = graph.advance(start, 2, keys="w-6")
    assert torch.equal(images, whole)
    assert denoised == []


def test_an_image_that_will_not_fit_is_refused_before_it_is_made(graph, wg, monkeypatch):
    start = graph.start()
    monkeypatch.setattr(wg.part("nodes.host.run"), "free_bytes", lambda device: 10_000)
    with pytest.raises(errors(wg, "MemoryPlanError"), match=r"IMAGE of 45 frames.*all_images off and use VIDEO"):
        graph.advance(start, 4)
    images, video, _, _ = graph.advance(start, 4, all_images=False)
    assert (len(images), video.get_frame_count()) == (1, 45)


@pytest.mark.parametrize("evictable", [True, False])
def test_an_image_on_the_gpu_has_comfyui_unload_other_models_but_not_its_own_world(graph, wg, monkeypatch, evictable):
    """The GPU is only named: what ComfyUI is asked, and what is read before and after, is what counts."""
    _, _, world, _ = graph.advance(graph.start(), 1)
    living, run = wg.worlds().living(world), wg.part("nodes.host.run")
    free, asked = [1000], []

    def free_memory(needed, device, keep_loaded=()):
        asked.append((needed, device, [loaded.model for loaded in keep_loaded]))
        free[0] = 10**9 if evictable else free[0]

    monkeypatch.setattr(mm, "free_memory", free_memory)
    monkeypatch.setattr(run, "free_bytes", lambda device: free[0])
    room = wg.part("nodes.host.source").HostRoom(
        world.source, world.history.start.preset, chunks=2, rewind_depth=0, noise="seeded"
    )
    gpu, shape = torch.device("cuda", 0), (12, 16, 32, 3)
    if evictable:
        run.require_image_room(shape, torch.float32, gpu, room.patchers(living))
    else:
        with pytest.raises(errors(wg, "MemoryPlanError"), match="IMAGE of 12 frames"):
            run.require_image_room(shape, torch.float32, gpu, room.patchers(living))
    [(needed, device, kept)] = asked
    assert needed >= 12 * 16 * 32 * 3 * 4
    assert device == gpu
    assert graph.model in kept
    assert {c.owner for c in loaded_caches(wg) if c in kept} == {living, world.source.picture.condition}


@pytest.mark.parametrize("how", ["planned", "raised"])
def test_a_picture_that_cannot_be_encoded_is_explained(graph, wg, monkeypatch, how):
    if how == "planned":
        monkeypatch.setattr(wg.part("nodes.host.start_image"), "free_bytes", lambda device: 1000)
    else:
        vae, _ = wg.part("nodes.host.vae").world_vae(graph.vae)
        break_once(monkeypatch, vae, "encode", mm.OOM_EXCEPTION("CUDA out of memory"), 2)
    with pytest.raises(errors(wg, "MemoryPlanError"), match=r"encoding a picture of 32x16 .* choose a smaller size"):
        wg.call("LingBotStartImage", image=wg.picture(), vae=graph.vae, **wg.SIZE)
    monkeypatch.undo()
    wg.call("LingBotStartImage", image=wg.picture(), vae=graph.vae, **wg.SIZE)


@pytest.mark.parametrize("how", ["rebuilding", "branching"])
def test_out_of_memory_while_caches_are_made_is_explained_and_the_next_run_works(graph, wg, monkeypatch, how):
    _, _, fork, _ = graph.advance(graph.start(), 1, keys="w-3")
    _, _, main, _ = graph.advance(fork, 1, keys="a-3")
    cache = wg.part("lingbot_core.models.kv_cache").KVCache
    if how == "rebuilding":
        wg.worlds().free()
        place, name, keys = main, "_allocate", "w-3"
    else:
        place, name, keys = fork, "clone", "d-3"
    calls = break_once(monkeypatch, cache, name, mm.OOM_EXCEPTION("CUDA out of memory"), 1)
    with pytest.raises(errors(wg, "MemoryPlanError"), match="ran out in chunk"):
        graph.advance(place, 1, keys=keys)
    assert calls == [1]
    assert wg.worlds().living(place).session is None
    monkeypatch.undo()
    images, *_ = graph.advance(place, 1, keys=keys)
    wg.forget_everything()
    assert torch.equal(graph.advance(place, 1, keys=keys)[0], images)
