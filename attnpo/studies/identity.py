"""What makes a run the run it is: the keys of its config, and the source files, that can move a number.

The one notion of it, for resuming a run, for finding a study's finished points and for telling a study's arms apart.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from attnpo.config import build, plain
from attnpo.schema import UserError
from attnpo.studies.auto_layer import LAYER

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
KEPT = ("callbacks.monitor", "callbacks.mode")
# Parts that only a weight source reads which requires this.
NEEDED = {"judge": "judge", "auto_layer": "judge", "verbalizer": "generator"}
LAYERS = "weights.layers"
# Rooms and files of the package whose code moves the numbers of a run.
MOVING = ("objectives", "weights", "models", "training", "data", "text", "testbed", "schema.py")


def numbers_of(cfg: DictConfig) -> dict[str, Any]:
    """The keys of a config that can move a number of the training, flat: ``optimizer.lr`` and its like."""
    idle = (*BOOKKEEPING, *PATHS, *BESIDE, *_unread(cfg))
    return {key: value for key, value in _flat(plain(cfg), "") if key in KEPT or not below(key, idle)}


def result_of(cfg: DictConfig) -> dict[str, Any]:
    """The same of a whole result: what is scored, validated and kept beside the training counts as well."""
    idle = (*BOOKKEEPING, *PATHS, *_unread(cfg))
    return {key: value for key, value in _flat(plain(cfg), "") if not below(key, idle)}


def settings_of(cfg: DictConfig) -> dict[str, Any]:
    """The same whatever the weights are: for what reads a judge or other parts that its weights do not need."""
    idle = (*BOOKKEEPING, "model.path", "data.path")
    return {key: value for key, value in _flat(plain(cfg), "") if not below(key, idle)}


def paths_of(cfg: DictConfig) -> dict[str, Any]:
    """The paths that stand for their contents, as far as the weights need them."""
    return {key: value for key, value in _flat(plain(cfg), "") if key in PATHS and not below(key, _unread(cfg))}


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
    return [*(part for part, needed in NEEDED.items() if needed not in requires), *replaced]


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


@cache
def source_digest(parts: tuple[str, ...] = MOVING, root: Path = PACKAGE) -> str:
    """Digest of the source of ``parts`` of the package (rooms or files), computed once per process."""
    found = hashlib.sha256()
    for part in parts:
        place = root / part
        for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
            found.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\0".encode())
            found.update(file.read_bytes())
    return found.hexdigest()[:16]
