"""Checks a run folder and finds the checkpoint to resume from."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from omegaconf import OmegaConf

from attnpo.config.compose import wrap_yaml_errors
from attnpo.data.overlap import FILE as PROMPTS
from attnpo.models.loading import weights_fingerprint
from attnpo.run.combinations import CHOICE, LAYER, is_auto_layer
from attnpo.run.folders import CONFIG, POLICIES
from attnpo.run.identity import RECOMPUTED, RunIdentity, load_saved_numbers
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
from attnpo.training.checkpoint_folders import (
    ACCOUNT,
    STATE,
    complete_folder,
    finish_replacement,
    read_checkpoint_info,
    remove_folder,
    replace_folder,
)
from attnpo.training.metrics_file import LOGS, METRICS, RUN_ID, restore_metrics

log = logging.getLogger(__name__)


RESULT = "result.json"
MADE = (CONFIG, RESULT)  # files under a run folder's seal; checkpoints have their own
FAILURES = "failures.txt"
PAGES = ("generations.jsonl", "curves.png", "drift.png", "report.html", PROMPTS, FAILURES)
# Files a folder may contain before it is a run folder: log and error of a study's point, a partly written config.
UNNAMED = ("log.txt", "error.txt", f"{CONFIG}.part")


def digest_contents(inputs: Inputs, base: BaseModel, modules: Mapping[str, str]) -> dict[str, str]:
    """Returns digests of the files at a config's paths. ``modules``: digests of user-defined components."""
    found = {
        "tokenizer and chat template": base.chat.fingerprint(),
        "model.path": weights_fingerprint(base.spec.path, base.spec.revision),
        "judge and weights": inputs.weighed.key,
        **{f"data.path ({split})": pairs.fingerprint for split, pairs in inputs.pairs.items()},
    }
    found |= {f"{key} (its module)": text for key, text in modules.items()}
    return {name: digest(value)[:16] for name, value in found.items()}


def check_same_values(stored: Mapping[str, object], asked: Mapping[str, object], place: Path) -> None:
    """Raises UserError naming the first key whose value differs between the saved run and the current config."""
    for key in [*asked, *(key for key in stored if key not in asked)]:
        old, new = stored.get(key), asked.get(key, "nothing")
        if key == RECOMPUTED or (key == LAYER and is_auto_layer(new)):
            continue  # the first affects only memory and speed; a layer to be found is compared later
        if key not in stored:
            raise UserError(
                f"resume: {place} has no value for {key}, which is now {redact(new)!r}. The saved run is a "
                "different run, or was created by an earlier version of attnpo and cannot be resumed by this version: "
                "start a new run under another name"
            )
        if not is_same_identity(old, new):
            raise UserError(
                f"resume: {key} was {old!r} in {place} and is now {redact(new)!r}, which makes this a different run: "
                f"use the saved value again, or start a new run under another name (model.path={place.parent / 'best'} "
                "starts from the trained policy)"
            )


def find_checkpoint(
    resume: str | None, folder: Path, numbers: Mapping[str, object], point: bool = False
) -> Path | None:
    """Returns the checkpoint to resume from. ``resume``: "auto" (``last/`` if it exists), a path, or None.

    Compares the checkpoint's files with their digests, and its settings with ``numbers``. ``point``: true for a grid
    point of a study, which starts over if its checkpoint is damaged. Raises UserError if there is no checkpoint at
    the path, or if the checkpoint is damaged or comes from a run with different settings.
    """
    if resume is None:
        return None
    if resume == "auto":
        return _find_undamaged_checkpoint(folder, numbers, point)
    path = Path(resume)
    if path.name != STATE:
        path = complete_folder(path) / STATE
    if not path.is_file():
        raise UserError(f"resume={resume}: there is no checkpoint at {path}")
    problem = _describe_damage(numbers, path.parent) or _describe_damage_of_best(folder, path)
    if problem is not None:
        raise _damage_error(resume, path, problem)
    return _log_checkpoint(path)


def _find_undamaged_checkpoint(folder: Path, numbers: Mapping[str, object], point: bool) -> Path | None:
    last, best = (complete_folder(folder / name) for name in ("last", "best"))
    if not last.is_dir() and not best.is_dir():
        log.info("resume=auto: there is no checkpoint at %s, so the run starts from the beginning", last / STATE)
        return None
    problem = _describe_damage(numbers, last)
    other = problem is not None and not _describe_damage(numbers, best)
    problem = problem or _describe_damage_of_best(folder, last / STATE)
    if problem is None:
        return _log_checkpoint(last / STATE)
    # Nothing is lost if best/ has the same step; a study's point uses it in any case.
    if other and (point or read_checkpoint_info(best).get("step") == read_checkpoint_info(last).get("step")):
        log.warning("resume=auto: cannot resume from %s (%s); resuming from %s instead", last, problem, best)
        return _log_checkpoint(best / STATE)
    if point:
        log.warning("resume=auto: cannot resume from %s (%s); this run starts from the beginning", last, problem)
        return None
    raise _damage_error("auto", last / STATE, problem)


def _log_checkpoint(path: Path) -> Path:
    log.info("resuming after optimiser step %d from %s", read_checkpoint_info(path.parent)["step"], path)
    return path


def _describe_damage(numbers: Mapping[str, object], place: Path) -> str | None:
    """Describes damage to a checkpoint; None if it is intact. Raises UserError if it comes from a different run."""
    if (found := describe_change(place, only=(ACCOUNT, "*.csv"))) is not None:
        return found
    check_same_values(read_checkpoint_info(place).get("config", {}), numbers, place)
    return describe_change(place, only=(STATE,))


def _describe_damage_of_best(folder: Path, resume: Path) -> str | None:
    """Describes damage to ``checkpoint.json`` (best value so far) in the run's own ``best/``; None if undamaged."""
    best = complete_folder(folder / "best")
    if not best.is_dir() or best == resume.parent or is_fork(folder, resume):
        return None
    found = describe_change(best, only=(ACCOUNT,))
    return None if found is None else f"{best} next to it: {found}; move that folder elsewhere to continue without it"


def _damage_error(resume: str, path: Path, problem: str) -> UserError:
    best = complete_folder(path.parent.parent / "best")
    other = best != path.parent and describe_change(best, only=(ACCOUNT, "*.csv", STATE)) is None
    advice = f"continue with resume={best}" if other else "set resume= to a different checkpoint"
    return UserError(
        f"resume={resume}: {path} is damaged or incomplete: {problem}; {advice}, or start a new run under another name"
    )


def check_contents(numbers: Mapping[str, object], contents: Mapping[str, str], resume: Path) -> None:
    """Raises UserError if model, tokenizer, pairs or captured weights differ from those of the run to resume."""
    stored = read_checkpoint_info(resume.parent)
    check_same_values(stored["config"], numbers, resume.parent)
    check_same_values(stored["contents"], contents, resume.parent)


def read_result(folder: Path) -> tuple[RunResult | None, str | None]:
    """Returns (result, None) for the run in ``folder``, or (None, problem) if the saved result is damaged.

    Returns (None, None) if no result was saved.
    """
    if not (folder / RESULT).is_file():
        return None, None
    problem = describe_change(folder, only=MADE)
    if problem is not None:
        return None, problem
    return RunResult.read((folder / RESULT).read_text(encoding="utf-8")), None


def find_finished_result(folder: Path, identity: RunIdentity, point: bool = False) -> RunResult | None:
    """Returns the saved result if ``resume=auto`` is set and the run is already finished, else None.

    Ignores a damaged result. Raises UserError if the run had different settings, or if its result is damaged and there
    is no checkpoint to continue from.
    """
    result, problem = read_result(folder)
    if problem is not None and not point:
        if not complete_folder(folder / "last").is_dir():
            raise UserError(
                f"resume=auto: {folder} contains a finished run without checkpoints, but {problem}, so its numbers "
                f"cannot be verified: remove its {RESULT} to run it again, or use another name"
            )
        log.warning("resume=auto: the run in %s is treated as unfinished: %s", folder, problem)
    if result is None:
        return None
    check_same_values(load_saved_numbers(folder / CONFIG, identity.ignored_keys), identity.numbers, folder / CONFIG)
    if is_auto_layer(identity.numbers.get(LAYER)) and CHOICE not in result.inputs:
        raise UserError(
            f"resume: the run in {folder} had a fixed {LAYER}, but now {LAYER}=auto is set: set the same layer again, "
            "or use another name"
        )
    log.info("resume=auto: the run in %s is already finished; showing its result", folder)
    return result


def refuse_existing_run(folder: Path) -> None:
    """Raises UserError if a new run would overwrite the checkpoints or the result of another run."""
    if (taken := _describe_existing_run(folder)) is not None:
        raise UserError(f"{folder} contains {taken}: resume it (resume=auto), or use another name")


def _describe_existing_run(folder: Path) -> str | None:
    if (complete_folder(folder / "last") / STATE).is_file():
        return f"a run saved after step {read_checkpoint_info(folder / 'last').get('step', '?')}"
    return "a finished run" if (folder / RESULT).is_file() else None


def is_fork(folder: Path, resume: Path | None) -> bool:
    """Returns whether a run in ``folder`` continues from a checkpoint in another run's folder."""
    if resume is None:
        return False
    own, place = folder.resolve(), resume.parent
    return not (place.resolve().is_relative_to(own) or place.parent.resolve() == own)


def require_usable_folder(folder: Path, resume: Path | None) -> None:
    """Raises UserError if starting a run in ``folder`` would overwrite another run or mix with other files."""
    if is_fork(folder, resume) and (taken := _describe_existing_run(folder)) is not None:
        raise UserError(
            f"resume={resume} is a checkpoint from another folder, but {folder} already contains {taken}: set a new "
            f"name= to continue from it in a new folder, or resume=auto to continue the run in {folder}"
        )
    if resume is None or is_fork(folder, resume):
        _require_own_folder(folder)


def _require_own_folder(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in names if name not in UNNAMED and not name.startswith(".")]
    if (folder / "points").is_dir() or (
        foreign and CONFIG not in read_checksums(folder) and not _is_config(folder / CONFIG)
    ):
        raise UserError(
            f"{folder} must be empty or a run folder (with its {CONFIG}), but contains {', '.join(foreign[:3])}"
            f"{' and more' if len(foreign) > 3 else ''}: set name= to a new name under output="
        )


def _is_config(path: Path) -> bool:
    try:
        with wrap_yaml_errors(path):
            return "composed" in OmegaConf.load(path)
    except Exception:  # noqa: BLE001  not a file, not YAML or not a mapping
        return False


def write_config(folder: Path, text: str, machine: str) -> None:
    """Writes ``config.yaml`` and its digest, which makes ``folder`` a run folder. ``machine``: the run's hardware."""
    write_atomically(folder / CONFIG, f"# {version_line()}\n# {machine}\n{text}")
    write_checksums(folder, only=(CONFIG,))


def write_result(part: Path) -> None:
    """Moves ``part`` to the run's ``result.json``. Call it last, because a run with a result counts as finished."""
    folder = part.parent
    write_checksums(folder, {RESULT: file_digest(part)}, only=MADE)
    fsync_path(part)
    part.replace(folder / RESULT)
    fsync_path(folder)


def prepare_folder(folder: Path, resume: Path | None) -> None:
    """Marks the run as unfinished: removes its result and any files from earlier sessions that it does not continue."""
    for place in (folder, folder / LOGS):
        remove_temporary_files(place)
    if resume is None or is_fork(folder, resume):
        clear_folder(folder)
    for name in (RESULT, FAILURES):
        (folder / name).unlink(missing_ok=True)
    if resume is not None and METRICS in read_checksums(resume.parent):
        restore_metrics(folder, resume.parent / METRICS)


def clear_folder(folder: Path) -> None:
    """Removes the files of an earlier run from its folder. Raises UserError if it is not a run folder."""
    _require_own_folder(folder)
    for session in (folder / LOGS).glob("version_*"):
        shutil.rmtree(session, ignore_errors=True)
    (folder / LOGS / RUN_ID).unlink(missing_ok=True)
    for name in (METRICS, RESULT, f"{RESULT}.part", SEAL, *PAGES):
        (folder / name).unlink(missing_ok=True)
    for name in POLICIES:
        remove_folder(folder / name)


def copy_to_last(folder: Path, resume: Path | None) -> None:
    """Copies the resumed checkpoint to the run's own ``last/`` if no steps are left and ``last/`` is damaged."""
    last = folder / "last"
    if resume is None or resume.parent in (last, complete_folder(last)):
        return
    if (last / STATE).is_file() and (is_fork(folder, resume) or describe_change(last, only=(ACCOUNT, STATE)) is None):
        return
    with replace_folder(last) as new:
        shutil.copytree(resume.parent, new, dirs_exist_ok=True)


def finish_replacements(folder: Path) -> None:
    """Removes leftovers of killed sessions from ``best/`` and ``last/``."""
    for name in POLICIES:
        finish_replacement(folder / name)
