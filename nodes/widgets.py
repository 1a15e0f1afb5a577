"""What reaches a node in place of a widget's value.

ComfyUI checks the types of links, but nodes of any type (``*``: reroutes, switches) let every output into every input.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np
from comfy_api.latest import io
from torch import Tensor


def widgets_checked(execute: Callable[..., io.NodeOutput]) -> Callable[..., io.NodeOutput]:
    """For a node's ``execute``, below ``classmethod``: what no widget can hold is a TypeError that names the input.

    Texts arrive as texts: a number that was connected as its digits, None (a switch without an input) as no text.
    Numbers of numpy, which some packs give out, arrive as Python's.
    """
    names = list(inspect.signature(execute).parameters)[1:]
    kinds: dict[str, type] = {}

    @functools.wraps(execute)
    def checked(cls: type[io.ComfyNode], *args: Any, **inputs: Any) -> io.NodeOutput:
        if not kinds:
            kinds.update({one.id: type(one) for one in cls.define_schema().inputs if isinstance(one, io.WidgetInput)})
        values = {**dict(zip(names, args, strict=False)), **inputs}
        for name in [name for name in kinds if name in values]:
            value = _plain(name, values[name])
            if kinds[name] is io.String.Input:
                value = "" if value is None else str(value)
            values[name] = value
        return execute(cls, **values)

    return checked


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (str, Number)):
        return value
    shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
    raise TypeError(
        f"the {name} input got a {type(value).__name__}{shape}, which is neither text nor a number; its link leads "
        f"through a node that lets everything pass. Connect what {name} is for, or remove the link and set it here"
    )
