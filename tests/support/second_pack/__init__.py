"""Another pack, as many are laid out: a ``nodes`` package of its own, and the old way of naming nodes."""

from .nodes import NODE_CLASS_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS"]
