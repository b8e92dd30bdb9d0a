"""Composition of configurations, checks of their components, the front of the entry points, and paths.

Hydra composes, and stays in this file and the entry points. Importing this module, ``--help`` and ``--cfg`` load
neither torch nor anything that does. The check imports the modules of the targets named in the configuration, which
must therefore be light, and reports wrong keys and types before a model loads (how: ``attnpo.components``).
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from attnpo.components import ABSENT, Reader, as_values, at_their_origin, did_you_mean, join, required, resolve
from attnpo.components import MISSING as MISSING
from attnpo.config_help import Arguments
from attnpo.console import guarded, is_user_error, reporting, stoppable, user_error, world_size
from attnpo.files import Json

SomeRoot = TypeVar("SomeRoot", bound="Root")

CONFIG_DIR = Path(__file__).resolve().parents[1] / "configs"
RUNS_ROOT = Path("outputs")

_log = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------- paths


def cache_root() -> Path:
    """Folder of everything that can be computed again: ``$ATTNPO_CACHE``, else ``~/.cache/attnpo``."""
    return Path(os.environ.get("ATTNPO_CACHE") or Path.home() / ".cache" / "attnpo").expanduser()


def _register_resolvers() -> None:
    OmegaConf.register_new_resolver("cache_root", lambda: str(cache_root()), replace=True)
    OmegaConf.register_new_resolver("runs_root", lambda: str(RUNS_ROOT), replace=True)


def _folders(config_dir: Path | None) -> list[Path]:
    if config_dir is not None and not config_dir.is_dir():
        raise user_error(f"--config-dir {config_dir}: expected a folder of YAML files, there is none")
    folders = [folder.resolve() for folder in (CONFIG_DIR, config_dir) if folder is not None and folder.is_dir()]
    if not folders:
        raise user_error(
            f"no configurations at {CONFIG_DIR}: they are not part of a wheel; install attnpo from its checkout with "
            "`pip install -e .`, or name a folder with --config-dir DIR"
        )
    return folders


def groups(config_dir: Path | None = None) -> dict[str, list[str]]:
    """Sorted option names of every config group, from the shipped folder and ``config_dir``.

    A file whose name begins with ``_`` is what options of its group have in common, not an option.
    """
    found: dict[str, set[str]] = {}
    for folder in _folders(config_dir):
        for file in folder.rglob("*.yaml"):
            if file.parent != folder and not file.stem.startswith("_"):
                found.setdefault(file.parent.relative_to(folder).as_posix(), set()).add(file.stem)
    return {group: sorted(options) for group, options in sorted(found.items())}


# --------------------------------------------------------------------------------------------- composition


@contextmanager
def _initialized(config_dir: Path | None) -> Iterator[list[str]]:
    first, *others = _folders(config_dir)
    quoted = ["'file://" + str(folder).replace("'", "\\'") + "'" for folder in others]
    with hydra.initialize_config_dir(config_dir=str(first), version_base="1.3"):
        yield [f"hydra.searchpath=[{','.join(quoted)}]"] if quoted else []


def compose(name: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> DictConfig:
    """The configuration ``name`` with ``overrides`` applied, in struct mode, interpolations not yet resolved.

    ``config_dir`` is searched after the shipped folder. A configuration with a key ``composed`` gets ``overrides`` and
    ``config_dir`` put there, so that a study can compose its points from them. Raises UserError with Hydra's own text
    (key, options of the group, search path) and the nearest existing key.
    """
    _register_resolvers()
    with _initialized(config_dir) as searchpath:
        known = groups(config_dir)
        _refuse_moved(overrides, known)
        try:
            cfg = hydra.compose(name, [*searchpath, *overrides], return_hydra_config=True)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            text = _hydra_text(error) if isinstance(error, HydraException) else f"{error} (in {' '.join(overrides)})"
            text = _nearest_option(text, overrides, known)
            raise user_error(text + _nearest_key(text, name, [*searchpath, *overrides], list(known))) from error
    # Hydra passes over a missing option in silence where the defaults list says `optional`.
    for key, choice in cfg.hydra.runtime.choices.items():
        group, _, option = f"{key.partition('@')[0]}/{choice}".rpartition("/")
        if isinstance(choice, str) and group in known and option.removesuffix(".yaml") not in known[group]:
            close = did_you_mean(option, known[group], f"{group}=")
            listed = ", ".join(known[group])
            raise user_error(f"Could not find '{group}/{option}'{close}\nAvailable options in '{group}': {listed}")
    choices = {str(key): choice for key, choice in cfg.hydra.runtime.choices.items() if isinstance(choice, str)}
    with open_dict(cfg):
        del cfg["hydra"]
        if "composed" in cfg:
            literal = [override.replace("${", "\\${") for override in overrides]  # to be read, not resolved
            folder = None if config_dir is None else str(config_dir)
            cfg.composed = {"overrides": literal, "config_dir": folder, "choices": choices}
    return cfg


def _refuse_moved(overrides: Sequence[str], known: dict[str, list[str]]) -> None:
    """Raises UserError for a choice of a group that there was once, naming the words to type now."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key == "study":
            name = "none" if value in ("", "null") else value
            file = f", with your file as experiment/{name}.yaml, first line `# @package study`"
            raise user_error(
                f"{override}: the group is called experiment now; give experiment={name}"
                f"{'' if name in known.get('experiment', []) else file}"
            )
        if key.partition("@")[0] == "methods":
            raise user_error(
                f"{override}: the methods' grids stand in the settings now; give setting={value}, or single "
                "grids such as grids.simpo.beta=[2.0]"
            )


def _hydra_text(error: Exception) -> str:
    lines = [str(error)]
    if isinstance(error.__cause__, OmegaConfBaseException):
        lines.append(str(error.__cause__).partition("\n")[0])
    text = re.sub(r"\nSee https\S+ for details|\n\t_\w+(?=\n)", "", "\n".join(lines))
    text = text.replace(":\n\t", ": ").replace("\n\t", ", ")
    return re.sub(r"\n\s*\n", "\n", text)


def _nearest_option(text: str, overrides: Sequence[str], known: dict[str, list[str]]) -> str:
    """``text`` with the option nearest to one that was not found, and null explained where an option is needed."""
    missing = re.search(r"Could not find '(.+)/([^/']+)'", text)
    if missing is not None and missing[1] in known:
        return text.replace(missing[0], missing[0] + did_you_mean(missing[2], known[missing[1]], f"{missing[1]}="), 1)
    for group, value in (override.split("=", 1) for override in overrides if "=" in override):
        if value == "null" and group in known and "Config group override" in text:
            listed = ", ".join(known[group])
            return f"{group}=null: a group takes one of its options ({listed}); ~{group} leaves it out"
    return text


def _nearest_key(text: str, name: str, overrides: list[str], group_names: list[str]) -> str:
    refused = re.search(r"Could not override '([^']+)'", text)
    if refused is None:
        return ""
    key = refused[1]
    rest = [override for override in overrides if override.lstrip("+~").partition("=")[0] != key]
    try:
        node: Any = hydra.compose(name, rest)
    except (HydraException, OmegaConfBaseException):
        return ""
    parents = key.split(".")[:-1]
    path = ""
    for part in parents:
        if not isinstance(node, DictConfig) or part not in node:
            break
        node, path = node[part], join(path, part)
    if not isinstance(node, DictConfig):
        return f"\n`{path}` is a value, it has no keys"
    names = [str(key) for key in node if key != "_target_"] + ([] if path else group_names)
    wrong = key[len(path) :].lstrip(".").partition(".")[0]
    prefix = f"{path}." if path else ""
    return f"\n`{path or name}` has: {', '.join(sorted(set(names)))}{did_you_mean(wrong, names, prefix)}"


def expand(overrides: Sequence[str], config_dir: Path | None = None) -> list[list[str]]:
    """One list of overrides per job of a grid: ``a=1,2 b=3,4`` are four jobs; the last key varies fastest.

    Hydra's sweep syntax holds (``range``, ``choice``, ``glob``). Raises UserError for what cannot be parsed.
    """
    with _initialized(config_dir):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        try:
            return BasicSweeper.split_arguments(parser.parse_overrides(list(overrides)), None)[0]
        except HydraException as error:
            raise user_error(_hydra_text(error)) from error


# --------------------------------------------------------------------------------------------- components


def _report(problems: list[str]) -> None:
    if len(problems) == 1:
        raise user_error(problems[0])
    if problems:
        raise user_error(f"{len(problems)} problems in the configuration:\n  " + "\n  ".join(problems))


@dataclass(frozen=True)
class Composition:
    """What a configuration was composed of: overrides, the user's own folder, the option chosen of every group."""

    overrides: tuple[str, ...] = ()
    config_dir: Path | None = None
    choices: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Root:
    """The typed root of a configuration, which every room takes its components from.

    ``values`` are the plain values it was read from, for saving it and for telling runs apart alone.
    """

    composed: Composition = field(default_factory=Composition, metadata={"moves_numbers": False})
    values: dict[str, Json] = field(default_factory=dict, init=False, repr=False, compare=False)

    def with_value(self: SomeRoot, key: str, value: Json | tuple[Json, ...]) -> SomeRoot:
        """The same with another value at the dotted ``key``, in its component and in ``values``."""
        names = key.split(".")
        made: SomeRoot = _changed(self, names, value)
        plain_value = list(value) if isinstance(value, tuple) else value
        object.__setattr__(made, "values", _changed(self.values, names, plain_value))
        return made

    def with_component(self: SomeRoot, key: str, component: object) -> SomeRoot:
        """The same with another component at the key ``key`` of the root."""
        made: SomeRoot = _changed(self, [key], component)
        object.__setattr__(made, "values", {**self.values, key: as_values(component)})
        return made

    def below(self, key: str) -> dict[str, Json]:
        """The plain values of the node ``key``."""
        node = self.values[key]
        return dict(node) if isinstance(node, dict) else {}


def _changed(node: Any, names: Sequence[str], value: object) -> Any:
    """A copy of a dataclass or mapping with another value at the end of ``names``."""
    if not names:
        return value
    if isinstance(node, Mapping):
        return {**node, names[0]: _changed(node.get(names[0], {}), names[1:], value)}
    return replace(node, **{names[0]: _changed(getattr(node, names[0]), names[1:], value)})


def check(cfg: DictConfig, *, complete: bool = True) -> None:
    """Raises one UserError with all problems of ``cfg``, each under the key the user types.

    Walks the whole tree: keys, types and the components' own rules (``__post_init__``). ``complete=False`` lets values
    that are still ``???`` pass.
    """
    _report(_read(cfg, complete)[1])


def load(name: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> Any:
    """The typed root of the configuration ``name`` with ``overrides`` applied: ``typed(compose(...), ITS_CLASS)``."""
    return typed(compose(name, overrides, config_dir), Root)


def typed(cfg: DictConfig, kind: type[SomeRoot]) -> SomeRoot:
    """``cfg`` as its typed root of the class ``kind``, built once for all rooms.

    Texts that are still ``???`` stand for themselves; any other such value, and whatever ``check`` reports, is a
    UserError.
    """
    root, problems, reader = _read(cfg, complete=False)
    _report(problems or [required(path) for path in reader.missing if root is ABSENT])
    return _of_kind(root, kind)


def _of_kind(root: object, kind: type[SomeRoot]) -> SomeRoot:
    if not isinstance(root, kind):
        raise user_error(
            f"configuration: expected a {kind.__name__} as _target_ of its root, got {type(root).__name__}"
        )
    return root


def _read(cfg: DictConfig, complete: bool) -> tuple[object, list[str], Reader]:
    """The typed root of a configuration (ABSENT where it cannot be built), its problems, and what read it."""
    _register_resolvers()
    reader = Reader(complete=complete)
    origins: dict[str, str] = {}
    values = cast(dict[str, Json], resolve(cfg, "", reader.problems, origins))
    root = reader.read(values, Any, "")
    if isinstance(root, Root):
        object.__setattr__(root, "values", values)
    return root, at_their_origin(reader.problems, origins), reader


def idle_overrides(cfg: DictConfig) -> dict[str, str]:
    """The overrides a configuration was composed with that have no effect in it, each with the reason.

    What reads a key is known to the components: see ``unread`` in ``attnpo.components``.
    """
    return _idle(cfg.get("composed", {}).get("overrides", []), _read(cfg, complete=False)[2].unread)


def _idle(overrides: Iterable[str], unread: Mapping[str, str]) -> dict[str, str]:
    idle = {}
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        reason = next((why for path, why in unread.items() if key == path or key.startswith(f"{path}.")), None)
        if reason is not None:
            idle[override] = reason
    return idle


def build(node: object) -> Any:
    """The component of one ``_target_`` node of a composed configuration, nested components included.

    Raises UserError like ``check``.
    """
    _register_resolvers()
    reader = Reader()
    path = str(node._get_full_key(None)) if isinstance(node, DictConfig) else ""
    value = resolve(node, path, reader.problems)
    if not isinstance(value, dict) or "_target_" not in value:
        raise user_error(f"{path or 'configuration'}: expected a component (a node with _target_), got {value!r}")
    built = reader.component(value, Any, path)
    _report(reader.problems)
    return built


def plain(cfg: DictConfig) -> dict[str, Json]:
    """``cfg`` as resolved dicts and lists, ``???`` kept. Raises UserError for interpolations that lead nowhere."""
    _register_resolvers()
    problems: list[str] = []
    values = cast(dict[str, Json], resolve(cfg, "", problems))
    _report(problems)
    return values


def as_yaml(values: Mapping[str, Json]) -> str:
    """Plain values as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(values)))


# --------------------------------------------------------------------------------------------- command line


def _shown(cfg: DictConfig, key: str) -> str:
    node: Any = OmegaConf.create(plain(cfg))
    if key != "job":
        node = OmegaConf.select(node, key, default=ABSENT)
    if node is ABSENT:
        names = ", ".join(str(name) for name in cfg if name != "_target_")
        raise user_error(f"--cfg {key}: expected `job` or a key of the configuration: {names}")
    return OmegaConf.to_yaml(node) if OmegaConf.is_config(node) else f"{node}\n"


def run_entry(
    main: Callable[[SomeRoot], int | None],
    config_name: str,
    argv: Sequence[str] | None,
    description: str,
    examples: str,
    *,
    positional: str | None = None,
    complete: Callable[[SomeRoot], bool] = lambda cfg: False,
) -> int:
    """Exit status of an entry point: 0, 1 (a job failed), 2 (an error the user can mend), 130 (Ctrl-C), 143 (SIGTERM).

    Composes ``config_name`` with the overrides in ``argv`` (None: the process's own), reads it as its typed root and
    calls ``main`` with that. ``positional`` names a key that takes the arguments which are no overrides, as a list.
    ``complete`` says whether nothing may be ``???`` any more before ``main`` (by default main may still fill in texts).
    An exception with an ``exit_status`` ends the command with it; errors of other kinds propagate with their traceback.
    """
    parser = Arguments(config_name, description, examples, positional)

    def command() -> int:
        try:
            return _run(main, config_name, sys.argv[1:] if argv is None else list(argv), parser, positional, complete)
        except MissingMandatoryValue as error:
            raise user_error(f"{str(error).splitlines()[0]}; give KEY=VALUE") from error

    with reporting(), stoppable():
        return guarded(command)


def _run(
    main: Callable[[SomeRoot], int | None],
    name: str,
    argv: list[str],
    parser: Arguments,
    positional: str | None,
    complete: Callable[[SomeRoot], bool],
) -> int:
    options = parser.parse_intermixed_args(argv)
    if options.help:
        sys.stdout.write(parser.text(CONFIG_DIR / f"{name}.yaml", groups(options.config_dir)))
        return 0
    # Not Path.exists, which raises for an override that is longer than a name can be.
    bare = [word for word in options.words if not word.startswith("~") and ("=" not in word or os.path.exists(word))]
    overrides = [word for word in options.words if word not in bare]
    if bare and positional is None:
        raise user_error(f"{bare[0]!r}: expected GROUP=OPTION or KEY=VALUE; see --help")

    def ready(job: Sequence[str]) -> DictConfig:
        cfg = compose(name, job, options.config_dir)
        if bare:
            OmegaConf.update(cfg, str(positional), bare)
        return cfg

    if options.cfg:
        sys.stdout.write(_shown(ready(overrides), options.cfg))
        return 0
    if options.multirun and world_size() > 1:
        raise user_error(
            f"--multirun: its jobs run one after the other in one process, WORLD_SIZE is {world_size()}; "
            "start one group of processes per job without -m"
        )
    jobs = expand(overrides, options.config_dir) if options.multirun else [overrides]
    roots: list[tuple[SomeRoot, dict[str, str]]] = [_whole(ready(job), complete) for job in jobs]
    _note_idle([_idle(root.composed.overrides, unread) for root, unread in roots])
    if not options.multirun:
        return main(roots[0][0]) or 0
    return _each(main, [(" ".join(job), root) for job, (root, _) in zip(jobs, roots, strict=True)])


def _whole(cfg: DictConfig, complete: Callable[[SomeRoot], bool]) -> tuple[SomeRoot, dict[str, str]]:
    """The typed root of a job and its keys without effect; UserError also for values that ``complete`` asks for."""
    root, problems, reader = _read(cfg, complete=False)
    if not problems and reader.missing and (root is ABSENT or complete(cast(SomeRoot, root))):
        problems = [required(path) for path in reader.missing]
    _report(problems)
    return cast(SomeRoot, _of_kind(root, Root)), reader.unread  # the entry point's own class, as its _target_ says


def _is_path(word: str) -> bool:
    """Whether ``word`` is a file or folder; an override may be longer than a name can be."""
    try:
        return Path(word).exists()
    except OSError:
        return False


def _note_idle(jobs: Sequence[Mapping[str, str]]) -> None:
    """Warns once of every key given on the command line that has an effect in none of the jobs."""
    idle = [{override.partition("=")[0]: why for override, why in job.items()} for job in jobs]
    for key, why in idle[0].items():
        if all(key in other for other in idle):
            _log.warning("warning: %s has no effect: %s", key, why)


def _each(main: Callable[[SomeRoot], int | None], jobs: Sequence[tuple[str, SomeRoot]]) -> int:
    failed = []
    for number, (job, cfg) in enumerate(jobs, start=1):
        _log.info("job %d of %d: %s", number, len(jobs), job)
        try:
            status = main(cfg) or 0
        except Exception as error:
            if hasattr(error, "exit_status"):  # not a failure of this job: the whole command is to end
                raise
            status = 1  # one job's failure is reported, the others still run
            if is_user_error(error):
                _log.error("error: %s", error)
            else:
                _log.exception("job %d failed", number)
        if status:
            failed.append(job)
    if failed:
        sys.stderr.write(f"error: {len(failed)} of {len(jobs)} jobs failed:\n  " + "\n  ".join(failed) + "\n")
    return 1 if failed else 0
