"""The code blocks of the README do what they say: those that can run here are run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lingbot_core.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of a bash block; comments and line continuations are gone."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def blocks() -> list[Block]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(m[1], m[2], text.count("\n", 0, m.start()) + 1) for m in found]


def named(chosen: list[Block]) -> list[object]:
    return [pytest.param(block, id=f"line{block.line}") for block in chosen]


SCRIPTS = [b for b in blocks() if b.language == "bash" and b.commands[0][0].startswith("scripts/")]
COMMANDS = [b for b in blocks() if b.language == "bash" and b.commands[0][0] == "lingbot-world"]
PYTHON = [b for b in blocks() if b.language == "python"]
# What cannot run here: an installation, and commands that need weights. Their words are checked instead.
TEXT = [b for b in blocks() if b.language == "text"]
INSTALLATION = ["python3 -m venv .venv", "source .venv/bin/activate", "pip install torch", "pip install -e ."]


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with the examples in it: what a block writes under outputs/ stays out of the repository."""
    (tmp_path / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    (tmp_path / "outputs").mkdir()
    return tmp_path


def run(command: list[str], cwd: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_block_is_checked_by_one_of_these_tests():
    unchecked = [b for b in blocks() if b not in SCRIPTS + COMMANDS + PYTHON + TEXT]
    assert not unchecked
    assert SCRIPTS
    assert COMMANDS
    assert PYTHON


@pytest.mark.parametrize("block", named(SCRIPTS))
def test_scripts_exist_and_know_the_options_shown(block):
    for words in block.commands:
        script = ROOT / words[0]
        assert os.access(script, os.X_OK), f"{words[0]} is not executable"
        run(["bash", "-n", str(script)], ROOT)
        options = [word.partition("=")[0] for word in words[1:] if word.startswith("--")]
        assert [o for o in options if o not in script.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("block", named(COMMANDS))
def test_command_lines_run(block, workplace):
    for words in block.commands:
        assert words[0] == "lingbot-world"
        printed = run([sys.executable, "-m", "lingbot_core", *words[1:]], workplace)
        if words[1] == "inspect":
            assert "loads         yes" in printed
            continue
        output = workplace / words[words.index("--output") + 1]
        video = output / "world.mp4" if words[1] == "verify" else output
        assert video.stat().st_size > 0
        assert list(video.parent.glob("*.json")), "no report beside the video"


@pytest.mark.parametrize("block", named(TEXT))
def test_what_cannot_run_here_has_options_that_exist(block):
    for words in block.commands:
        if words[0] == "lingbot-world":
            assert build_parser().parse_args(words[1:]).verb == words[1]
        else:
            assert " ".join(words) in INSTALLATION


@pytest.mark.parametrize("block", named(PYTHON))
def test_python_blocks_run(block, workplace):
    assert run([sys.executable, "-c", block.code], workplace).strip(), "the block prints nothing"
