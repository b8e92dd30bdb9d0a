"""Who may import whom: DESIGN section 2, read off the syntax trees."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "attnpo"

ENTRY_POINTS = {"fit", "weigh", "generate", "pair", "evaluate", "show", "report"}
REDIRECTS = {"theory", "verify"}  # one line each, until 0.2.0
# From the ground up: a room imports those before it. The last two are wings, for who compares runs or grades models.
FLOORS = (
    *("system", "config", "cli", "schema", "objectives", "text", "models", "losses", "judge", "weights", "data"),
    *("training", "display", "weigher", "run", "evaluation", "lab"),
)
WINGS = ("evaluation", "lab")
# What the modules of a room may import; a room may always import itself.
MAY_IMPORT: dict[str, set[str]] = {
    **{room: set(FLOORS[:place]) for place, room in enumerate(FLOORS)},
    **{name: set(FLOORS) for name in ("__init__", "__main__", *ENTRY_POINTS)},
    **{name: set() for name in REDIRECTS},
}
# Packages that take seconds: never at the top of what runs before a configuration is known to be sound.
HEAVY = {"torch", "lightning", "transformers", "datasets", "matplotlib"}
LIGHT = ("system", "config", "cli", "__init__", "__main__", *ENTRY_POINTS, *REDIRECTS)
HEAVY_FILES = ("system/store.py",)


def imported_names(path: Path, package: Path) -> Iterator[tuple[str, int, bool]]:
    """Absolute dotted names a file imports, the line, and whether the import waits in a function or is for types alone.

    ``from a import b`` gives ``a.b``, so that ``from attnpo import fit`` is seen.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy: set[ast.AST] = set()
    for node in ast.walk(tree):
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            lazy.update(ast.walk(node))
    folder = path.relative_to(package.parent).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, node in lazy
        elif isinstance(node, ast.ImportFrom):
            base = [] if not node.level else list(folder[: len(folder) - node.level + 1])
            base += [node.module] if node.module else []
            for alias in node.names:
                yield ".".join([*base, alias.name]), node.lineno, node in lazy


def room_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return parts[0]


# The Python API's `train` and `run_study` are the command.
TAKEN_THROUGH = {"lab/api.py": {"fit"}}


def violations(package: Path) -> list[str]:
    """Every broken rule in ``package``, as ``file:line: what``."""
    found = []
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package)
        room = room_of(path, package)
        if room not in MAY_IMPORT:
            found.append(f"{where}: room {room} is not in DESIGN section 2")
            continue
        for name in where.with_suffix("").parts:
            if name in sys.stdlib_module_names - {"__init__"}:
                found.append(f"{where}: named like the standard library's {name}")
        for dotted, line, lazy in imported_names(path, package):
            problem = broken_rule(where.as_posix(), room, dotted, lazy, package.name)
            if problem:
                found.append(f"{where}:{line}: {problem}")
    return found


def broken_rule(where: str, room: str, dotted: str, lazy: bool, package: str) -> str:
    top, *rest = dotted.split(".")
    if top == package:
        target = rest[0] if rest else "__init__"
        if target in TAKEN_THROUGH.get(where, ()) and lazy:
            return ""
        if target in ENTRY_POINTS:
            return f"imports the entry point {target}"
        if target == room or target in MAY_IMPORT[room]:
            return ""
        return f"{room} may not import {target}"
    if top == "experiments":
        return "imports experiments/"
    if top == "hydra" and room not in ("config", *ENTRY_POINTS):
        return "only config/ and the entry points import hydra"
    if top == "Levenshtein" and where != "text/alignment.py":
        return "only text/alignment.py imports Levenshtein"
    if top == "wandb" and not lazy:
        return "wandb is imported inside functions only"
    if top == "pytorch_lightning":
        return "the package is lightning, not pytorch_lightning"
    if top in HEAVY and room in LIGHT and where not in HEAVY_FILES and not lazy:
        return f"{top} at the top of {where}, which has to start fast"
    return ""


def test_the_map_names_every_room_and_files_that_are_there() -> None:
    """docs/how_it_fits.md."""
    text = (PACKAGE.parent / "docs/how_it_fits.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", text))
    named -= {"attnpo/", "tests/test_layering.py"}
    rooms = {
        f"{path.name}/" if path.is_dir() else path.name for path in PACKAGE.glob("[a-z]*") if path.name != "py.typed"
    }
    places = [PACKAGE.parent if name.startswith("attnpo/") else PACKAGE for name in sorted(named)]
    assert [name for name, place in zip(sorted(named), places, strict=True) if not (place / name).exists()] == []
    assert rooms - named == set()
    way = [line for line in text.splitlines() if re.match(r"\d\. ", line)]
    assert len(way) == 8 and all(".py`" in line for line in way)


def circles(package: Path) -> list[list[str]]:
    """Files of ``package`` that import each other in a circle, imports in functions and for types counted."""
    files = sorted(package.rglob("*.py"))
    of = {".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in files}
    of |= {name.removesuffix(".__init__"): path for name, path in of.items() if name.endswith(".__init__")}
    reached: dict[Path, set[Path]] = {}
    for path in files:
        names = [dotted for dotted, _, _ in imported_names(path, package)]
        modules = (name if name in of else name.rpartition(".")[0] for name in names)
        reached[path] = {of[name] for name in modules if name in of} - {path}
    for middle in files:  # Warshall's transitive closure
        for path in files:
            if middle in reached[path]:
                reached[path] |= reached[middle]
    rings = {tuple(other for other in files if other in reached[path] and path in reached[other]) for path in files}
    return [[path.relative_to(package).as_posix() for path in ring] for ring in sorted(rings) if ring]


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(PACKAGE) == []


def test_a_circle_is_seen_through_functions_types_and_packages(tmp_path: Path) -> None:
    package = tmp_path / "attnpo"
    for name, text in {
        "__init__.py": "",
        "runs/__init__.py": "",
        "runs/a.py": "from attnpo.runs.b import B\n",
        "runs/b.py": "def f():\n    from attnpo.runs import c\n",
        "runs/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import A\n",
        "runs/d.py": "import attnpo.runs.a\n",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    assert circles(package) == [["runs/a.py", "runs/b.py", "runs/c.py"]]


def test_nothing_of_the_method_imports_a_wing() -> None:
    for path in (path for room in FLOORS[: -len(WINGS)] for path in (PACKAGE / room).rglob("*.py")):
        taken = {name.split(".")[1] for name, _, _ in imported_names(path, PACKAGE) if name.startswith("attnpo.")}
        assert not taken & set(WINGS), path


def test_the_package_keeps_to_the_design() -> None:
    assert len(list(PACKAGE.rglob("*.py"))) > 20
    assert violations(PACKAGE) == []


# ------------------------------------------------------------------------------------------------ the door

# The configuration is typed once and unpacked in the bodies that commands call; what lies below takes its components.
OF_RUNS, OF_OTHERS = 30, 7


def whole_configurations(package: Path) -> dict[str, set[str]]:
    """Names of classes and type variables that are, or hold, a whole configuration, by the root they come from."""
    made: list[tuple[set[str], set[str]]] = []  # a name, and the words that it is made of
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                fields = [item.annotation for item in node.body if isinstance(item, ast.AnnAssign)]
                made.append(({node.name}, {word for part in (*node.bases, *fields) for word in words_in(part)}))
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                words = words_in(node.value)
                made += [(words_in(node.targets[0]), words)] if "TypeVar" in words else []
    found = {"RunConfig": {"RunConfig"}, "Root": {"Root"}}
    for names in found.values():
        for _ in range(5):  # no chain is longer
            for name, words in made:
                names |= name if words & names else set()
    return found


def words_in(node: ast.AST) -> set[str]:
    return set(re.findall(r"\w+", ast.unparse(node)))


def takers(package: Path, names: set[str]) -> list[str]:
    """Functions with a parameter that is annotated with one of ``names``; composition and its checks are no such."""
    found = []
    for path in sorted(package.rglob("*.py")):
        if room_of(path, package) in ("config", "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if any(one.annotation is not None and words_in(one.annotation) & names for one in given):
                    found.append(f"{path.relative_to(package).as_posix()}: {node.name}")
    return found


def test_the_configuration_ends_at_the_door() -> None:
    whole = whole_configurations(PACKAGE)
    assert {"FitConfig", "ShowConfig", "ReportConfig", "ResolvedRun"} <= whole["RunConfig"]
    of_runs = takers(PACKAGE, whole["RunConfig"])
    of_others = set(takers(PACKAGE, whole["Root"] - whole["RunConfig"])).difference(of_runs)
    assert len(of_runs) <= OF_RUNS, of_runs
    assert len(of_others) <= OF_OTHERS, of_others


def test_a_configuration_is_seen_under_other_names(tmp_path: Path) -> None:
    package = tmp_path / "attnpo"
    texts = {
        "config/compose.py": "class Root: ...\ndef read(kind: type[Root]) -> Root: ...\n",
        "run/a.py": "class RunConfig(Root): ...\nclass Context:\n    cfg: 'RunConfig | None'\n",
        "run/b.py": "C = TypeVar('C', bound=RunConfig)\nclass Own(Context): ...\n"
        "def f(c: C) -> int: ...\ndef g(*, own: list[Own]) -> int: ...\ndef h(seed: int) -> RunConfig: ...\n",
    }
    for name, text in texts.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    assert takers(package, whole_configurations(package)["RunConfig"]) == ["run/b.py: f", "run/b.py: g"]


PLANTED = {
    "objectives/dpo.py": ("import torch\nfrom attnpo.models import logps\n", "objectives/dpo.py:2: objectives may not"),
    "weights/base.py": ("from ..data.base import PairSet\n", "weights/base.py:1: weights may not import data"),
    "text/chat.py": ("def f():\n    import attnpo.data.base\n", "text/chat.py:2: text may not import data"),
    "models/logps.py": ("from attnpo import fit\n", "models/logps.py:1: imports the entry point fit"),
    "data/base.py": ("from hydra import compose\n", "data/base.py:1: only config/ and the entry points import hydra"),
    "system/store.py": ("import Levenshtein as lev\n", "system/store.py:1: only text/alignment.py imports Lev"),
    "training/callbacks.py": ("import wandb\n", "training/callbacks.py:1: wandb is imported inside functions"),
    "training/module.py": ("import pytorch_lightning.loggers\n", "training/module.py:1: the package is lightning"),
    "lab/statistics.py": ("", "lab/statistics.py: named like the standard library's statistics"),
    "extra/thing.py": ("", "extra/thing.py: room extra is not in DESIGN section 2"),
    "fit.py": ("import transformers\n", "fit.py:1: transformers at the top of fit.py"),
    "display/__init__.py": ("import experiments.paper\n", "display/__init__.py:1: imports experiments/"),
}


def test_every_kind_of_violation_is_caught(tmp_path: Path) -> None:
    package = tmp_path / "attnpo"
    for name, (text, _) in PLANTED.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    found = violations(package)
    assert len(found) == len(PLANTED)
    for name, (_, expected) in PLANTED.items():
        assert any(line.startswith(expected) for line in found), (name, found)


def test_what_the_design_allows_passes(tmp_path: Path) -> None:
    allowed = {
        "fit.py": "import hydra\ndef main():\n    import lightning, wandb\n    from attnpo.lab.studies import runner\n",
        "text/alignment.py": "import Levenshtein\nfrom attnpo.schema import TokenWeights\n",
        "weights/sources/attention.py": "from ..base import WeightSource\nfrom ...text import chat\n",
        "training/module.py": "import lightning\nfrom attnpo.objectives import base\nfrom attnpo.data import collate\n",
    }
    package = tmp_path / "attnpo"
    for name, text in allowed.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    assert violations(package) == []
