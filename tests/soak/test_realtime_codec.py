"""Messages of noise, bugs and strangers by the thousand: an answer to each, no crash, and memory that stays."""

from __future__ import annotations

import gc
import random
from collections import Counter

import hostile_messages
import psutil

# What becomes of the whole messages: the picture of the last one ends after its first bytes.
WHOLE = ("read", "read", "read", "malformed_payload")


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def test_twenty_thousand_broken_messages_are_answered_and_leave_nothing_behind():
    pick = random.Random(20_000)
    messages = hostile_messages.valid_messages()
    endings: Counter[str] = Counter()
    before = None
    for count in range(20_000):
        broken = hostile_messages.mutated(pick, pick.choice(messages))
        endings[hostile_messages.take(broken)] += 1
        if count % 100 == 0:
            assert tuple(map(hostile_messages.take, messages)) == WHOLE
        if count == 4000:
            before = resident()
    assert before is not None
    print(f"\n{dict(endings)}, resident {before} then {resident()}")
    assert set(endings) == {"read", "malformed_payload", "bad_camera", "missing_field"}
    assert min(endings.values()) > 50
    assert abs(resident() / before - 1) <= 0.02
