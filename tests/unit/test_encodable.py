"""Messages and texts that quote what UTF-8 cannot hold."""

from __future__ import annotations

import json
from inspect import isclass

import pytest

from lingbot_core import errors
from lingbot_core.encodable import as_text

HALVES = "half \ud83d, a byte \udce9, 雪, \N{SNOWFLAKE}"


def test_only_halves_become_escapes():
    assert as_text(HALVES) == r"half \ud83d, a byte \udce9, 雪, " + "\N{SNOWFLAKE}"


def test_json_means_the_same():
    assert json.loads(as_text(json.dumps({HALVES: HALVES}, ensure_ascii=False))) == {HALVES: HALVES}


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(errors).values() if isclass(kind) and issubclass(kind, errors.LingBotError)]
)
def test_every_message_can_be_written(kind):
    assert str(kind(HALVES).args[0]).encode() == str(kind(HALVES)).encode() == as_text(HALVES).encode()
