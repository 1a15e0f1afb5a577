"""The second pack's nodes."""

from .echo import Echo

NODE_CLASS_MAPPINGS = {"SecondPackEcho": Echo}
