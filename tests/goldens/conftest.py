"""Golden vectors: numbers from the reference implementation, in a folder of the format its README describes.

Default folder: tests/goldens/data; any other with ``--goldens DIR``. Files may be missing: what needs them is then not
collected. More ``session_*.safetensors`` may be there. A file that no test knows fails the run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

DEFAULT = Path(__file__).parent / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--goldens", type=Path, default=DEFAULT, help="folder of golden vectors")


@pytest.fixture(scope="session")
def golden_dir(request: pytest.FixtureRequest) -> Path:
    """The folder under test."""
    return request.config.getoption("--goldens")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per session file, named after it."""
    if "session_file" in metafunc.fixturenames:
        folder = metafunc.config.getoption("--goldens")
        files = sorted(folder.glob("session_*.safetensors"))
        metafunc.parametrize("session_file", files, ids=[f.stem for f in files])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the modules whose FILES are not all in the folder."""
    folder = config.getoption("--goldens")
    here = Path(__file__).parent

    def present(item: pytest.Item) -> bool:
        if here not in item.path.parents:
            return True
        return all((folder / name).is_file() for name in getattr(item.module, "FILES", ()))

    items[:] = [item for item in items if present(item)]
