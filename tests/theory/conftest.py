"""A small theory study, shared by the tests of what is shown and of what it says."""

import pytest

from experiments.theory.study import Study, run_study


@pytest.fixture(scope="session")
def study() -> Study:
    return run_study(problems=2, deltas=(0.1, 0.6), marks=(1, 30))
