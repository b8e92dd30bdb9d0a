"""Runs of a study that leave their model: asked to, found whole, and stripped of what only a training goes on from."""

import logging
from pathlib import Path

from attnpo.lab.studies.arms import Composed
from attnpo.models.loading import weights_fingerprint
from attnpo.run.resume import read_result
from attnpo.schema import UserError
from attnpo.system.files import seal, sealed
from attnpo.training.checkpoint_folders import STATE, remove

log = logging.getLogger(__name__)

MODEL = "last"  # of a run's checkpoints that of its last step, which is what a study scores


def with_model(made: Composed) -> Composed:
    """Returns the config of a run that leaves its model."""
    return made.changed({"callbacks.checkpoints": True}, ["callbacks.checkpoints=true"])


def is_whole(run: Path) -> bool:
    """Returns whether a run is finished and its model as it was written."""
    if read_result(run)[0] is None or not (run / MODEL).is_dir():
        return False
    try:
        weights_fingerprint(run / MODEL)
    except UserError as problem:
        log.warning("%s", problem)
        return False
    return True


def keep_model(run: Path) -> None:
    """Removes what a finished run has beside its model to resume from: several times the model's size."""
    model = run / MODEL
    files = sealed(model)
    if STATE in files:
        kept = {name: found for name, found in files.items() if name != STATE}
        seal(model, kept, only=list(kept))
    (model / STATE).unlink(missing_ok=True)
    remove(run / "best")
