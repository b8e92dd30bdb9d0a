"""What a run's folder may hold, and from where a run continues."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from omegaconf import OmegaConf

from attnpo.config.compose import readable
from attnpo.data.overlap import FILE as PROMPTS
from attnpo.models.loading import weights_fingerprint
from attnpo.run.base import BaseModel
from attnpo.run.combinations import CHOICE, LAYER, is_auto
from attnpo.run.folders import CONFIG, POLICIES
from attnpo.run.identity import DECAY_ALL, FALLBACK, LATER, RECOMPUTED, Identity, component, may_lack, saved_numbers
from attnpo.run.inputs import Inputs
from attnpo.run.result import RunResult
from attnpo.schema import UserError, digest
from attnpo.system.credentials import is_same_identity, redact
from attnpo.system.files import (
    SEAL,
    changed,
    file_digest,
    is_sealed,
    remove_unfinished,
    seal,
    sealed,
    to_disk,
    write_whole,
)
from attnpo.system.machine import version_line
from attnpo.training.checkpoint_folders import ACCOUNT, STATE, read_account, remove, replaced, tidy, whole
from attnpo.training.metrics_file import LOGS, METRICS, RUN_ID, cut_metrics, take_metrics
from attnpo.training.optimizer import Optimizer

log = logging.getLogger(__name__)


RESULT = "result.json"
MADE = (CONFIG, RESULT)  # what the seal of a run folder covers: the rest is for readers, or sealed in its own folder
FAILURES = "failures.txt"
PAGES = ("generations.jsonl", "curves.png", "drift.png", "report.html", PROMPTS, FAILURES)
# What a folder may hold without being that of a run yet: the log and error of a study's point, a config cut short.
UNNAMED = ("log.txt", "error.txt", f"{CONFIG}.part")


def contents_of(inputs: Inputs, base: BaseModel, modules: Mapping[str, str]) -> dict[str, str]:
    """Digests of what the paths of a config hold: policy weights, tokenizer, chat template, pairs, captured weights.

    ``modules``: code of components of one's own, by key (``named_files.code_of``).
    """
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
    for key in [*asked, *(key for key in stored if key not in asked and not may_lack(key))]:
        old, new = stored.get(key, LATER.get(key, "nothing")), asked.get(key, "nothing")
        if key == LAYER and is_auto(new):
            continue  # compared when it is found, with the contents
        if key == RECOMPUTED:
            continue  # memory and speed alone
        if key not in stored and (new is None or key in (DECAY_ALL, FALLBACK)):
            continue  # an option that came later and is not used, or is as it was: see ``go_on``
        if component(old) != component(new) and not is_same_identity(old, new):
            raise UserError(
                f"resume: {key} was {old!r} in {place} and is {redact(new)!r} now, which would be another run: give "
                f"the saved value again, or start a new run under another name (model.path={place.parent / 'best'} "
                "begins with the trained policy)"
            )


def is_begun_live(resume: str | None, folder: Path, moveless: Sequence[str]) -> bool:
    """Returns whether the run that is resumed was begun with ``reference=live``, and says so.

    Runs with adapters were begun so by default before reference=adapter_off was the default. ``moveless``: as in
    ``Identity``.
    """
    if resume is None:
        return False
    place = folder / "last" if resume == "auto" else Path(resume)
    saved: Mapping[str, object] = read_account(place.parent if place.name == STATE else place).get("config", {})
    if not saved and resume == "auto" and read_result(folder)[0] is not None:
        saved = saved_numbers(folder / CONFIG, moveless)
    if saved.get("reference") != "live":
        return False
    log.info("resume: going on with reference=live, as the run was begun; the command names no reference")
    return True


def find_resume(resume: str | None, folder: Path, numbers: Mapping[str, object], point: bool = False) -> Path | None:
    """Returns the checkpoint to continue from: ``resume`` auto (``last/`` if there), a path, or None.

    What is read of it is compared with the digests taken when it was written, and its settings with ``numbers`` (those
    of ``Identity``). ``point``: the run is one of a study's, whose folder is named by all that moves a number; what is
    damaged there is said and made anew.

    Raises:
        UserError: a path without a checkpoint, one of a run with other settings, or one that is damaged.
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
    if not is_sealed(path.parent):
        log.warning(
            "resume: %s has no %s (it is of an earlier version, or on its own) and is taken unchecked",
            path.parent,
            SEAL,
        )
    problem = _problem(numbers, path.parent) or _problem_of_best(folder, path)
    if problem is not None:
        raise _damaged(resume, path, problem)
    return _chosen(path)


def decays_all(resume: Path | None, optimizer: Optimizer) -> bool:
    """Returns whether the run saved in ``resume`` decays all weights where ``optimizer`` does not, and says so.

    That is a state of a config without ``optimizer.decay_all``, whose optimiser has all weights in one group.
    """
    if resume is None or optimizer.decay_all or not optimizer.weight_decay:
        return False
    if DECAY_ALL in read_account(resume.parent).get("config", {}):
        return False
    state = torch.load(resume, map_location="cpu", weights_only=True, mmap=True)
    saved = state.get("optimizer_states") or [{}]
    if len(saved[0].get("param_groups", ())) > 1:
        return False
    log.warning(
        "resume: %s was saved before optimizer.decay_all was a key: weight decay still applies to all weights, "
        "norms and biases included, as with optimizer.decay_all=true",
        resume,
    )
    return True


def _newest_sound(folder: Path, numbers: Mapping[str, object], point: bool) -> Path | None:
    last, best = (whole(folder / name) for name in ("last", "best"))
    if not last.is_dir() and not best.is_dir():
        log.info("resume=auto: no checkpoint at %s, starting from the beginning", last / STATE)
        return None
    problem = _unchecked(last) or _problem(numbers, last)
    other = problem is not None and not (_unchecked(best) or _problem(numbers, best))
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
    raise _damaged("auto", last / STATE, problem)


def _chosen(path: Path) -> Path:
    account = read_account(path.parent)
    if "config" in account:
        log.info("resuming after optimiser step %d from %s", account["step"], path)
    return path


def _unchecked(place: Path) -> str | None:
    """Returns what to say of a checkpoint that cannot be compared with digests, or None."""
    if is_sealed(place) or not place.is_dir():
        return None
    return f"it has no {SEAL} (an earlier version wrote none); resume={place} takes it unchecked"


def _problem(numbers: Mapping[str, object], place: Path) -> str | None:
    """Returns what is damaged in a checkpoint folder of what a run goes on with, or None; UserError when it is another
    run's.

    A folder without digests is asked whether its state has the form of one.
    """
    if is_sealed(place) and (found := changed(place, only=(ACCOUNT, "*.csv"))) is not None:
        return found
    account = read_account(place)
    if "config" in account:
        check_same(account["config"], numbers, place)
    return changed(place, only=(STATE,)) if is_sealed(place) else damage(place / STATE)


def _problem_of_best(folder: Path, resume: Path) -> str | None:
    """Returns what is wrong with the account of the run's own ``best/``, which tells what a better
    policy is; or None.
    """
    best = whole(folder / "best")
    if not best.is_dir() or best == resume.parent or forked(folder, resume) or not is_sealed(resume.parent):
        return None
    found = changed(best, only=(ACCOUNT,))
    return None if found is None else f"beside it {best}: {found}; move that folder away to go on without it"


def _damaged(resume: str, path: Path, problem: str) -> UserError:
    best = whole(path.parent.parent / "best")
    other = best != path.parent and is_sealed(best) and changed(best, only=(ACCOUNT, "*.csv", STATE)) is None
    advice = f"go on from resume={best}" if other else "give resume= another checkpoint"
    return UserError(
        f"resume={resume}: {path} must hold the whole state of a training, as it was written, but {problem}; "
        f"{advice}, or start a new run under another name"
    )


def damage(path: Path) -> str | None:
    """Returns what is wrong with a training state, or None. Reads its structure and no tensor, whatever its size."""
    if not path.is_file():
        return "it is missing"
    if path.stat().st_size == 0:
        return "it is empty"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as problem:  # noqa: BLE001  a damaged file can end a reader in any way
        return f"it cannot be read ({' '.join(str(problem).split())[:120]})"
    lacking = [key for key in ("state_dict", "global_step") if not isinstance(state, dict) or key not in state]
    return f"it has no {lacking[0]}" if lacking else None


def check_contents(numbers: Mapping[str, object], contents: Mapping[str, str], resume: Path) -> None:
    """Raises UserError when model, tokenizer, pairs or captured weights are not those of the run to be resumed.

    ``numbers``: as in ``Identity``; ``contents``: of ``contents_of``. What an earlier version did not keep a digest of
    is not compared.
    """
    stored = read_account(resume.parent)
    if "config" in stored:
        check_same(stored["config"], numbers, resume.parent)
    if "contents" in stored:
        asked = {name: value for name, value in contents.items() if name in stored["contents"]}
        check_same(stored["contents"], asked, resume.parent)


def read_result(folder: Path) -> tuple[RunResult | None, str | None]:
    """Returns the result of the run in ``folder``, or None and why there is none although its file is there.

    Result and config are compared with the digests that the run wrote as its last act.
    """
    if not (folder / RESULT).is_file():
        return None, None
    problem = changed(folder, only=MADE)
    if problem is not None:
        return None, problem
    try:
        return RunResult.read((folder / RESULT).read_text(encoding="utf-8")), None
    except ValueError as error:  # of a version that kept no digests
        return None, f"{RESULT} cannot be read ({error})"


def finished(folder: Path, identity: Identity, point: bool = False) -> RunResult | None:
    """Returns the result of a run that ``resume=auto`` asks to go on with and that is over already, or None.

    One that is damaged, or whose config is, does not count, which is said (for a study's ``point`` the study has).

    Raises:
        UserError: that run had other settings; or it is damaged, and no checkpoint is there to make it again from.
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
    if (taken := _held(folder)) is not None:
        raise UserError(f"{folder} holds {taken}: go on with it (resume=auto), or give another name")


def _held(folder: Path) -> str | None:
    if (whole(folder / "last") / STATE).is_file():
        return f"a run that was saved after step {read_account(folder / 'last').get('step', '?')}"
    return "a finished run" if (folder / RESULT).is_file() else None


def forked(folder: Path, resume: Path | None) -> bool:
    """Returns whether a run in ``folder`` goes on from the checkpoint of another folder's run."""
    if resume is None:
        return False
    own, place = folder.resolve(), resume.parent
    return not (place.resolve().is_relative_to(own) or place.parent.resolve() == own)


def check_folder(folder: Path, resume: Path | None) -> None:
    """Raises UserError when what lies in ``folder`` would be mixed with, or lost to, a run that begins there.

    That is another run, where one goes on from elsewhere; and anything that no run of attnpo wrote.
    """
    if forked(folder, resume) and (taken := _held(folder)) is not None:
        raise UserError(
            f"resume={resume} is a checkpoint of another folder, and {folder} holds {taken}: give a new name= to go on "
            "from that checkpoint there, or resume=auto to go on with the run of this folder"
        )
    if resume is None or forked(folder, resume):
        _check_own(folder)


def _check_own(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in names if name not in UNNAMED and not name.startswith(".")]
    of_study = (folder / "points").is_dir()
    if of_study or (foreign and CONFIG not in sealed(folder) and not _is_config(folder / CONFIG)):
        raise UserError(
            f"{folder} must be empty or the folder of a run (with its {CONFIG}), and holds {', '.join(foreign[:3])}"
            f"{' and more' if len(foreign) > 3 else ''}: give name= a name that is new under output="
        )


def _is_config(path: Path) -> bool:
    try:
        with readable(path):
            return "composed" in OmegaConf.load(path)
    except Exception:  # noqa: BLE001  not a file, not YAML, not a mapping: not ours
        return False


def write_config(folder: Path, text: str, machine: str) -> None:
    """Writes ``config.yaml``, which makes ``folder`` that of a run, as a whole or not at all, and its digest.

    ``text``: the configuration as YAML; ``machine``: what it is run on, in a line.
    """
    write_whole(folder / CONFIG, f"# {version_line()}\n# {machine}\n{text}")
    seal(folder, only=(CONFIG,))


def write_result(part: Path) -> None:
    """Puts the file ``part`` in its folder as the run's result, the last of all: a run that has it is finished."""
    folder = part.parent
    seal(folder, {RESULT: file_digest(part)}, only=MADE)
    to_disk(part)
    part.replace(folder / RESULT)
    to_disk(folder)


def prepare_folder(folder: Path, resume: Path | None) -> None:
    """Leaves of earlier sessions what this one goes on with, and no result: the run is not finished now.

    A run that goes on from another one's checkpoint begins with the rows of its metrics.
    """
    for place in (folder, folder / LOGS):
        remove_unfinished(place)
    if resume is None or forked(folder, resume):
        clear(folder)
    for name in (RESULT, FAILURES):
        (folder / name).unlink(missing_ok=True)
    if resume is None:
        return
    account, rows = read_account(resume.parent), resume.parent.parent / METRICS
    if METRICS in sealed(resume.parent):
        take_metrics(folder, resume.parent / METRICS)
    elif "step" in account:  # of a version that kept them beside the checkpoints alone
        if forked(folder, resume) and rows.is_file():
            shutil.copyfile(rows, folder / METRICS)
        cut_metrics(folder, account["step"])


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
    if (last / STATE).is_file() and (forked(folder, resume) or changed(last, only=(ACCOUNT, STATE)) is None):
        return
    with replaced(last) as new:
        if read_account(resume.parent):
            shutil.copytree(resume.parent, new, dirs_exist_ok=True)
        else:  # a state on its own, among files of no known kind
            shutil.copyfile(resume, new / STATE)
        if not is_sealed(new):
            seal(new)


def tidy_checkpoints(folder: Path) -> None:
    """Removes what a killed session has left beside ``best/`` and ``last/``."""
    for name in POLICIES:
        tidy(folder / name)
