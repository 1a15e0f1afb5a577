"""The long checks use the small world of the unit tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_name = "lingbot_unit_fixtures"
_spec = importlib.util.spec_from_file_location(_name, Path(__file__).parent.parent / "unit" / "conftest.py")
assert _spec
assert _spec.loader
_fixtures = sys.modules[_name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)

small = _fixtures.small
recipe = _fixtures.recipe
tiny_world = _fixtures.tiny_world

from tests.unit.realtime.conftest import path, picture, small_area, tiny  # noqa: E402, F401
