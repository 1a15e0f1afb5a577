"""msgpack with arrays: the bytes on the wire, and everything that is not accepted there."""

from __future__ import annotations

import contextlib
import random
import re
import struct
import time
import tracemalloc
from datetime import UTC, datetime

import hostile_messages
import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from lingbot_core.realtime.codec import Limits, pack, unpack
from lingbot_core.realtime.errors import MessageError

# What openpi-client's msgpack_numpy writes, spelled out: the keys are bytes, in this order.
WIRE = {
    "float32": (
        {"poses": np.array([[1.0, -2.0]], np.float32)},
        b"\x81\xa5poses\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x08\x00\x00\x80\x3f\x00\x00\x00\xc0"
        b"\xc4\x05dtype\xa3<f4\xc4\x05shape\x92\x01\x02",
    ),
    "uint8 in Fortran's order": (
        {"image": np.asfortranarray(np.array([[1, 2, 3], [4, 5, 6]], np.uint8))},
        b"\x81\xa5image\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x06\x01\x02\x03\x04\x05\x06"
        b"\xc4\x05dtype\xa3|u1\xc4\x05shape\x92\x02\x03",
    ),
    "big-endian": (
        {"a": np.array([1, 258], ">i2")},
        b"\x81\xa1a\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x04\x00\x01\x01\x02"
        b"\xc4\x05dtype\xa3>i2\xc4\x05shape\x91\x02",
    ),
    "no dimension": (
        {"a": np.array(True)},
        b"\x81\xa1a\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x01\x01\xc4\x05dtype\xa3|b1\xc4\x05shape\x90",
    ),
    "nothing in it": (
        {"a": np.zeros((0, 4))},
        b"\x81\xa1a\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x00\xc4\x05dtype\xa3<f8\xc4\x05shape\x92\x00\x04",
    ),
    "scalars": (
        {"a": np.float32(1.5), "b": np.int64(-3), "c": np.bool_(False)},
        b"\x83\xa1a\x83\xc4\x0d__npgeneric__\xc3\xc4\x04data\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\xc4\x05dtype\xa3<f4"
        b"\xa1b\x83\xc4\x0d__npgeneric__\xc3\xc4\x04data\xfd\xc4\x05dtype\xa3<i8"
        b"\xa1c\x83\xc4\x0d__npgeneric__\xc3\xc4\x04data\xc2\xc4\x05dtype\xa3|b1",
    ),
    "plain": (
        {"endpoint": "infer", "session_id": None, "n": [1, -1, 2.0, True], "image": b"\x89P"},
        b"\x84\xa8endpoint\xa5infer\xaasession_id\xc0\xa1n\x94\x01\xff\xcb\x40\x00\x00\x00\x00\x00\x00\x00\xc3"
        b"\xa5image\xc4\x02\x89P",
    ),
}


def array_map(**changes: object) -> bytes:
    """A message with one array [2] of float32, with some of its fields changed; None leaves a field out."""
    fields = {"__ndarray__": True, "data": b"\0" * 8, "dtype": "<f4", "shape": [2], **changes}
    return msgpack.packb({"a": {key.encode(): value for key, value in fields.items() if value is not None}})


def scalar_map(data: object, dtype: object) -> bytes:
    return msgpack.packb({"a": {b"__npgeneric__": True, b"data": data, b"dtype": dtype}})


def refusal(data: bytes, limits: Limits | None = None) -> str:
    with pytest.raises(MessageError) as caught:
        unpack(data) if limits is None else unpack(data, limits)
    assert caught.value.code == "malformed_payload"
    return str(caught.value)


def assert_same(got: object, expected: object) -> None:
    if isinstance(expected, np.ndarray | np.generic):
        assert type(got) is type(expected)
        assert got.dtype == expected.dtype.newbyteorder("=")
        np.testing.assert_array_equal(got, expected)
    else:
        assert type(got) is type(expected)
        assert got == expected


@pytest.mark.parametrize("name", WIRE)
def test_the_bytes_are_those_of_openpi_client(name):
    value, wire = WIRE[name]
    assert pack(value) == wire
    got = unpack(wire)
    assert list(got) == list(value)
    for key, expected in value.items():
        assert_same(got[key], expected)


def test_arrays_with_keys_of_strings_are_read_too():
    wire = msgpack.packb(
        {"a": {"shape": [2], "dtype": "float32", "data": struct.pack("<2f", 1, 2), "__ndarray__": True}}
    )
    assert_same(unpack(wire)["a"], np.array([1, 2], np.float32))
    assert_same(unpack(msgpack.packb({"a": {"__npgeneric__": True, "data": 7, "dtype": "|u1"}}))["a"], np.uint8(7))


def test_arrays_cannot_be_written_to_and_share_the_memory_of_their_bytes():
    array = unpack(pack({"a": np.ones((3, 4, 4))}))["a"]
    assert isinstance(array.base, bytes)
    for written in (array, unpack(pack({"a": np.ones(3, ">f8")}))["a"]):
        with pytest.raises(ValueError, match="read-only"):
            written[0] = 0


def test_nan_and_infinity_pass():
    values = np.array([np.nan, np.inf, -np.inf])
    got = unpack(pack({"a": values, "b": float("nan"), "c": np.float32("inf")}))
    np.testing.assert_array_equal(got["a"], values)
    assert np.isnan(got["b"])
    assert got["c"] == np.inf


def test_any_byte_of_a_boolean_array_but_zero_is_true():
    array = unpack(array_map(dtype="|b1", data=b"\x00\x02\xff\x01", shape=[4]))["a"]
    assert array.tobytes() == b"\x00\x01\x01\x01"


DTYPES = [np.dtype(order + kind) for order in "<>" for kind in ("f2", "f4", "f8", "i2", "i4", "i8", "u2", "u4", "u8")]
DTYPES += [np.dtype(kind) for kind in ("b1", "i1", "u1")]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(DTYPES).flatmap(lambda dtype: arrays(dtype, array_shapes(min_dims=0, min_side=0))))
def test_every_array_of_numbers_comes_back(array):
    assert_same(unpack(pack({"a": array}))["a"], array)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cut off: its 0 bytes end"),
        ("{}", "a message of the type str is no msgpack; send a binary frame"),
        (b"\x90", "the message is a list; send a msgpack map"),
        (b"\x2a", "the message is a number"),
        (b"\xc0", "the message is a nil"),
        (b"\xa1a", "the message is a string"),
        (b"\xc4\x00", "the message is a binary"),
        (pack({}) + b"\x00", "1 bytes follow the end"),
        (pack({}) * 3, "2 bytes follow the end"),
        (b"\x81\xa1a\xc1", r"byte 3 of the message \(0xc1\) is no msgpack"),
        (b"\x81\xa1a\xd4\x05\x00", "byte 3 of the message begins a msgpack extension"),
        (msgpack.packb({"a": msgpack.ExtType(5, b"x" * 300)}), "begins a msgpack extension"),
        (msgpack.packb({"at": datetime(2026, 1, 1, tzinfo=UTC)}, datetime=True), r"extension \(a timestamp"),
        (b"\x81\xa2\xff\xfe\x00", "a string of the message is not UTF-8"),
        (msgpack.packb({"a": [{"b": "\xe9".encode("latin-1")}, 1], 5: 1}), "a key of a map is of the type int"),
        (b"\x81\xc0\x01", "a key of a map is of the type NoneType"),
        (b"\x81\x90\x01", "a key of a map is of the type list"),
        (b"\x81\x80\x01", "a key of a map is of the type dict"),
        (msgpack.packb({b"prompt": 1}), "a key of a map is b'prompt'; keys are strings"),
        (msgpack.packb({"a": {b"data": b"", b"dtype": "<f4"}}), "a map has keys of bytes and is no array"),
        (b"\x82\xa1a\x01\xa1a\x02", "a map has the key 'a' twice"),
        (b"\x81\xa1x\x82\xa1a\x01\xa1a\x01", "a map has the key 'a' twice"),
        (b"\x81\xa1x\x82\xc4\x04data\x01\xa4data\x01", "a map has the key 'data' twice"),
        (pack({"a": np.ones(2)})[3:], "the message is an array or a scalar"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(data, reason):
    with pytest.raises(MessageError, match=reason) as caught:
        unpack(data)
    assert caught.value.code == "malformed_payload"


def test_what_is_cut_off_is_named():
    assert "a string at byte 3 needs 5 bytes and has 2;" in refusal(b"\x81\xa1a\xa5ab")
    assert "a list at byte 3 claims 3 entries and has 2 bytes for them;" in refusal(b"\x81\xa1a\x93\x01\x02")
    assert "a map at byte 3 claims 2 entries and has 3 bytes for them;" in refusal(b"\x81\xa1a\x82\x01\x02\x03")
    assert "a list at byte 3 has no length;" in refusal(b"\x81\xa1a\xdd\x00\x00")
    assert "its 3 bytes end where a value should begin;" in refusal(b"\x81\xa1a")


@pytest.mark.parametrize("message", hostile_messages.valid_messages())
def test_a_message_that_ends_early_is_cut_off_wherever_that_is(message):
    unpack(message)
    for end in (*range(0, len(message), 7), len(message) - 1):
        assert "the message is cut off" in refusal(message[:end])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(
            ({"dtype": dtype}, re.escape(f"an array's dtype is {dtype!r}; only real numbers"))
            for dtype in ("|O", "O", "object", "|V8", "<U2", "|S8", "<M8[s]", "<m8[s]", "<c8", "f4,f4", "(2,)f4", "")
        ),
        ({"dtype": [["a", "<f4"]]}, "an array's dtype is of the type list"),
        ({"dtype": b"<f4"}, "an array's dtype is of the type bytes"),
        ({"dtype": "x" * 10_000}, f"an array's dtype is '{'x' * 40}';"),
        ({"dtype": "<f8"}, r"an array \[2\] of float64 needs 16 bytes of data and has 8"),
        ({"data": b"\0" * 9}, r"an array \[2\] of float32 needs 8 bytes of data and has 9"),
        ({"data": b""}, r"needs 8 bytes of data and has 0"),
        ({"data": [0.0, 0.0]}, "an array's data is of the type list; send it as bytes"),
        ({"data": "\0" * 8}, "an array's data is of the type str"),
        ({"shape": [3]}, r"an array \[3\] of float32 needs 12 bytes of data and has 8"),
        ({"shape": []}, r"an array \[\] of float32 needs 4 bytes of data and has 8"),
        ({"shape": [-2]}, "shape must be a list of whole numbers from 0"),
        ({"shape": [-1, -2]}, "shape must be a list of whole numbers from 0"),
        ({"shape": [2.0]}, "shape must be a list of whole numbers from 0"),
        ({"shape": [True, 2]}, "shape must be a list of whole numbers from 0"),
        ({"shape": 2}, "shape must be a list of whole numbers from 0"),
        ({"shape": {"0": 2}}, "shape must be a list of whole numbers from 0"),
        ({"shape": [10**9]}, r"an array \[1000000000\] of float32 is larger than 67108864 bytes"),
        ({"shape": [2**63, 2**63]}, "is larger than 67108864 bytes"),
        ({"shape": [0, 10**9], "data": b""}, r"an array \[0, 1000000000\] of float32 is larger"),
        ({"shape": [1] * 8 + [2]}, "an array has 9 dimensions; at most 8 are taken"),
        ({"__ndarray__": False}, "must have data, dtype, shape and nothing else, and __ndarray__: true"),
        ({"__ndarray__": 1}, "and __ndarray__: true"),
    ],
)  # fmt: skip
def test_arrays_that_are_no_plain_numbers_or_lie_are_refused(changes, reason):
    with pytest.raises(MessageError, match=reason) as caught:
        unpack(array_map(**changes))
    assert caught.value.code == "malformed_payload"


@pytest.mark.parametrize("missing", ["data", "dtype", "shape"])
def test_arrays_and_scalars_need_their_fields_and_take_no_others(missing):
    whole = {"__ndarray__": True, "data": b"", "dtype": "<f4", "shape": [0]}
    assert unpack(msgpack.packb({"a": whole}))["a"].shape == (0,)
    assert "must have data, dtype, shape" in refusal(
        msgpack.packb({"a": {key: value for key, value in whole.items() if key != missing}})
    )
    assert "and nothing else" in refusal(msgpack.packb({"a": {**whole, "order": "C"}}))
    assert "must have data, dtype and" in refusal(msgpack.packb({"a": {"__npgeneric__": True, "data": 1}}))


@pytest.mark.parametrize(
    ("data", "dtype", "reason"),
    [
        (300, "|u1", "300 is no uint8; it reaches from 0 to 255"),
        (-1, "<u8", "-1 is no uint64"),
        (1.5, "<i4", "a scalar of int32 cannot be of the type float"),
        (True, "<i4", "a scalar of int32 cannot be of the type bool"),
        (1, "|b1", "a scalar of bool cannot be of the type int"),
        ("1", "<f4", "a scalar of float32 cannot be of the type str"),
        ([1.0], "<f4", "a scalar of float32 cannot be of the type list"),
        (1e300, "<f4", r"1e\+300 is no float32; it reaches to 3.40282e\+38"),
        (0, "<M8[s]", r"dtype is '<M8\[s\]'"),
    ],
)
def test_scalars_that_do_not_fit_their_dtype_are_refused(data, dtype, reason):
    with pytest.raises(MessageError, match=reason):
        unpack(scalar_map(data, dtype))


def nested(levels: int, opening: bytes = b"\x91") -> bytes:
    """A map that holds ``levels`` - 1 more lists or maps inside one another."""
    return b"\x81\xa1a" + opening * (levels - 1) + b"\xc0"


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xdd\x00\x00\x00\x01"])
def test_lists_and_maps_go_twelve_deep(opening):
    value = unpack(nested(12, opening))
    for _ in range(12):
        (value,) = value.values() if isinstance(value, dict) else value
    assert value is None
    for levels in (13, 1000, 1_000_000):
        assert "lie more than 12 deep" in refusal(nested(levels, opening))


def test_every_limit_may_be_reached_and_not_passed():
    limits = Limits(message_bytes=200, depth=3, items=10, array_bytes=16, dimensions=2)
    assert len(unpack(pack({"a": list(range(9))}), limits)["a"]) == 9
    assert "more than 10 entries (a list at byte 3 claims 10)" in refusal(pack({"a": list(range(10))}), limits)
    assert "more than 10 entries" in refusal(pack({"a": [[1, 2, 3], [1, 2, 3, 4]], "b": 1}), limits)
    unpack(pack({"a": [[1, 2, 3], [1, 2, 3]], "b": 1}), limits)
    assert unpack(pack({"a": np.zeros(2)}), limits)["a"].nbytes == 16
    assert "larger than 16 bytes" in refusal(pack({"a": np.zeros(3)}), limits)
    assert "3 dimensions; at most 2" in refusal(pack({"a": np.zeros((1, 1, 1))}), limits)
    whole = pack({"a": b"\0" * 195})
    assert len(whole) == 200
    unpack(whole, limits)
    assert "the message has 201 bytes; at most 200 are read" in refusal(pack({"a": b"\0" * 196}), limits)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"a": object()}, "a value of the type object cannot be sent"),
        ({"a": torch.ones(2)}, "Tensor cannot be sent; turn a tensor into an array"),
        ({"a": np.array([None])}, "numpy's object cannot be sent"),
        ({"a": np.array(["x"])}, "numpy's <U1 cannot be sent"),
        ({"a": np.zeros(1, "f4,f4")}, "cannot be sent; use real numbers"),
        ({"a": np.zeros(1, complex)}, "numpy's complex128 cannot be sent"),
        ({"a": np.datetime64("2026-01-01")}, "cannot be sent; use real numbers"),
        ({"a": 2**64}, "a number beyond 64 bits cannot be sent"),
        ({"a": "\ud83d"}, "this message cannot be sent: 'utf-8'"),
    ],
)
def test_what_cannot_be_sent_is_our_own_fault(value, reason):
    with pytest.raises(MessageError, match=reason) as caught:
        pack(value)
    assert caught.value.code == "internal"


BOMBS = {
    "a list of 4 billion": b"\x81\xa1a\xdd\xff\xff\xff\xff" + b"\0" * 300_000,
    "a map of 4 billion": b"\x81\xa1a\xdf\xff\xff\xff\xff" + b"\0" * 300_000,
    "lists of 200 000 in lists": b"\x81\xa1a" + b"\xdd\x00\x03\x0d\x40" * 1000 + b"\0" * 250_000,
    "4 GiB of bytes": b"\x81\xa1a\xc6\xff\xff\xff\xff" + b"\0" * 1000,
    "4 GiB of text": b"\x81\xa1a\xdb\xff\xff\xff\xff" + b"\0" * 1000,
    "a million levels": nested(1_000_000),
    "a billion elements": array_map(shape=[10**9]),
    "a billion elements and no byte": array_map(shape=[10**9, 0], data=b""),
    "2^126 elements": array_map(shape=[2**63, 2**63]),
    "a subarray of a billion": array_map(dtype="(1000000000,)f4"),
    "strings of a billion letters": array_map(dtype="<U1000000000"),
    "void of a billion bytes": array_map(dtype="|V1000000000"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_a_header_claims_costs_no_memory(name):
    tracemalloc.start()
    try:
        refusal(BOMBS[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_the_largest_number_of_entries_is_read_in_bounded_memory_and_time():
    message = b"\x81\xa1a\xdd" + (83_000).to_bytes(4, "big") + b"\x81\xa1a\x90" * 83_000
    tracemalloc.start()
    try:
        before = time.process_time()
        assert len(unpack(message)["a"]) == 83_000
        spent = time.process_time() - before
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
    assert spent < 30  # seconds; reading that is not linear takes many minutes


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=60).map(lambda data: b"\x82" + data) | st.binary(max_size=60))
def test_only_message_errors_come_out_of_any_bytes_and_msgpack_agrees_on_what_is_whole(data):
    try:
        unpack(data)
    except MessageError as error:
        if "is cut off" not in str(error):
            return
        whole = False
    else:
        whole = True
    with contextlib.nullcontext() if whole else pytest.raises(ValueError):
        msgpack.unpackb(data, strict_map_key=False, object_pairs_hook=list, unicode_errors="replace")


PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
PLAIN |= st.text(max_size=40) | st.binary(max_size=300)
KEYS = st.text(max_size=8).filter(lambda key: key not in ("__ndarray__", "__npgeneric__"))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        KEYS,
        st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=20),
        max_size=17,
    )
)
def test_every_plain_message_comes_back(message):
    assert unpack(msgpack.packb(message), Limits(depth=500)) == message


def test_messages_with_something_wrong_end_in_an_answer():
    """A bounded part of tests/soak: only MessageError comes out, within bounded memory."""
    pick = random.Random(7)
    messages = hostile_messages.valid_messages()
    endings = dict.fromkeys(("read", "malformed_payload", "bad_camera", "missing_field"), 0)
    tracemalloc.start()
    try:
        for _ in range(3000):
            endings[hostile_messages.take(hostile_messages.mutated(pick, pick.choice(messages)))] += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert min(endings.values()) > 10, endings
    assert peak < 8 << 20
