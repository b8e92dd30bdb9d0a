"""Where a run is resumed from, and whether it is still the same run."""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnpo.config import plain
from attnpo.models.loading import weights_fingerprint
from attnpo.schema import UserError, digest
from attnpo.studies.inputs import Inputs
from attnpo.training.folders import STATE, read_account, remove, tidy, whole
from attnpo.training.metrics_file import LOGS, METRICS

log = logging.getLogger(__name__)

RESULT = "result.json"
CONFIG = "config.yaml"
CHECKPOINTS = ("best", "last")

# Keys, or parents of keys, that may change while a run goes on: they move no number of the training beyond rounding.
BOOKKEEPING = (
    *("name", "output", "store", "resume", "logger", "study", "grid", "seeds", "composed", "truth"),
    *("model.path", "data.path", "judge.path"),  # what lies there is compared instead
    *("judge.token_budget", "batch.micro", "batch.eval_micro", "callbacks"),
    *("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.threads"),
    *("trainer.progress", "trainer.log_every_n_steps", "trainer.validate_every"),
)
# What decides which policy is the best.
KEPT = ("callbacks.monitor", "callbacks.mode")


def numbers_of(cfg: DictConfig) -> dict[str, Any]:
    """The keys of a config that can move a number of the training, flat: ``optimizer.lr`` and its like."""
    return {
        key: value
        for key, value in _flat(plain(cfg), "")
        if key in KEPT or not any(key == parent or key.startswith(f"{parent}.") for parent in BOOKKEEPING)
    }


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


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
    for key in [*asked, *(key for key in stored if key not in asked)]:
        old, new = stored.get(key, "nothing"), asked.get(key, "nothing")
        if old != new:
            raise UserError(
                f"resume: {key} was {old!r} in {place} and is {new!r} now, which would be another run: give the saved "
                f"value again, or start a new run under another name (model.path={place.parent / 'best'} begins with "
                "the trained policy)"
            )


def find_resume(cfg: DictConfig, folder: Path) -> Path | None:
    """The checkpoint to continue from: ``resume`` auto (``last/`` if there), a path, or None.

    Raises:
        UserError: a path without a checkpoint, or one of a run with other settings.
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
        log.info("resuming behind optimiser step %d from %s", account["step"], path)
    return path


def check_contents(inputs: Inputs, resume: Path) -> None:
    """Nothing; raises UserError when model, pairs or captured weights are not those of the run to be resumed."""
    stored = read_account(resume.parent)
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
    log.info("resume=auto: the run in %s is finished; this is its result, nothing is run", folder)
    result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    return result


def refuse_taken(cfg: DictConfig, folder: Path) -> None:
    """Nothing; raises UserError when a run that starts anew would overwrite the checkpoints of another."""
    if cfg.resume is None and (whole(folder / "last") / STATE).is_file():
        step = read_account(folder / "last").get("step", "?")
        raise UserError(
            f"{folder} holds a run that was saved behind step {step}: go on with it (resume=auto), or give another name"
        )


def clear(folder: Path) -> None:
    """Nothing; removes logs, checkpoints and result of an earlier run in the same folder."""
    shutil.rmtree(folder / LOGS, ignore_errors=True)
    for name in (METRICS, RESULT):
        (folder / name).unlink(missing_ok=True)
    for name in CHECKPOINTS:
        remove(folder / name)


def tidy_checkpoints(folder: Path) -> None:
    """Nothing; removes what a killed session has left beside ``best/`` and ``last/``."""
    for name in CHECKPOINTS:
        tidy(folder / name)
