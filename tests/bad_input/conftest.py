"""Fixtures of the bad inputs: a tiny world to break, and ``record`` for the table after the test run."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnpo.system.hub_access import hub_unreachable_reason
from tests.bad_input.attempts import Attempts
from tests.bad_input.table import PROPERTY
from tests.bad_input.table import pytest_terminal_summary as pytest_terminal_summary
from tests.run.worlds import World, build_world

Record = Callable[[str, str, str], None]


@pytest.fixture
def record(record_property: Callable[[str, Any], None], tmp_path: Path) -> Record:
    """A function (case, message, lost) that puts a row into the table; its test has asserted the message."""

    def keep(case: str, message: str, lost: str) -> None:
        for folder in (tmp_path, tmp_path.parent):
            message = message.replace(str(folder), "TMP")
        record_property(PROPERTY, (case, message, lost))

    return keep


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tiny model, its pairs, and an empty store that nobody writes into."""
    return build_world(tmp_path_factory.mktemp("bad"))


@pytest.fixture
def attempts(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Attempts:
    """Commands on variations of the world, as a user starts them."""
    return Attempts(world, tmp_path, capsys, caplog)


@pytest.fixture(autouse=True, scope="session")
def library_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The data library's cache in a folder of the tests."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


@pytest.fixture
def hub_forgotten() -> Iterator[None]:
    """The question whether the hub can be reached, open again before and after a test."""
    assert os.environ["HF_HUB_OFFLINE"] == "1", "no test may ask the network"
    hub_unreachable_reason.cache_clear()
    yield
    hub_unreachable_reason.cache_clear()
