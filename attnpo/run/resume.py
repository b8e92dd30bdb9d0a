"""Check of a run folder, and the checkpoint to resume from."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from omegaconf import OmegaConf

from attnpo.config.compose import wrap_yaml_errors
from attnpo.data.overlap import FILE as PROMPTS
from attnpo.models.loading import weights_fingerprint
from attnpo.run.combinations import CHOICE, LAYER, is_auto
from attnpo.run.folders import CONFIG, POLICIES
from attnpo.run.identity import RECOMPUTED, Identity, saved_numbers
from attnpo.run.inputs import Inputs
from attnpo.run.resolve import BaseModel
from attnpo.run.result import RunResult
from attnpo.schema import UserError, digest
from attnpo.system.credentials import is_same_identity, redact
from attnpo.system.files import (
    SEAL,
    describe_change,
    file_digest,
    fsync_path,
    read_checksums,
    remove_temporary_files,
    write_atomically,
    write_checksums,
)
from attnpo.system.machine import version_line
from attnpo.training.checkpoint_folders import ACCOUNT, STATE, read_account, remove, replace_folder, tidy, whole
from attnpo.training.metrics_file import LOGS, METRICS, RUN_ID, take_metrics

log = logging.getLogger(__name__)


RESULT = "result.json"
MADE = (CONFIG, RESULT)  # what the seal of a run folder covers: the rest is for readers, or sealed in its own folder
FAILURES = "failures.txt"
PAGES = ("generations.jsonl", "curves.png", "drift.png", "report.html", PROMPTS, FAILURES)
# What a folder may hold without being that of a run yet: the log and error of a study's point, a config cut short.
UNNAMED = ("log.txt", "error.txt", f"{CONFIG}.part")


def contents_of(inputs: Inputs, base: BaseModel, modules: Mapping[str, str]) -> dict[str, str]:
    """Digests what a config's paths hold; ``modules``: code of one's own components (``digest_named_functions``)."""
    found = {
        "tokenizer and chat template": base.chat.fingerprint(),
        "model.path": weights_fingerprint(base.spec.path, base.spec.revision),
        "judge and weights": inputs.weighed.key,
        **{f"data.path ({split})": pairs.fingerprint for split, pairs in inputs.pairs.items()},
    }
    found |= {f"{key} (its module)": text for key, text in modules.items()}
    return {name: digest(value)[:16] for name, value in found.items()}


def check_same(stored: Mapping[str, object], asked: Mapping[str, object], place: Path) -> None:
    """Raises UserError naming the first key in which a run to be resumed differs from what is asked for."""
    for key in [*asked, *(key for key in stored if key not in asked)]:
        old, new = stored.get(key), asked.get(key, "nothing")
        if key == RECOMPUTED or (key == LAYER and is_auto(new)):
            continue  # memory and speed alone; a layer is compared when it is found, with the contents
        if key not in stored:
            raise UserError(
                f"resume: {place} says nothing of {key}, which is {redact(new)!r} now: it is of another run, or of an "
                "earlier version of attnpo, which no later one goes on with; start a new run under another name"
            )
        if not is_same_identity(old, new):
            raise UserError(
                f"resume: {key} was {old!r} in {place} and is {redact(new)!r} now, which would be another run: give "
                f"the saved value again, or start a new run under another name (model.path={place.parent / 'best'} "
                "begins with the trained policy)"
            )


def find_resume(resume: str | None, folder: Path, numbers: Mapping[str, object], point: bool = False) -> Path | None:
    """Returns the checkpoint to continue from: ``resume`` auto (``last/`` if there), a path, or None.

    What is read of it is compared with its digests, its settings with ``numbers``. ``point``: of a study's, what is
    damaged is made anew. Raises UserError for a path without a checkpoint, one of a run with other settings, or a
    damaged one.
    """
    if resume is None:
        return None
    if resume == "auto":
        return _newest_sound(folder, numbers, point)
    path = Path(resume)
    if path.name != STATE:
        path = whole(path) / STATE
    if not path.is_file():
        raise UserError(f"resume={resume}: no checkpoint at {path}")
    problem = _problem(numbers, path.parent) or _problem_of_best(folder, path)
    if problem is not None:
        raise _damage_error(resume, path, problem)
    return _chosen(path)


def _newest_sound(folder: Path, numbers: Mapping[str, object], point: bool) -> Path | None:
    last, best = (whole(folder / name) for name in ("last", "best"))
    if not last.is_dir() and not best.is_dir():
        log.info("resume=auto: no checkpoint at %s, starting from the beginning", last / STATE)
        return None
    problem = _problem(numbers, last)
    other = problem is not None and not _problem(numbers, best)
    problem = problem or _problem_of_best(folder, last / STATE)
    if problem is None:
        return _chosen(last / STATE)
    # Nothing is lost where best/ is of the same step, and of a study's point nobody is asked.
    if other and (point or read_account(best).get("step") == read_account(last).get("step")):
        log.warning("resume=auto: %s: %s; going on from %s", last, problem, best)
        return _chosen(best / STATE)
    if point:
        log.warning("resume=auto: %s: %s; the point is run anew", last, problem)
        return None
    raise _damage_error("auto", last / STATE, problem)


def _chosen(path: Path) -> Path:
    log.info("resuming after optimiser step %d from %s", read_account(path.parent)["step"], path)
    return path


def _problem(numbers: Mapping[str, object], place: Path) -> str | None:
    """Returns what is damaged of what a run goes on with, or None; UserError for a checkpoint of another run."""
    if (found := describe_change(place, only=(ACCOUNT, "*.csv"))) is not None:
        return found
    check_same(read_account(place).get("config", {}), numbers, place)
    return describe_change(place, only=(STATE,))


def _problem_of_best(folder: Path, resume: Path) -> str | None:
    """Returns what is wrong with the account of the run's own ``best/``, which has the best value; or None."""
    best = whole(folder / "best")
    if not best.is_dir() or best == resume.parent or is_fork(folder, resume):
        return None
    found = describe_change(best, only=(ACCOUNT,))
    return None if found is None else f"beside it {best}: {found}; move that folder away to go on without it"


def _damage_error(resume: str, path: Path, problem: str) -> UserError:
    best = whole(path.parent.parent / "best")
    other = best != path.parent and describe_change(best, only=(ACCOUNT, "*.csv", STATE)) is None
    advice = f"go on from resume={best}" if other else "give resume= another checkpoint"
    return UserError(
        f"resume={resume}: {path} must hold the whole state of a training, as it was written, but {problem}; "
        f"{advice}, or start a new run under another name"
    )


def check_contents(numbers: Mapping[str, object], contents: Mapping[str, str], resume: Path) -> None:
    """Raises UserError when model, tokenizer, pairs or captured weights are not those of the run to be resumed."""
    stored = read_account(resume.parent)
    check_same(stored["config"], numbers, resume.parent)
    check_same(stored["contents"], contents, resume.parent)


def read_result(folder: Path) -> tuple[RunResult | None, str | None]:
    """Returns the result of the run in ``folder``, or None and why its file, compared with its digest, is none."""
    if not (folder / RESULT).is_file():
        return None, None
    problem = describe_change(folder, only=MADE)
    if problem is not None:
        return None, problem
    return RunResult.read((folder / RESULT).read_text(encoding="utf-8")), None


def find_finished_result(folder: Path, identity: Identity, point: bool = False) -> RunResult | None:
    """Returns the result of a run that ``resume=auto`` asks to go on with and that is over already, or None.

    A damaged one does not count. Raises UserError where it had other settings, or is damaged without a checkpoint.
    """
    result, problem = read_result(folder)
    if problem is not None and not point:
        if not whole(folder / "last").is_dir():
            raise UserError(
                f"resume=auto: {folder} holds a finished run without checkpoints, but {problem}, so nothing tells what "
                f"made its numbers: remove its {RESULT} to run it anew, or give another name"
            )
        log.warning("resume=auto: the run in %s counts as not finished: %s", folder, problem)
    if result is None:
        return None
    check_same(saved_numbers(folder / CONFIG, identity.moveless), identity.numbers, folder / CONFIG)
    if is_auto(identity.numbers.get(LAYER)) and CHOICE not in result.inputs:
        raise UserError(
            f"resume: the run in {folder} was given its {LAYER} by hand, and is asked for with {LAYER}=auto now: give "
            "the layer again, or another name"
        )
    log.info("resume=auto: the run in %s is finished; this is its result, nothing is run", folder)
    return result


def refuse_taken(folder: Path) -> None:
    """Raises UserError when a run that starts anew would overwrite checkpoints or result of another."""
    if (taken := _describe_existing_run(folder)) is not None:
        raise UserError(f"{folder} holds {taken}: go on with it (resume=auto), or give another name")


def _describe_existing_run(folder: Path) -> str | None:
    if (whole(folder / "last") / STATE).is_file():
        return f"a run that was saved after step {read_account(folder / 'last').get('step', '?')}"
    return "a finished run" if (folder / RESULT).is_file() else None


def is_fork(folder: Path, resume: Path | None) -> bool:
    """Returns whether a run in ``folder`` goes on from the checkpoint of another folder's run."""
    if resume is None:
        return False
    own, place = folder.resolve(), resume.parent
    return not (place.resolve().is_relative_to(own) or place.parent.resolve() == own)


def check_folder(folder: Path, resume: Path | None) -> None:
    """Raises UserError when what lies in ``folder`` would be mixed with, or lost to, a run that begins there."""
    if is_fork(folder, resume) and (taken := _describe_existing_run(folder)) is not None:
        raise UserError(
            f"resume={resume} is a checkpoint of another folder, and {folder} holds {taken}: give a new name= to go on "
            "from that checkpoint there, or resume=auto to go on with the run of this folder"
        )
    if resume is None or is_fork(folder, resume):
        _check_own(folder)


def _check_own(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in names if name not in UNNAMED and not name.startswith(".")]
    if (folder / "points").is_dir() or (
        foreign and CONFIG not in read_checksums(folder) and not _is_config(folder / CONFIG)
    ):
        raise UserError(
            f"{folder} must be empty or the folder of a run (with its {CONFIG}), and holds {', '.join(foreign[:3])}"
            f"{' and more' if len(foreign) > 3 else ''}: give name= a name that is new under output="
        )


def _is_config(path: Path) -> bool:
    try:
        with wrap_yaml_errors(path):
            return "composed" in OmegaConf.load(path)
    except Exception:  # noqa: BLE001  not a file, not YAML, not a mapping: not ours
        return False


def write_config(folder: Path, text: str, machine: str) -> None:
    """Writes ``config.yaml``, which makes ``folder`` that of a run, and its digest; ``machine``: what it runs on."""
    write_atomically(folder / CONFIG, f"# {version_line()}\n# {machine}\n{text}")
    write_checksums(folder, only=(CONFIG,))


def write_result(part: Path) -> None:
    """Puts the file ``part`` in its folder as the run's result, the last of all: a run that has it is finished."""
    folder = part.parent
    write_checksums(folder, {RESULT: file_digest(part)}, only=MADE)
    fsync_path(part)
    part.replace(folder / RESULT)
    fsync_path(folder)


def prepare_folder(folder: Path, resume: Path | None) -> None:
    """Leaves of earlier sessions what this one goes on with, and no result: the run is not finished now."""
    for place in (folder, folder / LOGS):
        remove_temporary_files(place)
    if resume is None or is_fork(folder, resume):
        clear(folder)
    for name in (RESULT, FAILURES):
        (folder / name).unlink(missing_ok=True)
    if resume is not None and METRICS in read_checksums(resume.parent):
        take_metrics(folder, resume.parent / METRICS)


def clear(folder: Path) -> None:
    """Removes what an earlier run wrote into its folder. UserError when the folder is not that of a run."""
    _check_own(folder)
    for session in (folder / LOGS).glob("version_*"):
        shutil.rmtree(session, ignore_errors=True)
    (folder / LOGS / RUN_ID).unlink(missing_ok=True)
    for name in (METRICS, RESULT, f"{RESULT}.part", SEAL, *PAGES):
        (folder / name).unlink(missing_ok=True)
    for name in POLICIES:
        remove(folder / name)


def keep_last(folder: Path, resume: Path | None) -> None:
    """Gives a run that had no step left to train a sound ``last/`` of its own, where it went on from elsewhere."""
    last = folder / "last"
    if resume is None or resume.parent in (last, whole(last)):
        return
    if (last / STATE).is_file() and (is_fork(folder, resume) or describe_change(last, only=(ACCOUNT, STATE)) is None):
        return
    with replace_folder(last) as new:
        shutil.copytree(resume.parent, new, dirs_exist_ok=True)


def tidy_checkpoints(folder: Path) -> None:
    """Removes what a killed session has left beside ``best/`` and ``last/``."""
    for name in POLICIES:
        tidy(folder / name)
