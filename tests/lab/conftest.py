"""Finished studies and a world, made once for all tests that only read them."""

import pytest

from tests.lab.studied import STUDY, Finished, finish
from tests.run.worlds import World, build_world


@pytest.fixture(scope="session")
def plain_study(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Three arms without a truth, of which one cannot run."""
    return finish(tmp_path_factory.mktemp("plain"), STUDY, "batch.eval_micro=4")


@pytest.fixture(scope="session")
def true_study(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two arms at two betas with a known truth and sample answers, far enough from the base to be compared."""
    study = STUDY.replace("callbacks=none", "callbacks=none, callbacks.samples=2").replace("max_steps=1", "max_steps=3")
    chosen = ("study.layers=[2]", "~study.arms.broken", "study.grid.lr=[1.0e-2]", "study.grid.beta=[0.2,1.0]")
    return finish(tmp_path_factory.mktemp("true"), study, "+truth=known", *chosen)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """World for tests that ask its store for nothing but what they put there themselves."""
    return build_world(tmp_path_factory.mktemp("world"))
