"""Living worlds and their handles: going on, branching, coming back after they were put to sleep or forgotten."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from lingbot_core.engine.condition import ImageCondition
from lingbot_core.engine.registry import Registry
from lingbot_core.errors import HistoryError, PromptError, SessionBusyError, SessionError


class AnyRoom:
    """Makes the small world ready; counts how often, and may put everything else to sleep as a host would."""

    device = torch.device("cpu")

    def __init__(self, small, before=None) -> None:
        self.small, self.before, self.asked = small, before, []

    def ready(self, living):
        self.asked.append(living)
        if self.before is not None:
            self.before(living)
        return self.small.world, self.small.condition


@pytest.fixture
def registry():
    return Registry(idle_seconds=None)


@pytest.fixture
def denoised(small, monkeypatch):
    """Counts forwards of the transformer that denoise."""
    calls = []
    forward = small.world.dit.forward
    monkeypatch.setattr(small.world.dit, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    return calls


def walk_on(registry, small, handle, until, *, room=None, turn=0, **options):
    """Chunks up to number ``until`` of the recorded walk, and the handle after them. turn: leaves the recorded walk."""
    with registry.drive(handle, room or AnyRoom(small)) as drive:
        chunks = []
        drive.give_prompt("b", small.states(1))
        for index in range(handle.chunks, until):
            if index == 3:
                drive.set_prompt("b")
            controls = small.controls(index + turn, drive.history.start.preset.chunk)
            chunks.append(drive.advance(controls, **options))
        return chunks, drive.handle


def begin(registry, small, recipe="window", **options):
    return registry.add(small.start(recipe, **options), source="how to make it")


def assert_walk(small, chunks, expected):
    assert [c.index for c in chunks] == [c.index for c in expected]
    for got, want in zip(chunks, expected, strict=True):
        small.assert_same_chunk(got, want)


def test_going_on_is_one_long_run(registry, small, walks, recipe):
    expected = walks[recipe].chunks
    handle = begin(registry, small, recipe)
    name = handle.session
    for first, until in ((0, 2), (2, 3), (3, 7)):
        chunks, handle = walk_on(registry, small, handle, until)
        assert_walk(small, chunks, expected[first:until])
    assert (handle.session, handle.chunks, handle.source) == (name, 7, "how to make it")


def test_a_handle_that_is_not_the_head_gives_its_chunks_again_without_denoising(registry, small, walks, denoised):
    start = begin(registry, small)
    first, second = walk_on(registry, small, start, 2)
    _, third = walk_on(registry, small, second, 5)
    denoised.clear()
    again, end = walk_on(registry, small, start, 5)
    assert_walk(small, again, walks["window"].chunks[:5])
    assert denoised == []
    assert end.session == third.session
    later, _ = walk_on(registry, small, second, 6)
    assert_walk(small, later, walks["window"].chunks[2:6])
    assert len(denoised) == 2  # two steps of the one new chunk
    assert first


def test_branches_share_their_beginning_and_differ_after_it(registry, small, walks):
    _, at_two = walk_on(registry, small, begin(registry, small), 2)
    main, head = walk_on(registry, small, at_two, 4)
    side, other = walk_on(registry, small, at_two, 4, turn=5)
    assert other.session != head.session
    assert other.history.chunks[:2] == head.history.chunks[:2]
    assert not torch.equal(side[0].latents, main[0].latents)
    assert_walk(small, walk_on(registry, small, head, 6)[0], walks["window"].chunks[4:6])
    # The branch is what a world that never had another would be.
    alone = begin(registry, small)
    _, alone = walk_on(registry, small, alone, 2)
    assert_walk(small, walk_on(registry, small, alone, 4, turn=5)[0], side)


def test_a_branch_that_exists_is_found_again(registry, small, denoised):
    _, at_two = walk_on(registry, small, begin(registry, small), 2)
    walk_on(registry, small, at_two, 4)
    side, other = walk_on(registry, small, at_two, 4, turn=5)
    denoised.clear()
    again, same = walk_on(registry, small, at_two, 4, turn=5)
    assert_walk(small, again, side)
    assert denoised == []
    assert same.session == other.session


def test_another_world_with_an_equal_start_is_made_itself(registry, small, walks, denoised):
    """It may run on a model that was patched in a way that no record knows of."""
    walk_on(registry, small, begin(registry, small), 2)
    denoised.clear()
    chunks, _ = walk_on(registry, small, begin(registry, small), 2)
    assert len(denoised) == 4
    assert_walk(small, chunks, walks["window"].chunks[:2])


def test_a_run_that_was_cancelled_is_taken_up_where_it_stopped(registry, small, walks, denoised):
    start = begin(registry, small)
    steps = []

    def cancel(step, total):
        steps.append(step)
        if len(steps) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        walk_on(registry, small, start, 5, on_step=cancel)
    assert registry.info(start).head == 2
    denoised.clear()
    chunks, _ = walk_on(registry, small, start, 5)
    assert_walk(small, chunks, walks["window"].chunks[:5])
    assert len(denoised) == 2 * 3


def test_a_prompt_of_a_cancelled_run_does_not_stay(registry, small, walks):
    start = begin(registry, small)

    def cancel(step, total):
        raise KeyboardInterrupt

    with registry.drive(start, AnyRoom(small)) as drive:
        drive.give_prompt("b", small.states(1))
        drive.set_prompt("b")
        with pytest.raises(KeyboardInterrupt):
            drive.advance(small.controls(0, 3), on_step=cancel)
    assert_walk(small, walk_on(registry, small, start, 2)[0], walks["window"].chunks[:2])


@pytest.mark.parametrize("stage", ["decode", "remember"])
def test_what_failed_after_denoising_is_not_denoised_again(registry, small, walks, failing, denoised, stage):
    start = begin(registry, small)
    _, at_one = walk_on(registry, small, start, 1)
    owner = small.world.vae if stage == "decode" else small.world.dit
    failing(owner, stage, MemoryError("no room")).arm()
    with pytest.raises(MemoryError):
        walk_on(registry, small, at_one, 2)
    assert registry.info(at_one).state == "failed"
    assert registry.info(at_one).head == 2
    denoised.clear()
    shown = []
    chunks, handle = walk_on(registry, small, at_one, 2, on_frames=shown.append)
    assert_walk(small, chunks, walks["window"].chunks[1:2])
    assert_walk(small, shown, walks["window"].chunks[1:2])
    assert denoised == []
    assert_walk(small, walk_on(registry, small, handle, 4)[0], walks["window"].chunks[2:4])


def test_another_prompt_noise_or_other_states_are_not_taken_for_the_same(registry, small, walks):
    start = begin(registry, small)
    walk_on(registry, small, start, 1)
    with registry.drive(start, AnyRoom(small)) as drive:
        drive.give_prompt("other", small.states(2))
        drive.set_prompt("other")
        other = drive.advance(small.controls(0, 3))
        assert drive.reused == 0
    assert not torch.equal(other.latents, walks["window"].chunks[0].latents)
    with registry.drive(start, AnyRoom(small)) as drive:
        drive.give_prompt("other", small.states(3))
        drive.set_prompt("other")
        assert not torch.equal(drive.advance(small.controls(0, 3)).latents, other.latents)


def test_a_used_prompt_never_gets_other_states(registry, small):
    _, handle = walk_on(registry, small, begin(registry, small), 1)
    with registry.drive(handle, AnyRoom(small)) as drive:
        drive.give_prompt("a", small.states(4))
        with pytest.raises(PromptError, match="other text states"):
            drive.advance(small.controls(1, 3))


def test_a_world_that_was_put_to_sleep_goes_on_bitwise(registry, small, walks, recipe):
    _, handle = walk_on(registry, small, begin(registry, small, recipe), 4)
    assert registry.free() > 0
    assert registry.info(handle).state == "asleep"
    assert registry.info(handle).cache_bytes == 0
    assert_walk(small, walk_on(registry, small, handle, 6)[0], walks[recipe].chunks[4:6])


def test_sleep_holds_neither_caches_nor_the_model(registry, small):
    handle = begin(registry, small)
    _, handle = walk_on(registry, small, handle, 2)
    session = registry.living(handle).session
    gone = [weakref.ref(t) for cache in session._derived.caches for t in (*cache._keys, *cache._values)]
    gone.append(weakref.ref(session))
    del session
    registry.free()
    gc.collect()
    assert [r for r in gone if r() is not None] == []


def test_sleep_leaves_the_start_image_to_the_worlds_that_share_it(registry, small):
    handle = begin(registry, small)
    walk_on(registry, small, handle, 2)
    encoded = small.condition.encoded
    assert encoded
    assert registry.free() > 0
    assert small.condition.encoded == encoded


def test_a_world_that_was_forgotten_is_rebuilt_from_any_of_its_handles(small, walks):
    expected = walks["window"].chunks
    first = Registry(idle_seconds=None)
    _, at_two = walk_on(first, small, begin(first, small), 2)
    _, at_four = walk_on(first, small, at_two, 4)
    registry = Registry(idle_seconds=None)  # knows nothing
    assert_walk(small, walk_on(registry, small, at_two, 3)[0], expected[2:3])
    # The later handle is longer than what was rebuilt, and made of other records: both live on.
    assert_walk(small, walk_on(registry, small, at_four, 6)[0], expected[4:6])
    assert_walk(small, walk_on(registry, small, at_two, 4)[0], expected[2:4])


@pytest.mark.parametrize("asleep", [True, False])
def test_a_longer_handle_brings_its_chunks_to_a_world_rebuilt_from_a_shorter_one(small, walks, denoised, asleep):
    first = Registry(idle_seconds=None)
    _, at_two = walk_on(first, small, begin(first, small), 2)
    _, at_four = walk_on(first, small, at_two, 4)
    registry = Registry(idle_seconds=None)
    with registry.drive(at_two, AnyRoom(small)) as drive:
        if not asleep:
            drive.living.wake(small.world, small.condition)
    denoised.clear()
    chunks, handle = walk_on(registry, small, at_four, 5)
    assert_walk(small, chunks, walks["window"].chunks[4:5])
    assert handle.session == at_two.session
    assert len(denoised) == 2


def test_a_closed_world_is_refused_and_its_branches_are_not(registry, small, walks):
    start = begin(registry, small)
    _, at_two = walk_on(registry, small, start, 2)
    walk_on(registry, small, at_two, 3)
    _, side = walk_on(registry, small, at_two, 3, turn=5)
    session = registry.living(at_two).session
    registry.close(at_two)
    registry.close(at_two)
    assert session.state == "closed"
    for handle in (start, at_two):
        with pytest.raises(SessionError, match="this world was closed; start a new one"):
            walk_on(registry, small, handle, 4)
        assert registry.info(handle).state == "closed"
    assert len(walk_on(registry, small, side, 4, turn=5)[0]) == 1


def test_a_world_of_another_model_or_image_is_refused_by_name(registry, small):
    handle = begin(registry, small)

    class Other(AnyRoom):
        def ready(self, living):
            return replace(small.world, fingerprint="another"), small.condition

    with pytest.raises(HistoryError, match="begun with model="), registry.drive(handle, Other(small)):
        pass
    assert registry.info(handle).state == "ready"


def test_a_session_on_networks_that_were_loaded_anew_is_rebuilt_on_them(registry, small, walks):
    _, handle = walk_on(registry, small, begin(registry, small), 2)
    loaded_again = replace(small.world, dit=copy.deepcopy(small.world.dit), vae=copy.deepcopy(small.world.vae))

    class Again(AnyRoom):
        def ready(self, living):
            return loaded_again, ImageCondition(loaded_again.vae, small.condition.image)

    old = weakref.ref(registry.living(handle).session)
    assert_walk(small, walk_on(registry, small, handle, 4, room=Again(small))[0], walks["window"].chunks[2:4])
    assert registry.living(handle).session.runs_on(loaded_again)
    gc.collect()
    assert old() is None


def test_room_is_made_before_new_caches_are_and_may_put_the_old_ones_to_sleep(registry, small, walks):
    _, at_two = walk_on(registry, small, begin(registry, small), 2)
    walk_on(registry, small, at_two, 3)
    trunk = registry.living(at_two)

    def crowded(living):
        if living is None:
            registry.free()

    room = AnyRoom(small, crowded)
    side, _ = walk_on(registry, small, at_two, 3, turn=5, room=room)
    assert room.asked == [trunk, None]
    assert trunk.session is None
    roomy = Registry(idle_seconds=None)
    _, handle = walk_on(roomy, small, begin(roomy, small), 2)
    assert_walk(small, walk_on(roomy, small, handle, 3, turn=5)[0], side)


def test_no_more_than_a_number_of_sessions_stay_awake(small, walks):
    registry = Registry(sessions=2, idle_seconds=None)
    handles = [begin(registry, small, seed=seed) for seed in (7, 8, 9)]
    assert [registry.info(h).state for h in handles] == ["asleep", "ready", "ready"]
    chunks, _ = walk_on(registry, small, handles[0], 1)
    assert_walk(small, chunks, walks["window"].chunks[:1])
    assert [registry.info(h).state for h in handles] == ["ready", "asleep", "ready"]


def test_no_more_than_a_number_of_bytes_stay_awake(small):
    one = small.start().cache_nbytes
    registry = Registry(cache_bytes=2 * one, idle_seconds=None)
    handles = [begin(registry, small, seed=seed) for seed in range(4)]
    assert [registry.info(h).state for h in handles] == ["asleep", "asleep", "ready", "ready"]
    assert sum(registry.info(h).cache_bytes for h in handles) <= 2 * one


def test_no_more_than_a_number_of_worlds_are_known(small, walks):
    registry = Registry(sessions=1, known=2, idle_seconds=None)
    handles = [begin(registry, small, seed=seed) for seed in (7, 8, 9)]
    assert [registry.living(h) is None for h in handles] == [True, False, False]
    assert_walk(small, walk_on(registry, small, handles[0], 2)[0], walks["window"].chunks[:2])


def test_idle_worlds_are_put_to_sleep(small):
    now = [0.0]
    registry = Registry(idle_seconds=60.0, clock=lambda: now[0])
    old, new = begin(registry, small), begin(registry, small, seed=8)
    now[0] = 50.0
    walk_on(registry, small, new, 1)
    now[0] = 70.0
    assert registry.reap() > 0
    assert [registry.info(h).state for h in (old, new)] == ["asleep", "ready"]


def until_asleep(registry, handle):
    """Waits, without a call that could do the timer's work, until the timer has done it."""
    deadline = time.monotonic() + 60
    while registry.info(handle).state != "asleep":
        assert time.monotonic() < deadline, "the timer did not ring"
        time.sleep(0.02)


def test_a_timer_frees_the_caches_of_idle_worlds_and_they_go_on_bitwise(small, walks):
    registry = Registry(idle_seconds=1.0)
    _, handle = walk_on(registry, small, begin(registry, small), 2)
    living = registry.living(handle)
    held = [weakref.ref(tensor) for cache in living.session._derived.caches for tensor in cache._keys]
    assert registry.info(handle).cache_bytes > 0
    until_asleep(registry, handle)
    assert registry.info(handle).cache_bytes == 0
    assert [tensor for tensor in held if tensor() is not None] == []
    registry.idle_seconds = None  # it has been shown, and must not come between the chunks of a slow machine
    chunks, handle = walk_on(registry, small, handle, 4)
    assert_walk(small, chunks, walks["window"].chunks[2:4])
    assert registry.info(handle).state == "ready"


def test_the_timer_rings_again_for_worlds_that_were_driven_since(small):
    registry = Registry(idle_seconds=0.1)
    handle = begin(registry, small)
    until_asleep(registry, handle)
    _, handle = walk_on(registry, small, handle, 1)
    until_asleep(registry, handle)


def test_the_thread_of_the_timer_never_lets_go_of_a_model(small):
    """Its host may be walking through a list that a dying model leaves at once."""
    registry, threads = Registry(idle_seconds=0.1), []
    world = replace(small.world)
    weakref.finalize(world, lambda: threads.append(threading.current_thread()))
    handle = registry.add(small.start(world=world))
    del world
    until_asleep(registry, handle)
    gc.collect()
    assert threads == []
    with registry.lease(torch.device("meta")):  # whoever comes next, for whatever world
        gc.collect()
        assert threads == [threading.current_thread()]


def test_a_registry_is_not_kept_alive_by_its_timer(small):
    registry = Registry(idle_seconds=3600.0)
    begin(registry, small)
    gone = weakref.ref(registry)
    registry._timer.cancel()
    del registry
    gc.collect()
    assert gone() is None


def test_worlds_driven_by_several_threads_never_mix(small, walks):
    registry = Registry(idle_seconds=None)
    seeds = (7, 8, 9)
    alone = {seed: small.steps(small.start("window", seed=seed), 4) for seed in seeds}
    got, errors = {}, []

    def run(seed):
        try:
            handle, chunks = begin(registry, small, seed=seed), []
            for until in range(1, 5):
                more, handle = walk_on(registry, small, handle, until)
                chunks += more
            got[seed] = chunks
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    for seed in seeds:
        assert_walk(small, got[seed], alone[seed])


def test_threads_that_drive_one_handle_take_turns(small, walks):
    registry = Registry(idle_seconds=None)
    handle, results = begin(registry, small), []
    threads = [
        threading.Thread(target=lambda: results.append(walk_on(registry, small, handle, 3)[0])) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 3
    for chunks in results:
        assert_walk(small, chunks, walks["window"].chunks[:3])
    assert len(registry._all()) == 1


@contextmanager
def held_elsewhere(registry, small, handle):
    """The world is driven by another thread for the body."""
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with registry.drive(handle, AnyRoom(small)):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(30)
    try:
        yield
    finally:
        leave.set()
        thread.join(30)


def test_a_world_that_is_driven_is_neither_freed_nor_closed(registry, small):
    handle = begin(registry, small)
    with held_elsewhere(registry, small, handle):
        assert registry.free() == 0
        with pytest.raises(SessionBusyError, match="stop it first"):
            registry.close(handle)
        assert registry.info(handle).state == "ready"
    registry.close(handle)


def test_waiting_for_a_device_can_be_given_up(registry, small):
    handle, other = begin(registry, small), begin(registry, small, seed=8)

    def give_up():
        raise InterruptedError

    with held_elsewhere(registry, small, other):
        for wanted in (handle, other):
            with pytest.raises(InterruptedError), registry.drive(wanted, AnyRoom(small), on_wait=give_up):
                pass
        with registry.lease(torch.device("meta")):  # another device is free
            pass
    walk_on(registry, small, handle, 1)


def test_info_counts_what_there_is(registry, small):
    start = begin(registry, small)
    _, at_two = walk_on(registry, small, start, 2)
    info = registry.info(start)
    assert (info.chunks, info.frames, info.seconds, info.head) == (0, 0, 0.0, 2)
    info = registry.info(at_two)
    assert (info.state, info.chunks, info.frames, info.seconds) == ("ready", 2, 21, 21 / 16)
    assert info.cache_bytes == registry.living(at_two).session.cache_nbytes > 0
    assert info.history_bytes == 2 * at_two.history.chunks[0].latents.nbytes


def test_past_frames_are_the_ones_that_were_handed_out(registry, small, walks):
    _, handle = walk_on(registry, small, begin(registry, small), 5)
    with registry.drive(handle, AnyRoom(small)) as drive:
        assert_walk(small, list(drive.past()), walks["window"].chunks[:5])
