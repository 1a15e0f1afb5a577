"""A cancel leaves a session as it was; what fails after a chunk exists is finished by ``resume``; nothing is lost."""

from __future__ import annotations

import inspect
import sys

import pytest

from lingbot_core.engine.condition import ImageCondition
from lingbot_core.engine.derived import Derived
from lingbot_core.engine.session import WorldSession
from lingbot_core.engine.timing import Stopwatch
from lingbot_core.errors import NumericsError, SessionError
from lingbot_core.models.kv_cache import KVCache


class Cancel(BaseException):
    """What a host raises to interrupt: not an Exception, so that no handler swallows it."""


OUT_OF_MEMORY = RuntimeError("out of memory")


def raise_at(step: int, error: type[BaseException]):
    def on_step(index: int, total: int) -> None:
        if index == step:
            raise error

    return on_step


def test_a_chunk_cancelled_at_any_step_comes_out_the_same_when_tried_again(small, walks, recipe):
    walk = walks[recipe]
    steps = walk.session.history.start.preset.steps
    session = small.start(recipe)
    for index, expected in enumerate(walk.chunks):
        history = session.history
        error = Cancel if index < 4 else KeyboardInterrupt
        with pytest.raises(error):
            small.step(session, on_step=raise_at(index % steps, error))
        assert session.history is history
        assert session.state == "ready"
        small.assert_same_chunk(small.step(session), expected)
        # A second try evicts nothing more: the caches are those of the undisturbed walk.
        small.assert_same_caches(session._derived.caches, walk.caches[index])


def test_a_chunk_cancelled_many_times_comes_out_the_same(small, walks):
    session = walks.fork("partial-eviction", 5)
    for step in (0, 1, 1, 0):
        with pytest.raises(Cancel):
            small.step(session, on_step=raise_at(step, Cancel))
    small.assert_same_chunk(small.step(session), walks["partial-eviction"].chunks[5])


def test_a_cancelled_chunk_may_be_tried_again_with_other_controls_and_prompt(small, walks):
    session = walks.fork("window", 4)
    with pytest.raises(Cancel):
        session.advance(small.controls(9, 3, "a"), on_step=raise_at(1, Cancel))
    assert session.prompt == "b"
    small.assert_same_chunk(small.step(session), walks["window"].chunks[4])


@pytest.mark.parametrize("step", [0, 1])
def test_output_that_is_not_finite_is_refused_and_leaves_the_session_ready(small, walks, recipe, step, monkeypatch):
    walk = walks[recipe]
    session = walks.fork(recipe, 5)
    history = session.history
    forward = small.world.dit.forward
    calls = iter(range(100))

    def broken(x, t, context):
        flow = forward(x, t, context)
        if next(calls) == step:
            flow[0, 0, 0, 0] = float("nan") if step else float("inf")
        return flow

    with monkeypatch.context() as patch:
        patch.setattr(small.world.dit, "forward", broken)
        with pytest.raises(NumericsError, match="chunk 5 came out with NaN or infinity"):
            small.step(session)
    assert session.history is history
    assert session.state == "ready"
    small.assert_same_chunk(small.step(session), walk.chunks[5])
    small.assert_same_caches(session._derived.caches, walk.caches[5])


def assert_failed(small, session, index: int) -> None:
    """The chunk is in the history, and everything but going on from there is refused with the way out."""
    assert session.state == "failed"
    assert len(session.history) == index + 1
    with pytest.raises(SessionError, match=r"resume\(\)"):
        small.step(session)


def go_on(small, walk, session) -> None:
    """The next chunk and the caches are those of the undisturbed walk."""
    index = len(session.history)
    assert session.state == "ready"
    small.assert_same_caches(session._derived.caches, walk.caches[index - 1])
    small.assert_same_chunk(small.step(session), walk.chunks[index])
    small.assert_same_caches(session._derived.caches, walk.caches[index])


def test_a_failed_decode_is_finished_by_resume(small, walks, recipe, failing):
    walk = walks[recipe]
    session = walks.fork(recipe, 4)
    decode = failing(small.world.vae, "decode", OUT_OF_MEMORY)
    decode.arm()
    with pytest.raises(RuntimeError, match="out of memory"):
        small.step(session)
    assert_failed(small, session, 4)
    decode.arm()
    with pytest.raises(RuntimeError, match="out of memory"):
        session.resume()
    assert_failed(small, session, 4)
    small.assert_same_chunk(session.resume(), walk.chunks[4])
    assert session.resume() is None
    go_on(small, walk, session)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("with_callback", [False, True])
def test_a_failed_commit_is_finished_by_resume(small, walks, failing, layer, with_callback):
    """Frames count as handed out once the callback had them; without one, resume returns the chunk."""
    walk = walks["window"]
    session = walks.fork("window", 4)
    places = failing(session._derived.caches[0], "buffers", OUT_OF_MEMORY)
    places.arm(3 * walk.session.history.start.preset.steps + layer)
    shown = []
    with pytest.raises(RuntimeError, match="out of memory"):
        small.step(session, on_frames=shown.append if with_callback else None)
    assert places.raised == 1
    assert_failed(small, session, 4)
    chunk = session.resume()
    if with_callback:
        assert chunk is None
        chunk = shown[0]
        assert len(shown) == 1
    small.assert_same_chunk(chunk, walk.chunks[4])
    go_on(small, walk, session)


def test_a_failed_commit_of_the_negative_branch_is_finished_by_resume(small, walks, failing):
    walk = walks["guided"]
    session = walks.fork("guided", 4)
    places = failing(session._derived.caches[1], "buffers", OUT_OF_MEMORY)
    places.arm(3 * 3 + 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        small.step(session)
    assert_failed(small, session, 4)
    small.assert_same_chunk(session.resume(), walk.chunks[4])
    go_on(small, walk, session)


def test_a_failing_on_frames_leaves_only_the_commit_to_resume(small, walks, recipe):
    walk = walks[recipe]
    session = walks.fork(recipe, 4)
    shown = []

    def show(chunk) -> None:
        shown.append(chunk)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        small.step(session, on_frames=show)
    assert_failed(small, session, 4)
    small.assert_same_chunk(shown[0], walk.chunks[4])
    assert session.resume(on_frames=shown.append) is None
    assert len(shown) == 1
    go_on(small, walk, session)


def test_resume_hands_out_the_frames_before_the_commit_too(small, walks, failing):
    session = walks.fork("window", 4)
    failing(small.world.vae, "decode", OUT_OF_MEMORY).arm()
    with pytest.raises(RuntimeError):
        small.step(session)
    shown = []
    small.assert_same_chunk(session.resume(on_frames=shown.append), walks["window"].chunks[4])
    small.assert_same_chunk(shown[0], walks["window"].chunks[4])


@pytest.mark.parametrize("recipe", ["window", "reuse-last-step", "guided"])
@pytest.mark.parametrize("to", ["rewind", "fork"])
@pytest.mark.parametrize("what", ["decode", "commit"])
def test_a_failed_chunk_can_also_be_left_behind_or_forked(small, walks, recipe, failing, what, to):
    walk = walks[recipe]
    session = walks.fork(recipe, 4)
    if what == "decode":
        failing(small.world.vae, "decode", OUT_OF_MEMORY).arm()
    else:
        calls = walk.session.history.start.preset.steps * 3 + 1
        if walk.session.history.start.preset.reuse_last_step_kv:
            calls = 0  # there is no commit: what fails is the first denoising forward
        failing(session._derived.caches[0], "buffers", OUT_OF_MEMORY).arm(calls)
    with pytest.raises(RuntimeError, match="out of memory"):
        small.step(session)
    if to == "fork":
        session = session.fork()
        if session.state == "failed":  # the chunk is in the history, its frames were never seen: the twin has them
            small.assert_same_chunk(session.resume(), walk.chunks[4])
        elif len(session.history) == 4:
            small.assert_same_chunk(small.step(session), walk.chunks[4])
    else:
        session.rewind(3)
        small.assert_same_chunk(small.step(session), walk.chunks[3])
        small.assert_same_chunk(small.step(session), walk.chunks[4])
    go_on(small, walk, session)


@pytest.mark.parametrize("call", [0, 2])
def test_a_replay_that_fails_in_a_rewind_is_finished_by_resume(small, walks, failing, call):
    walk = walks["window"]
    session = walks.fork("window", 6)
    remember = failing(small.world.dit, "remember", OUT_OF_MEMORY)
    remember.arm(call)
    with pytest.raises(RuntimeError, match="out of memory"):
        session.rewind(4)
    assert remember.raised == 1
    assert_failed(small, session, 3)
    remember.arm()
    with pytest.raises(RuntimeError, match="out of memory"):
        session.resume()
    assert session.resume() is None
    go_on(small, walk, session)


def test_a_decode_that_fails_in_a_rewind_is_finished_by_resume(small, walks, failing):
    session = walks.fork("whole-past", 6)
    failing(small.world.vae, "decode", OUT_OF_MEMORY).arm(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        session.rewind(4)
    assert_failed(small, session, 3)
    assert session.resume() is None
    go_on(small, walks["whole-past"], session)


def test_a_session_that_failed_in_a_rewind_can_be_forked_and_rewound_further(small, walks, failing):
    walk = walks["window"]
    session = walks.fork("window", 6)
    failing(small.world.dit, "remember", OUT_OF_MEMORY).arm(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        session.rewind(5)
    fork = session.fork()
    go_on(small, walk, fork)
    session.rewind(2)
    go_on(small, walk, session)


def test_a_fork_that_fails_leaves_the_original_alone(small, walks, failing):
    walk = walks["window"]
    session = walks.fork("window", 6)
    failing(small.world.dit, "remember", OUT_OF_MEMORY).arm(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        session.fork(4)
    go_on(small, walk, session)


def test_a_failed_encode_of_the_image_leaves_the_session_ready(small, walks, failing):
    condition = ImageCondition(small.world.vae, small.condition.image)
    session = small.start(image=condition)
    encode = failing(small.world.vae, "encode", OUT_OF_MEMORY)
    for expected, call in zip(walks["window"].chunks[:3], (0, 1, 2), strict=True):
        encode.arm(call)
        with pytest.raises(RuntimeError, match="out of memory"):
            small.step(session)
        assert session.state == "ready"
        small.assert_same_chunk(small.step(session), expected)


@pytest.mark.parametrize("call", [0, 1, 4, 5])
def test_memory_that_runs_out_while_a_cache_grows_leaves_the_session_ready(small, walks, failing, call):
    """Room for the two declared chunks is there at once; the third makes all six buffers grow."""
    session = small.start("whole-past", chunks=2)
    allocate = failing(session._derived.caches[0], "_allocate", OUT_OF_MEMORY)
    small.steps(session, 2)
    allocate.arm(call)
    with pytest.raises(RuntimeError, match="out of memory"):
        small.step(session)
    assert session.state == "ready"
    go_on(small, walks["whole-past"], session)


@pytest.mark.parametrize("with_callback", [False, True])
def test_a_ctrl_c_while_waiting_for_the_decoder_loses_no_frame(small, walks, monkeypatch, with_callback):
    """On a GPU the host waits for the frames when it reads the clock: that is where a Ctrl-C arrives."""

    def interrupted(watch: Stopwatch, *names: str) -> dict[str, float]:
        raise KeyboardInterrupt

    session = walks.fork("window", 4)
    shown = []
    with monkeypatch.context() as patch:
        patch.setattr(Stopwatch, "seconds", interrupted)
        with pytest.raises(KeyboardInterrupt):
            small.step(session, on_frames=shown.append if with_callback else None)
    assert_failed(small, session, 4)
    small.assert_same_chunk(session.resume(), walks["window"].chunks[4])
    assert not shown
    go_on(small, walks["window"], session)


INTERRUPTIBLE = (
    WorldSession.advance,
    WorldSession.rewind,
    WorldSession.resume,
    WorldSession._finish,
    WorldSession._bring_up,
    Derived.contexts,
    Derived.commit,
    Derived.end_chunk,
    Derived.cut,
    Derived.replay,
    Derived.remember_decoder,
    Derived.forget_decoders,
    KVCache.begin,
    KVCache.end,
    KVCache.rewind,
    KVCache.clear,
)


class CtrlC:
    """Raises KeyboardInterrupt before the n-th different line that runs inside the functions above."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.codes = {inspect.unwrap(function).__code__ for function in INTERRUPTIBLE}
        self.seen: set[tuple[object, int]] = set()

    def __enter__(self) -> CtrlC:
        self.before = sys.gettrace()
        sys.settrace(self.call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self.before)

    def call(self, frame, event, arg):
        return self.line if frame.f_code in self.codes else None

    def line(self, frame, event, arg):
        where = (frame.f_code, frame.f_lineno)
        if event == "line" and where not in self.seen:
            self.seen.add(where)
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        return self.line


def test_a_ctrl_c_at_any_line_of_a_chunk_or_a_rewind_loses_nothing(small, walks):
    """Chunk 3 evicts; the rewind behind it has to replay."""
    walk = walks["window"]
    origin = walks.fork("window", 3)
    decoders = {chunks: walks.fork("window", chunks)._derived.decoder for chunks in (2, 3, 4, 5)}
    for line in range(1000):
        session = origin.fork()
        interrupted = False
        try:
            with CtrlC(line):
                small.step(session)
                session.rewind(2)
        except KeyboardInterrupt:
            interrupted = True
        if session.state == "failed":
            session.resume()
        assert session.state == "ready"
        index = len(session.history)
        assert index in (2, 3, 4)
        # What the next chunk is made from, and the next chunk itself after every tenth line.
        if line % 10 == 0:
            small.assert_same_chunk(small.step(session), walk.chunks[index])
        elif session._derived.caches[0]._open is None:
            small.assert_same_caches(session._derived.caches, walk.caches[index - 1])
        assert session._derived.decoder.equals(decoders[len(session.history)])
        if not interrupted:
            break
    assert not interrupted
    assert line > 60
