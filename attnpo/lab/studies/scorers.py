"""Models that a study trains for its arms' weights, before these are captured: its scorers (``study.scorers``).

A scorer is an ordinary run on the pairs of its world and seed, which leaves its model; arms name it as ``SCORER.NAME``
(``study.scorers_of``). Owns which scorers a world needs, their runs, and where they lie: in the store, each in a folder
named by the digest of all that made it, so that every study that asks for the same one finds it. A model is compared
with the digests of its files before it is used; one that has changed is made anew.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from attnpo.lab.studies.arms import Composed, Composer, run_digest
from attnpo.lab.studies.outcome import ScorerRun, times_trained
from attnpo.lab.studies.study import ONLY, ROWS, Study, last_line, scorers_of
from attnpo.lab.studies.workers import Workers, execute, on_gpu
from attnpo.models.loading import weights_fingerprint
from attnpo.run.folders import make_folder
from attnpo.run.identity import identity_of
from attnpo.run.resolve import open_paths
from attnpo.run.result import RunResult
from attnpo.run.resume import read_result
from attnpo.schema import UserError
from attnpo.system.files import read_checksums, safe_filename, write_checksums
from attnpo.system.locks import folder_lock
from attnpo.training.checkpoint_folders import STATE, remove
from attnpo.weights.base import online_reads

log = logging.getLogger(__name__)

SCORERS = "scorers"  # in the store
MODEL = "last"  # of a run's checkpoints that of its last step, which is what a study scores


@dataclass(frozen=True)
class Scorers:
    """Scorers of one world and seed, and the errors of those that could not be trained."""

    runs: dict[str, ScorerRun] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> dict[str, str]:
        """Returns their model folders."""
        return {name: str(run.model) for name, run in self.runs.items()}

    @property
    def seconds(self) -> float | None:
        """Returns what training them took, by whichever command; None where there are none."""
        return sum(run.result.seconds["all"] for run in self.runs.values()) if self.runs else None

    def paths_for(self, arm: Sequence[str]) -> dict[str, str]:
        """Returns the folders of the scorers that an arm's overrides name, by the key that takes each.

        UserError for one that could not be trained.
        """
        for name in scorers_of(arm).values():
            if name in self.lost:
                raise UserError(f"scorer {name} could not be trained: {last_line(self.lost[name])}")
        return {key: self.paths[name] for key, name in scorers_of(arm).items()}


def needed_scorers(study: Study, world: str, truth: bool) -> list[str]:
    """Returns the scorers that arms of a world name, in the study's order."""
    named = {name for arm in study.arms_in(world, truth).values() for name in scorers_of(arm).values()}
    return [name for name in study.scorers if name in named]


def compose_scorers(composer: Composer) -> dict[tuple[str, str], Composed]:
    """Returns the configs of the scorers that arms name, by world and name; each run leaves its model.

    UserError naming the scorer whose config cannot be built.
    """
    study = composer.study
    made: dict[tuple[str, str], Composed] = {}
    for world in study.worlds or [ONLY]:
        for name in needed_scorers(study, world, composer.truth):
            try:
                made[world, name] = with_model(composer.arm(study.scorers[name], world))
                _ = made[world, name].config
            except UserError as error:
                raise UserError(f"study {study.name}, scorer {name}: {error}") from error
    return made


def train_scorers(
    study: str, runs: Mapping[str, Composed], seed: int, facts: Mapping[str, object], store: Path, workers: Workers
) -> Scorers:
    """Returns the scorers ``runs`` of one world and seed: those in ``store`` as they are, the others trained.

    ``facts``: contents of the paths of the pairs and of the base, and the code. A scorer that fails is lost alone.
    """
    found = Scorers()
    made = {name: run.with_values({"seed": seed}, [f"seed={seed}"]) for name, run in runs.items()}
    places = {name: store / SCORERS / _name(name, seed, run, facts) for name, run in made.items()}
    with ExitStack() as locks:
        for place in places.values():
            if not is_whole(place):
                make_folder(place)
                locks.enter_context(folder_lock(place, workers.lock_timeout, instead="store="))
        lacking = [name for name, place in places.items() if not is_whole(place)]
        for name in lacking:
            if read_result(places[name])[0] is not None:
                log.warning("%s: its model is missing or damaged; it is made anew", places[name])
                shutil.rmtree(places[name] / MODEL, ignore_errors=True)
                (places[name] / "result.json").unlink()
        if lacking:
            log.info("study %s: training its scorers %s, seed %d", study, ", ".join(lacking), seed)
        jobs = [(made[name].overrides, places[name]) for name in lacking]
        alone = on_gpu(made[name].config.trainer.accelerator for name in lacking)
        for job, result, error in execute(jobs, workers, alone):
            name = lacking[job]
            if result is None:
                found.lost[name] = error or ""
                log.error("scorer %s failed: %s", name, last_line(found.lost[name]))
            else:
                keep_model(places[name])
    for name, place in places.items():
        result = None if name in found.lost else read_result(place)[0]
        if result is not None:
            run = made[name].config
            asked = run.objective.requires | online_reads(run.weights)
            found.runs[name] = scorer_of(place / MODEL, result, run.batch.pairs, asked, run.reference)
            took = f"trained in {result.seconds['all']:.0f} s" if name in lacking else "is there already and reused"
            log.info("scorer %s %s: %s", name, took, place)
    return found


def scorer_of(model: Path, result: RunResult, step_pairs: int, asked: frozenset[str], reference: str) -> ScorerRun:
    """Returns the scorer of a finished run; ``asked`` of the models in a step, ``reference``: when it is read."""
    times, more = times_trained(result, step_pairs), 0.0
    if "reference" in asked:
        more = ROWS * (1.0 if reference in ("cached", "first_epoch") else times)
    return ScorerRun(model, result, ROWS * times + more, ROWS * times)


def _name(name: str, seed: int, made: Composed, facts: Mapping[str, object]) -> str:
    """Returns the name of a scorer's folder; one that starts from another model than the base counts its weights."""
    run = made.config
    own = {key: path for key, path in identity_of(run).paths.items() if key not in ("model.path", "data.path")}
    facts = {**facts, "scorer": own}
    if "model.path" not in open_paths(run.model, run.data):
        facts["model"] = weights_fingerprint(run.model.path, run.model.revision)
    return f"{safe_filename(name)}-seed{seed}-{run_digest(identity_of(run).result, facts)[:16]}"


# ------------------------------------------------------------------------------------------------ model folders


def with_model(made: Composed) -> Composed:
    """Returns the config of a run that leaves its model."""
    return made.with_values({"callbacks.checkpoints": True}, ["callbacks.checkpoints=true"])


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
    files = read_checksums(model)
    if STATE in files:
        kept = {name: found for name, found in files.items() if name != STATE}
        write_checksums(model, kept, only=list(kept))
    (model / STATE).unlink(missing_ok=True)
    remove(run / "best")
