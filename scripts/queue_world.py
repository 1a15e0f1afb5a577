#!/usr/bin/env python3
"""Runs a workflow on a ComfyUI server from the shell: submits it, follows it, downloads what it makes.

    scripts/queue_world.py workflows/api/image_to_world.json --server http://127.0.0.1:8188 --out outputs/queue
    scripts/queue_world.py workflows/api/image_to_world.json --images photos/ --seeds 1-3 --set "Start World.seed=7"

Needs Python 3.11 and aiohttp; the pack itself is needed on the server only. Exit code: 0 when every run succeeded, 1
when one did not, 2 when the call itself is wrong, 130 after Ctrl-C (which takes this call's runs back).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

try:
    from comfy_queue.console import Console
    from comfy_queue.follow import Batch, send_missing_files
    from comfy_queue.runs import Run, find_pictures, parse_seeds, plan_runs
    from comfy_queue.server import BadAddress, Server, ServerGone
    from comfy_queue.workflow import Workflow, WorkflowError
except ModuleNotFoundError as error:
    if error.name != "aiohttp":
        raise
    sys.exit("queue_world.py needs aiohttp, which ComfyUI's own Python has: pip install aiohttp")
except KeyboardInterrupt:  # importing aiohttp takes a moment
    sys.exit(130)

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Submits a workflow to a ComfyUI server, follows its progress and downloads what it makes.",
        epilog="--images and --seeds multiply: 3 pictures with --seeds 1-4 are 12 runs. Ctrl-C takes "
        "this call's runs back.",
    )
    parser.add_argument(
        "workflow", type=Path, metavar="WORKFLOW", help="a workflow in API format, as in workflows/api/"
    )
    parser.add_argument(
        "--server", default="http://127.0.0.1:8188", metavar="URL", help="the ComfyUI server (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the downloaded files")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NODE.INPUT=VALUE",
        help="change an input; NODE is a node's id, title or class; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--images", type=Path, metavar="DIR", help="queue once for each picture of this folder (or for one file)"
    )
    parser.add_argument(
        "--image-node", metavar="NODE", help="the LoadImage node that gets them, where the workflow has several"
    )
    parser.add_argument(
        "--seeds", metavar="A-B", help="queue once for each seed, in all seed inputs: 1-6, or 3, or 1-3,8"
    )
    parser.add_argument(
        "--previews", action="store_true", help="also download files that the server keeps only for a while"
    )
    parser.add_argument("--keep-going", action="store_true", help="go on submitting after a run that was refused")
    parser.add_argument(
        "--patience", type=seconds, default=60.0, metavar="SECONDS",
        help="how long a server may be silent before it is given up (default: %(default).0f)",
    )  # fmt: skip
    return parser.parse_args(arguments)


def seconds(text: str) -> float:
    """A time to wait, for argparse."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


async def prepare(
    options: argparse.Namespace, server: Server, console: Console
) -> tuple[list[Run], tuple[str, str] | None]:
    """The runs and the input that gets the pictures; WorkflowError or ServerGone."""
    workflow = Workflow.load(options.workflow)
    settings = [workflow.parse_setting(text) for text in options.set]
    image_input = None
    if options.images is not None:
        image_input = (_image_node(workflow, options.image_node), "image")
    elif options.image_node is not None:
        raise WorkflowError("--image-node says where --images go; there are no --images")
    images = [] if options.images is None else find_pictures(options.images)
    seeds = [] if options.seeds is None else parse_seeds(options.seeds)
    for setting in settings:
        workflow.check_input(setting, await server.input_names(workflow.nodes[setting.node]["class_type"]))
        workflow = workflow.with_value(setting.node, setting.input, workflow.setting_value(setting))
    runs = plan_runs(workflow, images, seeds, image_input)
    beside = options.workflow.resolve().parent
    await send_missing_files(server, runs, [beside, EXAMPLES], console, image_input)
    return runs, image_input


def _image_node(workflow: Workflow, reference: str | None) -> str:
    if reference is not None:
        return workflow.find(reference)
    found = workflow.of_class("LoadImage")
    if not found:
        raise WorkflowError(f"--images: {workflow.path.name} has no LoadImage node; name another one with --image-node")
    if len(found) > 1:
        names = ", ".join(workflow.label(node) for node in found)
        raise WorkflowError(
            f"--images: {workflow.path.name} has {len(found)} LoadImage nodes, {names}; use --image-node"
        )
    return found[0]


@contextmanager
def on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Within it, calls ``act`` in the event loop at Ctrl-C; the second one leaves at once."""
    loop, asked, before = asyncio.get_running_loop(), False, {}

    def handle(*_: object) -> None:
        nonlocal asked
        if asked:
            os._exit(130)
        asked = True
        loop.call_soon_threadsafe(act)

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def summary(runs: list[Run], console: Console) -> None:
    console.line("")
    width = max(len(run.name) for run in runs)
    for run in runs:
        seconds = "" if run.seconds is None else f" {run.seconds:7.1f} s"
        console.line(
            f"{run.name:<{width}}  {run.state:<13}{seconds}  {', '.join(file.name for file in run.files)}".rstrip()
        )
    done = sum(run.state == "done" for run in runs)
    console.line(f"{done} of {len(runs)} succeeded, {sum(len(run.files) for run in runs)} files")


async def run(options: argparse.Namespace, console: Console) -> int:
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorkflowError(f"--out {options.out} cannot be made: {error.strerror or error}") from None
    async with Server(options.server) as server:
        runs, image_input = await prepare(options, server, console)
        batch = Batch(
            server,
            runs,
            options.out,
            console,
            patience=options.patience,
            previews=options.previews,
            keep_going=options.keep_going,
            image_input=image_input,
        )
        with on_interrupt(batch.interrupt):
            await batch.work()
    summary(runs, console)
    if batch.stop.is_set():
        return 130
    return 0 if all(run.state == "done" for run in runs) else 1


def main(arguments: list[str] | None = None) -> int:
    options, console = parse(arguments), Console()
    try:
        return asyncio.run(run(options, console))
    except (WorkflowError, BadAddress) as error:
        console.line(f"error: {error}")
        return 2
    except ServerGone as error:
        console.line(f"error: {error}")
        return 1
    except KeyboardInterrupt:  # before the first run was submitted
        return 130


if __name__ == "__main__":
    sys.exit(main())
