"""``lingbot-world serve`` as a process of its own, with the embedded model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class ServeProcess:
    """``with ServeProcess() as server``: ``server.port`` once the model is there; ``server.kill()`` is SIGKILL."""

    def __init__(self, *options: str, port: int = 0) -> None:
        self.options, self.port = options, port
        self._lines: list[str] = []
        self._ready = threading.Event()

    def __enter__(self) -> ServeProcess:
        command = [sys.executable, "-m", "lingbot_core", "serve", "--model", "tiny", "--port", str(self.port)]
        self._process = subprocess.Popen(
            [*command, *self.options], env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ready.wait(120)
        assert self.port, self.log()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                raise
        self._process.wait()
        self._reader.join(10)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def log(self) -> str:
        return "".join(self._lines)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            if (found := re.match(r"ready: .* on http://[^/]*:(\d+)/", line)) is not None:
                self.port = int(found[1])
                self._ready.set()
        self._ready.set()  # it ended before it was ready
