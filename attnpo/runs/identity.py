"""What makes a run the run it is: the keys of its config, and the source files, that can move a number.

The one notion of it, for resuming a run, for finding a study's finished points and for telling a study's arms apart.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnpo.config import CONFIG_DIR, build, plain
from attnpo.files import file_digest
from attnpo.runs.settings import LAYER
from attnpo.schema import UserError
from attnpo.training.settings import CallbackSettings, direction

PACKAGE = Path(__file__).resolve().parents[1]

# Keys, or parents of keys, that move no number beyond rounding.
BOOKKEEPING = (
    *("name", "output", "store", "resume", "lock_timeout", "logger", "study", "seeds", "composed"),
    *("grid", "grids", "other_judge", "default_layer", "default_beta", "verbalized_epochs"),  # what takes them counts
    *("judge.token_budget", "verbalizer.batch_size", "verbalizer.token_budget", "weights.store_layers"),
    *("batch.micro", "batch.eval_micro", "batch.tokens", "batch.eval_tokens", "layout", "live_reference"),
    *("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.threads"),
    *("trainer.progress", "trainer.log_every_n_steps"),
)
# What lies at these paths is compared instead.
PATHS = ("model.path", "data.path", "judge.path", "verbalizer.path")
# What is done beside the training: free to change while it goes on, but a result without it is another one.
BESIDE = ("truth", "callbacks", "trainer.validate_every")
# What of it decides which policy is the best.
MONITOR, MODE = "callbacks.monitor", "callbacks.mode"
KEPT = (MONITOR, MODE)
# Parts that only a weight source reads which requires this.
NEEDED = {"judge": "judge", "auto_layer": "judge", "verbalizer": "generator"}
LAYERS = "weights.layers"
# What only reference spans read.
SPANS = ("judge.span_closing", "judge.span_drop")
# Options that came later: what a config that lacks one of them meant.
LATER = {"judge.span_drop": 2, "optimizer.warmup_from": "first", "lengths.keep": "start", "batch.shuffle": True}
# Rooms and files of the package that no number of a run comes from: they start a command, show what is finished, or
# measure beside the runs (an analysis counts for its own results). All others count, a new one without being named.
SHOWING = (
    *("fit.py", "weigh.py", "generate.py", "report.py", "verify.py", "conformance", "display", "reports", "theory"),
    *("analysis/freedom.py", "analysis/intervals.py", "studies/faithfulness.py", "studies/faithfulness_pages.py"),
    *("studies/footnotes.py", "studies/frontier.py", "studies/ranking.py", "studies/report.py"),
    *("studies/selection.py", "studies/tables.py"),
)


def numbers_of(cfg: DictConfig) -> dict[str, Any]:
    """The keys of a config that can move a number of the training, flat: ``optimizer.lr`` and its like."""
    idle = (*BOOKKEEPING, *PATHS, *BESIDE, *_unread(cfg))
    return {key: value for key, value in _values(cfg).items() if key in KEPT or not below(key, idle)}


def result_of(cfg: DictConfig) -> dict[str, Any]:
    """The same of a whole result: what is scored, validated and kept beside the training counts as well."""
    idle = (*BOOKKEEPING, *PATHS, *_unread(cfg))
    return {key: value for key, value in _values(cfg).items() if not below(key, idle)}


def settings_of(cfg: DictConfig) -> dict[str, Any]:
    """The same whatever the weights are: for what reads a judge or other parts that its weights do not need."""
    idle = (*BOOKKEEPING, "model.path", "data.path")
    return {key: value for key, value in _flat(plain(cfg), "") if not below(key, idle)}


def paths_of(cfg: DictConfig) -> dict[str, Any]:
    """The paths that stand for their contents, as far as the weights need them."""
    return {key: value for key, value in _flat(plain(cfg), "") if key in PATHS and not below(key, _unread(cfg))}


def component(value: object) -> object:
    """A value of a config; for a component of the package its class alone, whichever module it was in or is in now."""
    own = isinstance(value, str) and value.startswith(f"{PACKAGE.name}.")
    return str(value).rpartition(".")[2] if own else value


def may_lack(key: str) -> bool:
    """Whether a config may lack ``key`` among its numbers and still be that of the same run."""
    return below(key, (LAYER, *BOOKKEEPING, *PATHS, *BESIDE, *NEEDED))


def below(key: str, parents: Sequence[str]) -> bool:
    """Whether ``key`` is one of ``parents`` or lies below one."""
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def _unread(cfg: DictConfig) -> list[str]:
    """Parts that the weights do not read; none of them where the weights cannot be built, which is told elsewhere."""
    try:
        requires = build(cfg.weights).requires
    except UserError:
        return []
    replaced = [LAYER] if cfg.weights.get("layers") else []
    spans = [] if str(OmegaConf.select(cfg, "judge.span")).lower() == "reference" else SPANS
    return [*(part for part, needed in NEEDED.items() if needed not in requires), *replaced, *spans]


def _values(cfg: DictConfig) -> dict[str, Any]:
    """Every key with its value; a mode that follows from the metric as what it stands for."""
    values = dict(_flat(plain(cfg), ""))
    if values.get(MODE, "") is None:
        values[MODE] = direction(str(values.get(MONITOR, CallbackSettings.monitor)))
    return values


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


# ------------------------------------------------------------------------------------------------ contents


def files_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the files that flat settings name, and of the modules of components outside the package, by key."""
    texts = {key: value for key, value in values.items() if isinstance(value, str)}
    found = {key: _module(text) if key.endswith("_target_") else _file(text) for key, text in texts.items()}
    return {key: file_digest(Path(path)) for key, path in found.items() if path is not None}


def _file(name: str) -> str | None:
    """The file of a name, from the working directory or among the configs as ``find_file`` has it; None for others."""
    return next(filter(os.path.isfile, (os.path.expanduser(name), str(CONFIG_DIR / name))), None)


def _module(dotted: str) -> str | None:
    """The file of the module that a component outside the package is in."""
    name = dotted.rpartition(".")[0]
    try:
        spec = None if name.partition(".")[0] == PACKAGE.name else find_spec(name)
    except (ImportError, ValueError):
        return None  # told when it is built
    return spec.origin if spec is not None and spec.has_location else None


@cache
def source_digest(root: Path | None = None) -> str:
    """Digest of all sources of the package that can move a number of a run, computed once per process."""
    root = root or PACKAGE
    found = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if not any(name == one or name.startswith(f"{one}/") for one in SHOWING):
            found.update(f"{name}\0{file_digest(file)}\0".encode())
    return found.hexdigest()[:16]
