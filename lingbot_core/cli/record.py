"""A run: loads the model, drives a session chunk by chunk, and keeps what is made whatever happens."""

from __future__ import annotations

import json
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..engine.image import frames_to_uint8
from ..engine.session import Chunk, WorldSession
from ..engine.video import VideoWriter
from ..engine.world import World
from ..errors import InputFileError, VideoError
from ..models.text import Encoded
from .latents import LatentFolder
from .loading import load_world
from .prepare import Job, about_weights
from .progress import Progress
from .report import Measured, ReservedFile, build_report, length_text, one_line, reserved_size, video_tags
from .signals import Interrupts
from .threads import limit_threads

INTERRUPTED = "interrupted"


class Observer(Protocol):
    """Looks on while a job is recorded."""

    def take(self, chunk: Chunk, frames: NDArray[np.uint8]) -> None:
        """A new chunk, and its frames [T, H, W, 3], which are in the video already."""

    def add_to(self, report: dict[str, Any]) -> None:
        """Adds entries of JSON types to the report before it is written, however the run ended."""


def record(job: Job, observer: Observer | None = None) -> int:
    """Runs a job; returns the exit code. What cannot even be started raises."""
    with Interrupts() as interrupts:
        for path in (job.output, job.report):
            _make_folder(path.parent)
        latents = None if job.args.save_latents is None else LatentFolder(job.args.save_latents)
        with VideoWriter(
            job.output,
            width=job.image.width,
            height=job.image.height,
            fps=job.args.fps,
            crf=job.args.crf,
            metadata=video_tags(job),
        ) as video:
            report = ReservedFile(job.report, reserved_size(job.route.chunks))
            try:
                return _Recording(job, video, report, latents, interrupts, observer).run()
            finally:
                report.discard()


class _Recording:
    """The state of one run: files that are open, and what was measured."""

    def __init__(
        self,
        job: Job,
        video: VideoWriter,
        report: ReservedFile,
        latents: LatentFolder | None,
        interrupts: Interrupts,
        observer: Observer | None,
    ) -> None:
        self.job, self.video, self.report, self.latents, self.interrupts = job, video, report, latents, interrupts
        self.observer = observer
        self.measured = Measured()
        self.warnings = list(job.warnings)
        self.progress = Progress(job.route.chunks, job.frames)

    def run(self) -> int:
        """Loads, generates, closes, reports."""
        self.progress.say(f"model {self.job.args.model}, preset {self.job.preset.label}. {self.job.route.describe()}")
        world = self._load()
        prompts = self._encode(world)
        session = self._session = self._start(world, prompts)
        for warning in self.warnings:
            self.progress.say(f"warning: {warning}")
        self.interrupts.wait_for_safe_points()
        with self.progress:
            failure = self._generate(world, session, prompts)
        self.interrupts.ignore()
        failure = self._close_video() or failure
        self.measured.frames = self.video.frames
        self.measured.seconds = self.progress.seconds
        if not self.video.frames and failure is not None:
            raise failure
        return self._finish(world, session, prompts, failure)

    def _close_video(self) -> VideoError | None:
        try:
            self.video.close()
        except VideoError as error:
            return error
        return None

    def _finish(
        self, world: World, session: WorldSession, prompts: dict[str, Encoded], failure: BaseException | None
    ) -> int:
        """Writes the report and says what there is; returns the exit code."""
        job, code, report_place = self.job, 0, f"report {self.job.report}"
        if isinstance(failure, KeyboardInterrupt):
            code, self.measured.stopped = 130, INTERRUPTED
        elif failure is not None:
            code, self.measured.stopped = 1, f"error: {one_line(failure)}"
        report = build_report(job, world, session.history, prompts, self.warnings, self.measured)
        if self.observer is not None:
            self.observer.add_to(report)
        session.close()
        try:
            self.report.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        except InputFileError as error:
            code, report_place = code or 1, f"no report: {error}"
        if self.measured.stopped is not None:
            if failure is not None and job.args.verbose:
                traceback.print_exception(failure, file=sys.stderr)
            print(self.measured.stopped, file=sys.stderr)
        print(f"{job.output}: {length_text(job, self.video.frames)}, {self.progress.fps:.2f} fps; {report_place}")
        return code

    def _load(self) -> World:
        begun = time.monotonic()
        args = self.job.args
        world = load_world(args)
        if world.device.type == "cpu":
            limit_threads()
        about = about_weights(self.job.layout)
        if about["trained"] is False:
            self.warnings.append(f"the weights of {world.name} are not trained: {about['note']}")
        self.measured.load_seconds = time.monotonic() - begun
        return world

    def _encode(self, world: World) -> dict[str, Encoded]:
        """Every prompt of the run, encoded before the first chunk, so that none can fail later."""
        encoded: dict[str, Encoded] = {}
        for prompt in (self.job.args.prompt, *self.job.route.prompts):
            if prompt not in encoded:
                encoded[prompt] = found = world.encode_prompt(prompt)
                if found.truncated:
                    shown = f"{prompt[:40]}..." if len(prompt) > 40 else prompt
                    self.warnings.append(
                        f"the prompt {shown!r} has {found.tokens} tokens; only the first {len(found.states)} are used"
                    )
        return encoded

    def _start(self, world: World, prompts: dict[str, Encoded]) -> WorldSession:
        begun = time.monotonic()
        job, args = self.job, self.job.args
        session = WorldSession.start(
            world,
            job.image,
            args.prompt,
            preset=job.preset,
            seed=args.seed,
            noise=args.noise,
            chunks=job.route.chunks,
            translation_unit=job.unit,
            unit_rule=job.unit_rule,
            first_delta=job.first_delta,
            intrinsics=job.intrinsics,
            fps=args.fps,
            prompt_states=prompts[args.prompt].states,
        )
        self.measured.start_seconds = time.monotonic() - begun
        return session

    def _generate(self, world: World, session: WorldSession, prompts: dict[str, Encoded]) -> BaseException | None:
        """All chunks; returns what ended them early, with the frames of every finished chunk in the video."""
        act = world.dit.config.control == "act"
        try:
            for controls in self.job.route.controls(session, self.job.image, act=act):
                if controls.prompt is not None:
                    session.set_prompt(controls.prompt, states=prompts[controls.prompt].states)
                chunk = session.advance(controls, on_step=self._step, on_frames=self._take)
                self.measured.chunks[-1] |= chunk.timings
                self.interrupts.check()
        except (Exception, KeyboardInterrupt) as error:
            if len(self.measured.chunks) < len(session.history) and not self.video.closed:
                # The chunk was made but not decoded. Should that fail again, its first failure is what counts.
                with suppress(Exception, KeyboardInterrupt):
                    session.resume(on_frames=self._take)
            return error
        return None

    def _step(self, index: int, total: int) -> None:
        self.interrupts.check()
        self.progress.step(index, total)

    def _take(self, chunk: Chunk) -> None:
        """Frames of a new chunk: into the video before anything else can go wrong."""
        begun = time.monotonic()
        frames = frames_to_uint8(chunk.frames)
        self.video.write(frames)
        if self.video.published:
            self.report.remove_earlier()
        self.measured.chunks.append({**chunk.timings, "write": time.monotonic() - begun})
        self.progress.finish_chunk(len(frames))
        if self.observer is not None:
            self.observer.take(chunk, frames)
        if self.latents is not None:
            self.latents.save(chunk, self._session.history.start)
        # The commit that follows serves the next chunk only.
        self.interrupts.check()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputFileError(f"the folder {folder} cannot be made: {error.strerror or error}") from None
