"""Fixtures of this folder's tests."""

import pytest

from tests.run.worlds import World, build_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Builds a world that tests read; who writes into it takes a copy."""
    return build_world(tmp_path_factory.mktemp("world"))
