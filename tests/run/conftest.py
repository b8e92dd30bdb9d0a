"""Tiny worlds that most tests of runs begin with."""

from pathlib import Path

import pytest

from tests.run.worlds import World, build_world


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world that nobody has used."""
    return build_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def world(template: World) -> World:
    """Builds the world of a module's tests, which share its store."""
    return template


@pytest.fixture
def fresh(template: World, tmp_path: Path) -> World:
    """Returns the same model and pairs with an empty store."""
    return World(template.model, template.data, tmp_path / "store")
