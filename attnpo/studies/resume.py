"""Where a run is resumed from, whether it is still the same run, and what its folder may hold when it begins."""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from attnpo.config import save as save_config
from attnpo.models.loading import weights_fingerprint
from attnpo.schema import UserError, digest
from attnpo.studies.auto_layer import CHOICE, LAYER, is_auto
from attnpo.studies.identity import LATER, may_lack
from attnpo.studies.identity import numbers_of as numbers_of
from attnpo.studies.inputs import Inputs
from attnpo.training.folders import STATE, read_account, remove, replaced, tidy, whole
from attnpo.training.loggers import RUN_ID
from attnpo.training.metrics_file import LOGS, METRICS, cut_metrics

log = logging.getLogger(__name__)

RESULT = "result.json"
CONFIG = "config.yaml"
CHECKPOINTS = ("best", "last")
PAGES = ("generations.jsonl", "curves.png", "report.html")
# What a folder may hold without being that of a run yet: the log and error of a study's point, a config cut short.
UNNAMED = ("log.txt", "error.txt", f"{CONFIG}.part")


def contents_of(inputs: Inputs) -> dict[str, str]:
    """Digests of what the paths of a config hold: policy weights, pairs, captured weights."""
    ground = inputs.ground
    found = {
        "model.path": weights_fingerprint(ground.model.path, ground.model.revision),
        "judge and weights": inputs.weighed.key,
        **{f"data.path ({split})": pairs.fingerprint for split, pairs in inputs.pairs.items()},
    }
    return {name: digest(value)[:16] for name, value in found.items()}


def check_same(stored: Mapping[str, Any], asked: Mapping[str, Any], place: Path) -> None:
    """Nothing; raises UserError naming the first key in which a run to be resumed differs from what is asked for."""
    for key in [*asked, *(key for key in stored if key not in asked and not may_lack(key))]:
        old, new = stored.get(key, LATER.get(key, "nothing")), asked.get(key, "nothing")
        if key == LAYER and is_auto(new):
            continue  # compared when it is found, with the contents
        if key not in stored and new is None:
            continue  # an option that came later and is not used
        if old != new:
            raise UserError(
                f"resume: {key} was {old!r} in {place} and is {new!r} now, which would be another run: give the saved "
                f"value again, or start a new run under another name (model.path={place.parent / 'best'} begins with "
                "the trained policy)"
            )


def find_resume(cfg: DictConfig, folder: Path) -> Path | None:
    """The checkpoint to continue from: ``resume`` auto (``last/`` if there), a path, or None.

    Raises:
        UserError: a path without a checkpoint, one of a run with other settings, or one that cannot be read.
    """
    if cfg.resume is None:
        return None
    path = folder / "last" if cfg.resume == "auto" else Path(cfg.resume)
    if path.name != STATE:
        path = whole(path) / STATE
    if not path.is_file():
        if cfg.resume == "auto":
            log.info("resume=auto: no checkpoint at %s, starting from the beginning", path)
            return None
        raise UserError(f"resume={cfg.resume}: no checkpoint at {path}")
    account = read_account(path.parent)
    if "config" in account:
        check_same(account["config"], numbers_of(cfg), path.parent)
    _check_readable(cfg, path)
    if "config" in account:
        log.info("resuming behind optimiser step %d from %s", account["step"], path)
    return path


def _check_readable(cfg: DictConfig, path: Path) -> None:
    problem = damage(path)
    if problem is None:
        return
    best = whole(path.parent.parent / "best") / STATE
    other = best != path and best.is_file() and damage(best) is None
    advice = f"go on from resume={best.parent}" if other else "give resume= another checkpoint"
    raise UserError(
        f"resume={cfg.resume}: {path} must hold the whole state of a training, but {problem}; {advice}, or start a new "
        "run under another name"
    )


def damage(path: Path) -> str | None:
    """What is wrong with a training state, or None. Reads its structure and no tensor, whatever its size."""
    if path.stat().st_size == 0:
        return "it is empty"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as problem:  # noqa: BLE001  a damaged file can end a reader in any way
        return f"it cannot be read ({' '.join(str(problem).split())[:120]})"
    lacking = [key for key in ("state_dict", "global_step") if not isinstance(state, dict) or key not in state]
    return f"it has no {lacking[0]}" if lacking else None


def check_contents(inputs: Inputs, resume: Path) -> None:
    """Nothing; raises UserError when model, pairs or captured weights are not those of the run to be resumed."""
    stored = read_account(resume.parent)
    if "config" in stored:
        check_same(stored["config"], numbers_of(inputs.ground.cfg), resume.parent)
    if "contents" in stored:
        check_same(stored["contents"], contents_of(inputs), resume.parent)


def finished(cfg: DictConfig, folder: Path) -> dict[str, Any] | None:
    """The result of a run that ``resume=auto`` asks to go on with and that is over already, or None.

    Raises:
        UserError: that run had other settings.
    """
    if cfg.resume != "auto" or not (folder / RESULT).is_file():
        return None
    if (folder / CONFIG).is_file():
        before: Any = OmegaConf.load(folder / CONFIG)
        check_same(numbers_of(before), numbers_of(cfg), folder / CONFIG)
    result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    if is_auto(OmegaConf.select(cfg, LAYER)) and CHOICE not in result["inputs"]:
        raise UserError(
            f"resume: the run in {folder} was given its {LAYER} by hand, and is asked for with {LAYER}=auto now: give "
            "the layer again, or another name"
        )
    log.info("resume=auto: the run in %s is finished; this is its result, nothing is run", folder)
    return result


def refuse_taken(cfg: DictConfig, folder: Path) -> None:
    """Nothing; raises UserError when a run that starts anew would overwrite checkpoints or result of another."""
    if cfg.resume is None and (taken := _held(folder)) is not None:
        raise UserError(f"{folder} holds {taken}: go on with it (resume=auto), or give another name")


def _held(folder: Path) -> str | None:
    if (whole(folder / "last") / STATE).is_file():
        return f"a run that was saved behind step {read_account(folder / 'last').get('step', '?')}"
    return "a finished run" if (folder / RESULT).is_file() else None


def forked(folder: Path, resume: Path | None) -> bool:
    """Whether a run in ``folder`` goes on from the checkpoint of another folder's run."""
    if resume is None:
        return False
    own, place = folder.resolve(), resume.parent
    return not (place.resolve().is_relative_to(own) or place.parent.resolve() == own)


def check_folder(folder: Path, resume: Path | None) -> None:
    """Nothing; raises UserError when what lies in ``folder`` would be mixed with, or lost to, a run that begins there.

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
    if foreign and not _is_config(folder / CONFIG):
        raise UserError(
            f"{folder} must be empty or the folder of a run (with its {CONFIG}), and holds {', '.join(foreign[:3])}"
            f"{' and more' if len(foreign) > 3 else ''}: give name= a name that is new under output="
        )


def _is_config(path: Path) -> bool:
    try:
        return "composed" in OmegaConf.load(path)
    except Exception:  # noqa: BLE001  not a file, not YAML, not a mapping: not ours
        return False


def write_config(cfg: DictConfig, folder: Path) -> None:
    """Nothing; writes ``config.yaml``, which makes ``folder`` that of a run, as a whole or not at all."""
    save_config(cfg, folder / f"{CONFIG}.part")
    (folder / f"{CONFIG}.part").replace(folder / CONFIG)


def prepare_folder(folder: Path, resume: Path | None) -> None:
    """Nothing; leaves of earlier sessions what this one goes on with, and no result: the run is not finished now.

    A run that goes on from another one's checkpoint begins with the rows of its metrics.
    """
    if resume is None or forked(folder, resume):
        clear(folder)
    (folder / RESULT).unlink(missing_ok=True)
    if resume is None:
        return
    account, rows = read_account(resume.parent), resume.parent.parent / METRICS
    if "step" in account:
        if forked(folder, resume) and rows.is_file():
            shutil.copyfile(rows, folder / METRICS)
        cut_metrics(folder, account["step"])


def clear(folder: Path) -> None:
    """Nothing; removes what an earlier run wrote into its folder. UserError when the folder is not that of a run."""
    _check_own(folder)
    for session in (folder / LOGS).glob("version_*"):
        shutil.rmtree(session, ignore_errors=True)
    (folder / LOGS / RUN_ID).unlink(missing_ok=True)
    for name in (METRICS, RESULT, f"{RESULT}.part", *PAGES):
        (folder / name).unlink(missing_ok=True)
    for name in CHECKPOINTS:
        remove(folder / name)


def keep_last(folder: Path, resume: Path | None) -> None:
    """Nothing; gives a run that went on from elsewhere, with no step left to train, a ``last/`` of its own."""
    last = folder / "last"
    if resume is None or not forked(folder, resume) or (last / STATE).is_file():
        return
    with replaced(last) as new:
        if read_account(resume.parent):
            shutil.copytree(resume.parent, new, dirs_exist_ok=True)
        else:  # a state on its own, among files of no known kind
            shutil.copyfile(resume, new / STATE)


def tidy_checkpoints(folder: Path) -> None:
    """Nothing; removes what a killed session has left beside ``best/`` and ``last/``."""
    for name in CHECKPOINTS:
        tidy(folder / name)
