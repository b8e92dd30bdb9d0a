"""The fixture that trains a tiny model."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import lightning as L
import pytest

from attnpo.data.datamodule import PreferenceDataModule
from attnpo.training.module import PreferenceModule
from tests.training.tiny import Rows, train


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Rows]:
    """Trains and returns the rows of metrics.csv, validation before the first step included."""
    numbers = count(1)

    def run(
        module: PreferenceModule,
        data: PreferenceDataModule,
        *,
        steps: int,
        epochs: int,
        validate_every: int | str = 100,
        callbacks: tuple[L.Callback, ...] = (),
        resume: Path | None = None,
        folder: Path | None = None,
        max_steps: int = -1,
    ) -> Rows:
        if max_steps < 0 and steps < epochs * data.steps_per_epoch(1):
            max_steps = steps
        limits = {"max_epochs": epochs, "max_steps": max_steps, "validate_every": validate_every}
        return train(module, data, folder or tmp_path / f"run{next(numbers)}", *callbacks, resume=resume, **limits)

    return run
