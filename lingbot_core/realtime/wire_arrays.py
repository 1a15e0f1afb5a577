"""numpy arrays and scalars as msgpack maps, in the convention of openpi-client's ``msgpack_numpy``.

An array is {b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [..]}, a scalar {b"__npgeneric__": True,
b"data": number, b"dtype": "<f4"}. The keys are bytes there; peers without such a type send strings.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .errors import MessageError
from .limits import Limits

ARRAY, SCALAR = "__ndarray__", "__npgeneric__"
_FIELDS = {ARRAY: (ARRAY, "data", "dtype", "shape"), SCALAR: (SCALAR, "data", "dtype")}
BYTES_KEYS = {name.encode(): name for names in _FIELDS.values() for name in names}

_TYPES = (
    *(np.bool_, np.int8, np.int16, np.int32, np.int64),
    *(np.uint8, np.uint16, np.uint32, np.uint64, np.float16, np.float32, np.float64),
)


def _known_types() -> dict[str, np.dtype[Any]]:
    """By "float32", "f4", "<f4", ">f4" and so on. Parsing other strings could cost memory: "(1000000000,)f4"."""
    known: dict[str, np.dtype[Any]] = {}
    for dtype in map(np.dtype, _TYPES):
        short = f"{dtype.kind}{dtype.itemsize}"
        known |= {dtype.name: dtype, short: dtype, f"={short}": dtype, f"|{short}": dtype}
        known |= {f"<{short}": dtype.newbyteorder("<"), f">{short}": dtype.newbyteorder(">")}
    return known


_KNOWN_TYPES = _known_types()


def to_wire(value: Any) -> dict[bytes, Any]:
    """The map that stands for a numpy array or scalar; the bytes of an array are in C order.

    Raises MessageError("internal") for anything else, and for arrays of other things than real numbers.
    """
    if not isinstance(value, np.ndarray | np.generic):
        # msgpack asks here for whole numbers that do not fit, too.
        what = "a number beyond 64 bits" if isinstance(value, int) else f"a value of the type {type(value).__name__}"
        hint = "; turn a tensor into an array" if hasattr(value, "numpy") else ""
        raise MessageError(f"{what} cannot be sent{hint}", code="internal")
    if value.dtype.str not in _KNOWN_TYPES:
        raise MessageError(f"numpy's {value.dtype} cannot be sent; use real numbers of up to 64 bits", code="internal")
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}


def from_wire(fields: dict[str, Any], limits: Limits) -> Any:
    """The array or scalar that a map stands for, or the map itself if it stands for none.

    An array is read-only, in this machine's byte order, and shares the memory of its ``data`` unless the order was
    another. NaN is let through. Raises MessageError for maps that lie about their array or ask for too large a one.
    """
    marker = next((name for name in (ARRAY, SCALAR) if name in fields), None)
    if marker is None:
        return fields
    expected = _FIELDS[marker]
    if set(fields) != set(expected) or fields[marker] is not True:
        raise MessageError(
            f"a map with {marker} must have {', '.join(expected[1:])} and nothing else, and {marker}: true"
        )
    name = fields["dtype"]
    dtype = _KNOWN_TYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        shown = repr(name[:40]) if isinstance(name, str) else f"of the type {type(name).__name__}"
        raise MessageError(
            f"an array's dtype is {shown}; only real numbers and booleans are taken, such as '<f4', '<f8' or '|u1'"
        )
    return _array(fields, dtype, limits) if marker == ARRAY else _scalar(fields["data"], dtype)


def _array(fields: dict[str, Any], dtype: np.dtype[Any], limits: Limits) -> np.ndarray:
    data, shape = fields["data"], fields["shape"]
    if not isinstance(data, bytes):
        raise MessageError(f"an array's data is {_kind(data)}; send it as bytes (msgpack's bin)")
    if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape):
        raise MessageError("an array's shape must be a list of whole numbers from 0")
    if len(shape) > limits.dimensions:
        raise MessageError(f"an array has {len(shape)} dimensions; at most {limits.dimensions} are taken")
    shown = _sides(shape)
    # The sides beside a 0 count as well: numpy multiplies them, and so may others later.
    if math.prod(side or 1 for side in shape) * dtype.itemsize > limits.array_bytes:
        raise MessageError(
            f"an array {shown} of {dtype.name} is larger than {limits.array_bytes} bytes; send smaller arrays"
        )
    needed = math.prod(shape) * dtype.itemsize
    if len(data) != needed:
        raise MessageError(f"an array {shown} of {dtype.name} needs {needed} bytes of data and has {len(data)}")
    if dtype.kind == "b" and data.strip(b"\0\1"):
        data = data.translate(_TRUE)  # other bytes are True as well, but numpy may count or compare them wrongly
    array = np.ndarray(tuple(shape), dtype, data)
    if dtype.isnative:
        return array
    array = array.astype(dtype.newbyteorder("="))
    array.setflags(write=False)
    return array


_TRUE = bytes([0, *[1] * 255])


def _scalar(value: Any, dtype: np.dtype[Any]) -> Any:
    native = dtype.newbyteorder("=")
    accepted: tuple[type, ...] = {"b": (bool,), "f": (float, int)}.get(dtype.kind, (int,))
    if type(value) not in accepted:
        raise MessageError(f"a scalar of {dtype.name} cannot be {_kind(value)}")
    if dtype.kind in "iu":
        bounds = np.iinfo(native)
        if not bounds.min <= value <= bounds.max:
            raise MessageError(f"{value} is no {dtype.name}; it reaches from {bounds.min} to {bounds.max}")
    with np.errstate(over="ignore"):
        scalar = native.type(value)
    if dtype.kind == "f" and np.isinf(scalar) and math.isfinite(value):
        raise MessageError(f"{value} is no {dtype.name}; it reaches to {np.finfo(native).max:g}")
    return scalar


def _kind(value: Any) -> str:
    return f"of the type {type(value).__name__}"


def _sides(shape: list[int]) -> str:
    return "[" + ", ".join(str(side) for side in shape) + "]"
