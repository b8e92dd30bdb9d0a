"""Trains scorers (``study.scorers``): models that a study needs to compute the weights of its arms.

A scorer is an ordinary run on the pairs of its world and seed that saves its final model; arms refer to it as
``SCORER.NAME`` (``study.scorer_names_by_key``). Scorers are cached in the store and shared between studies; their
folder names contain a digest of everything that determines the model. A cached model is checked against its file
digests before use, and retrained if it has changed.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from attnpo.lab.studies.arms import ComposedConfig, Composer, run_digest
from attnpo.lab.studies.outcome import ScorerRun, epochs_trained
from attnpo.lab.studies.study import ONLY, ROWS, Study, last_line, scorer_names_by_key
from attnpo.lab.studies.workers import WorkerSettings, needs_gpu, run_jobs
from attnpo.models.loading import weights_fingerprint
from attnpo.run.folders import make_folder
from attnpo.run.identity import make_identity
from attnpo.run.resolve import missing_path_keys
from attnpo.run.result import RunResult
from attnpo.run.resume import read_result
from attnpo.schema import UserError
from attnpo.system.files import read_checksums, safe_filename, write_checksums
from attnpo.system.locks import folder_lock
from attnpo.training.checkpoint_folders import STATE, remove_folder
from attnpo.weights.base import online_statistics

log = logging.getLogger(__name__)

SCORERS = "scorers"  # in the store
MODEL = "last"  # checkpoint of a run's last step, the model that a study evaluates


@dataclass(frozen=True)
class TrainedScorers:
    """Trained scorers of one world and seed, and the errors of those that failed (``lost``)."""

    runs: dict[str, ScorerRun] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    @property
    def model_paths(self) -> dict[str, str]:
        """Returns the model folders, keyed by scorer name."""
        return {name: str(run.model) for name, run in self.runs.items()}

    @property
    def training_seconds(self) -> float | None:
        """Returns the total training time in seconds, including cached scorers; None if there are no scorers."""
        return sum(run.result.seconds["all"] for run in self.runs.values()) if self.runs else None

    def model_paths_for(self, arm: Sequence[str]) -> dict[str, str]:
        """Returns the model folders of the scorers used in an arm's overrides, by config key.

        Raises:
            UserError: one of these scorers could not be trained.
        """
        for name in scorer_names_by_key(arm).values():
            if name in self.lost:
                raise UserError(f"scorer {name} could not be trained: {last_line(self.lost[name])}")
        return {key: self.model_paths[name] for key, name in scorer_names_by_key(arm).items()}


def needed_scorers(study: Study, world: str, truth: bool) -> list[str]:
    """Returns the names of the scorers used by a world's arms, in the study's order."""
    named = {name for arm in study.arms_in_world(world, truth).values() for name in scorer_names_by_key(arm).values()}
    return [name for name in study.scorers if name in named]


def compose_scorers(composer: Composer) -> dict[tuple[str, str], ComposedConfig]:
    """Composes the configs of all scorers used by arms, keyed by world and name; their runs save their models.

    Raises:
        UserError: a scorer's config is invalid; the message names the scorer.
    """
    study = composer.study
    made: dict[tuple[str, str], ComposedConfig] = {}
    for world in study.worlds or [ONLY]:
        for name in needed_scorers(study, world, composer.truth):
            try:
                made[world, name] = with_checkpoint(composer.compose_arm(study.scorers[name], world))
                _ = made[world, name].config
            except UserError as error:
                raise UserError(f"study {study.name}, scorer {name}: {error}") from error
    return made


def train_scorers(
    study: str,
    runs: Mapping[str, ComposedConfig],
    seed: int,
    facts: Mapping[str, object],
    store: Path,
    workers: WorkerSettings,
) -> TrainedScorers:
    """Trains the scorers ``runs`` of one world and seed, reusing those already in ``store``.

    ``facts``: fingerprints of the pairs, the base and the code. If one scorer fails, the others are still trained.
    """
    found = TrainedScorers()
    made = {name: run.with_values({"seed": seed}, [f"seed={seed}"]) for name, run in runs.items()}
    places = {name: store / SCORERS / _scorer_folder_name(name, seed, run, facts) for name, run in made.items()}
    with ExitStack() as locks:
        for place in places.values():
            if not has_intact_model(place):
                make_folder(place)
                locks.enter_context(folder_lock(place, workers.lock_timeout, instead="store=FOLDER"))
        lacking = [name for name, place in places.items() if not has_intact_model(place)]
        for name in lacking:
            if read_result(places[name])[0] is not None:
                log.warning("%s: the model is missing or damaged; retraining it", places[name])
                shutil.rmtree(places[name] / MODEL, ignore_errors=True)
                (places[name] / "result.json").unlink()
        if lacking:
            log.info("study %s: training scorers %s for seed %d", study, ", ".join(lacking), seed)
        jobs = [(made[name].overrides, places[name]) for name in lacking]
        alone = needs_gpu(made[name].config.trainer.accelerator for name in lacking)
        for job, result, error in run_jobs(jobs, workers, alone):
            name = lacking[job]
            if result is None:
                found.lost[name] = error or ""
                log.error("scorer %s failed: %s", name, last_line(found.lost[name]))
            else:
                strip_training_state(places[name])
    for name, place in places.items():
        result = None if name in found.lost else read_result(place)[0]
        if result is not None:
            run = made[name].config
            asked = run.objective.requires | online_statistics(run.weights)
            found.runs[name] = make_scorer_run(place / MODEL, result, run.batch.pairs, asked, run.reference)
            took = f"trained in {result.seconds['all']:.0f} s" if name in lacking else "reused from the store"
            log.info("scorer %s: %s, in %s", name, took, place)
    return found


def make_scorer_run(
    model: Path, result: RunResult, step_pairs: int, asked: frozenset[str], reference: str
) -> ScorerRun:
    """Returns a finished scorer run, with its numbers of forward and backward passes per pair.

    ``asked``: model outputs that a training step requires. ``reference``: the run's setting ``reference``, which
    determines when reference log-probabilities are computed.
    """
    times, more = epochs_trained(result, step_pairs), 0.0
    if "reference" in asked:
        more = ROWS * (1.0 if reference in ("cached", "first_epoch") else times)
    return ScorerRun(model, result, ROWS * times + more, ROWS * times)


def _scorer_folder_name(name: str, seed: int, made: ComposedConfig, facts: Mapping[str, object]) -> str:
    """Returns a scorer's folder name; its digest includes the initial model if that is not the base."""
    run = made.config
    own = {key: path for key, path in make_identity(run).paths.items() if key not in ("model.path", "data.path")}
    facts = {**facts, "scorer": own}
    if "model.path" not in missing_path_keys(run.model, run.data):
        facts["model"] = weights_fingerprint(run.model.path, run.model.revision)
    return f"{safe_filename(name)}-seed{seed}-{run_digest(make_identity(run).result, facts)[:16]}"


# ------------------------------------------------------------------------------------------------ model folders


def with_checkpoint(made: ComposedConfig) -> ComposedConfig:
    """Returns the config with checkpoints enabled, so that the run saves its final model."""
    return made.with_values({"callbacks.checkpoints": True}, ["callbacks.checkpoints=true"])


def has_intact_model(run: Path) -> bool:
    """Returns whether a run has finished and its model files are unchanged."""
    if read_result(run)[0] is None or not (run / MODEL).is_dir():
        return False
    try:
        weights_fingerprint(run / MODEL)
    except UserError as problem:
        log.warning("%s", problem)
        return False
    return True


def strip_training_state(run: Path) -> None:
    """Deletes a finished run's training state and best checkpoint, which are much larger than the model."""
    model = run / MODEL
    files = read_checksums(model)
    if STATE in files:
        kept = {name: found for name, found in files.items() if name != STATE}
        write_checksums(model, kept, only=list(kept))
    (model / STATE).unlink(missing_ok=True)
    remove_folder(run / "best")
