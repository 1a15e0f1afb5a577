"""A real ComfyUI on the CPU with this repository as one of its packs, for the time of a test run or of a command."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from comfy_client import Client, NotThere

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path.home() / ".cache" / "lingbot-world"
SECOND_PACK = Path(__file__).with_name("second_pack")
START_SECONDS = 240.0
"""The first start compiles every module of ComfyUI and can take a minute on two cores."""


def find_comfyui() -> Path | None:
    """$COMFYUI_DIR, else the copy in the cache."""
    named = os.environ.get("COMFYUI_DIR")
    folder = Path(named) if named else CACHE / "ComfyUI"
    return folder if (folder / "main.py").is_file() else None


def find_video_helper_suite() -> Path | None:
    """$VHS_DIR, else the copy in the cache."""
    named = os.environ.get("VHS_DIR")
    folder = Path(named) if named else CACHE / "ComfyUI-VideoHelperSuite"
    return folder if (folder / "videohelpersuite").is_dir() else None


class ComfyServer:
    """``with ComfyServer(...) as server``: ``server.client``, ``server.base`` (its folders), ``server.log()``.

    ``packs`` maps names under custom_nodes to folders, which are linked; ``arguments`` are added to the command line;
    ``python`` is the interpreter of ComfyUI's environment.
    """

    def __init__(
        self,
        comfyui: Path,
        packs: Mapping[str, Path],
        *,
        python: str = sys.executable,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.comfyui, self.packs, self.python, self.arguments = comfyui, dict(packs), python, list(arguments)
        self.environment = dict(environment or {})

    def __enter__(self) -> ComfyServer:
        self.base = Path(tempfile.mkdtemp(prefix="comfyui-server-"))
        for folder in ("custom_nodes", "input", "output", "models", "user"):
            (self.base / folder).mkdir()
        for name, folder in self.packs.items():
            (self.base / "custom_nodes" / name).symlink_to(folder, target_is_directory=True)
        # Without them every start of the editor logs an error of its own.
        for folder in ("workflows", "subgraphs"):
            (self.base / "user" / "default" / folder).mkdir(parents=True)
        (self.base / "user" / "default" / "user.css").touch()
        (self.base / "user" / "default" / "comfy.templates.json").write_text("[]")
        self.log_file = self.base / "server.log"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = Client(self.url)
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        command = [
            self.python, str(self.comfyui / "main.py"), "--cpu", "--listen", "127.0.0.1", "--port", str(self.port),
            "--base-directory", str(self.base), "--database-url", "sqlite:///:memory:",
            "--disable-auto-launch", "--disable-api-nodes", *self.arguments,
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name not in UNWANTED}
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.base,
                env=environment | {"PYTHONUNBUFFERED": "1"} | self.environment,
            )
        end = time.monotonic() + START_SECONDS
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended with {self.process.returncode} at its start:\n{self.log()}")
            try:
                self.client.system_stats()
                return
            except NotThere:
                if time.monotonic() > end:
                    raise RuntimeError(f"ComfyUI did not start in {START_SECONDS:.0f} s:\n{self.log()}") from None
                time.sleep(0.2)

    def __exit__(self, *error: object) -> None:
        process = getattr(self, "process", None)
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.base, ignore_errors=True)

    def add_input(self, file: Path, name: str) -> None:
        """Puts a file into the input folder, as its user would."""
        target = self.base / "input" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)

    def log(self, lines: int = 60) -> str:
        """The end of what the server wrote."""
        if not self.log_file.is_file():
            return ""
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.log_file.read_text(errors="replace"))
        return "\n".join(text.splitlines()[-lines:])

    def memory(self) -> int:
        """Resident bytes of the server's process (Linux)."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("this system does not tell a process's memory")


# The first makes every start compile every module anew; the second is pytest's own.
UNWANTED = {"PYTHONDONTWRITEBYTECODE", "PYTEST_CURRENT_TEST"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_server(python: str = sys.executable, *, helper_suite: bool = True) -> ComfyServer:
    """ComfyUI with this pack, one that has its own ``nodes``, and VideoHelperSuite where it is wanted and there."""
    comfyui = find_comfyui()
    if comfyui is None:
        raise RuntimeError("there is no ComfyUI; set COMFYUI_DIR or run scripts/test")
    packs = {"lingbot-world": ROOT, "second_pack": SECOND_PACK}
    helper = find_video_helper_suite() if helper_suite else None
    if helper is not None:
        packs["ComfyUI-VideoHelperSuite"] = helper
    return ComfyServer(comfyui, packs, python=python)


def main(arguments: Sequence[str]) -> int:
    """``comfy_server.py LOG COMMAND ...``: runs a command beside a server that has this pack alone.

    ``{url}`` in an argument becomes the server's address. Returns the command's exit code; the server's log is written
    to LOG, also when it does not start.
    """
    log, *command = arguments
    comfyui = find_comfyui()
    if comfyui is None:
        sys.exit("there is no ComfyUI; set COMFYUI_DIR")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended, too
    try:
        with ComfyServer(comfyui, {"lingbot-world": ROOT}) as server:
            try:
                return subprocess.run([part.replace("{url}", server.url) for part in command], check=False).returncode
            finally:
                Path(log).write_text(server.log(10_000), encoding="utf-8")
    except RuntimeError as error:
        Path(log).write_text(str(error), encoding="utf-8")
        sys.exit(str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
