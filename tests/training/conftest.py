"""The fixture that trains a tiny model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from attnpo.data.datamodule import PreferenceDataModule
from attnpo.training.callbacks import FinalValidation
from attnpo.training.loggers import make_loggers
from attnpo.training.metrics_file import merge_metrics
from attnpo.training.module import PreferenceModule
from attnpo.training.settings import LoggerSettings, TrainerSettings
from attnpo.training.trainer import make_trainer, quiet_lightning


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., list[dict[str, float]]]:
    """Trains and returns the rows of metrics.csv, validation before the first step included."""
    count = 0

    def run(
        module: PreferenceModule,
        data: PreferenceDataModule,
        *,
        steps: int,
        epochs: int,
        validate_every: int | str = 100,
        callbacks: tuple[object, ...] = (),
        resume: Path | None = None,
        folder: Path | None = None,
        max_steps: int = -1,
    ) -> list[dict[str, float]]:
        nonlocal count
        count += 1
        where = folder or tmp_path / f"run{count}"
        if max_steps < 0 and steps < epochs * data.steps_per_epoch(1):
            max_steps = steps
        settings = TrainerSettings(
            max_epochs=epochs, max_steps=max_steps, accelerator="cpu", devices="1", validate_every=validate_every
        )
        with quiet_lightning():
            trainer = make_trainer(
                settings,
                make_loggers(LoggerSettings(), where, {}),
                [FinalValidation(), *callbacks],  # type: ignore[list-item]
                where,
                data.accumulation(1),
            )
            if resume is None:
                trainer.validate(module, data, verbose=False)
            trainer.fit(module, data, ckpt_path=resume, weights_only=True)
        return merge_metrics(where)

    return run
