"""Which code and which files tell a study's points apart: all that can run one, and nothing that only shows results."""

import re
import shutil
from pathlib import Path

import pytest

from attnpo.config.compose import CONFIG_DIR, load
from attnpo.lab.studies.arms import point_folder
from attnpo.lab.studies.plan import plan_study
from attnpo.lab.studies.shared_inputs import prepare_shared_inputs
from attnpo.lab.studies.study import Arm, Point
from attnpo.run.identity import flatten_with_classes, make_identity
from attnpo.system import source_digest as sources
from attnpo.system.files import file_digest
from attnpo.system.source_digest import SHOWING, source_digest
from tests.run.worlds import build_world
from tests.test_layering import imported_names

PACKAGE = Path(sources.__file__).resolve().parents[1]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's sources."""
    return shutil.copytree(PACKAGE, tmp_path / "attnpo", ignore=shutil.ignore_patterns("__pycache__"))


def fresh(root: Path) -> str:
    source_digest.cache_clear()
    return source_digest(root=root)


def shows(name: str) -> bool:
    return any(name == one or name.startswith(f"{one}/") for one in SHOWING)


def test_every_module_that_can_run_a_point_counts_and_no_other(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the files whose contents are digested."""
    read: list[Path] = []

    def note(path: Path) -> str:
        read.append(path)
        return file_digest(path)

    monkeypatch.setattr(sources, "file_digest", note)
    fresh(package)
    names = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    counted = {path.relative_to(package).as_posix() for path in read}
    assert len(names) > 150 and names - counted == {name for name in names if shows(name)}
    runs_a_point = {
        *("run/run.py", "run/training.py", "run/inputs.py", "run/models.py", "judge/judge.py", "data/weighing.py"),
        *("lab/auto_layer.py", "weights/faithfulness.py", "training/module.py", "weights/sources/attention.py"),
        *("lab/testbed/scoring.py", "config/compose.py", "schema.py"),
    }
    assert runs_a_point <= counted


def test_what_only_shows_results_is_named_once_and_is_there(package: Path) -> None:
    """A file renamed, or named beside its room, would be a line that means nothing."""
    assert [name for name in SHOWING if not (package / name).exists()] == []
    assert len(set(SHOWING)) == len(SHOWING)
    assert [name for name in SHOWING if any(name.startswith(f"{room}/") for room in SHOWING)] == []


def test_what_counts_asks_what_shows_results_for_pages_alone() -> None:
    """A number that came from there would change unseen: think, and take the module off the list, or add the line."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        for dotted, _, _ in imported_names(path, PACKAGE):
            parts = dotted.split(".")[1:] if dotted.startswith("attnpo.") and not shows(name) else []
            asked = {"/".join(parts[:end]) + ".py" for end in range(1, len(parts) + 1)}
            found |= {(name, other) for other in asked if shows(other) and (PACKAGE / other).is_file()}
    assert found == {
        ("lab/api.py", "fit.py"),  # the command, called from Python
        ("lab/api.py", "lab/results.py"),  # what it gave, read back
        ("run/for_page.py", "display/weighted_pair.py"),
        ("run/inputs.py", "display/weighted_pair.py"),
        ("run/report.py", "display/column_notes.py"),
        ("run/report.py", "display/figures.py"),
        ("run/report.py", "display/heatmap.py"),
        ("run/report.py", "display/page.py"),
        ("run/report.py", "display/tables.py"),
        ("lab/testbed/scoring.py", "evaluation/intervals.py"),  # says how small an effect a study detects
        ("lab/studies/plan.py", "lab/studies/benchmark_settings.py"),  # refuses what could not be measured
        ("lab/studies/runner.py", "lab/studies/benchmark_settings.py"),  # the same, once the base is there
        ("lab/studies/runner.py", "lab/studies/benchmarks.py"),  # measures what the points have left
        ("lab/studies/runner.py", "lab/studies/predictions.py"),  # keeps what was predicted, before any point runs
        ("lab/studies/config.py", "run/show_config.py"),  # keys of another command
        ("lab/studies/runner.py", "lab/studies/outcome.py"),  # gathers what the points came to
        ("lab/studies/study.py", "display/page.py"),
        ("lab/studies/shared_inputs.py", "lab/studies/outcome.py"),  # counts what weights ask of models
        ("lab/studies/scorers.py", "lab/studies/outcome.py"),  # the same of scorers
    }


def test_files_that_come_go_or_move_count_whatever_their_room(package: Path) -> None:
    found = [fresh(package)]
    (package / "rewards").mkdir()
    for name in ("rewards/new.py", "lab/new.py"):
        (package / name).write_text("one = 1\n", encoding="utf-8")
        found.append(fresh(package))
    (package / "lab/new.py").rename(package / "training/new.py")
    found.append(fresh(package))
    (package / "system/hub_access.py").unlink()
    found.append(fresh(package))
    assert len(set(found)) == len(found)


def test_changed_code_of_the_reference_is_another_basis_for_the_points(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a study lays it: its points lie in folders named by these facts."""
    cfg = build_world(tmp_path).config("experiment=quickstart")
    plan = plan_study(cfg)
    monkeypatch.setattr(sources, "PACKAGE", package)
    codes = []
    for name in (None, "report.py", "run/models.py"):
        if name is not None:
            with (package / name).open("a", encoding="utf-8") as file:
                file.write("# changed\n")
        source_digest.cache_clear()
        codes.append(prepare_shared_inputs(plan, 0).facts["code"])
    source_digest.cache_clear()
    assert codes[0] == codes[1] != codes[2]
    assert {"torch", "tokenizers", "numpy"} <= codes[0].keys()


# ------------------------------------------------------------------------------------------------ files of a config


def folder_of(*overrides: str) -> str:
    cfg = load("fit", ["setting=testbed", "experiment=none", *overrides])
    return point_folder(Path(), Point(Arm("arm", ()), (), 0), make_identity(cfg).result, {}).name


@pytest.mark.parametrize("key", ["judge.template_file", "model.chat_template", "model.fallback_template"])
def test_a_file_that_a_config_names_counts_by_what_it_holds_where_it_is_read(key: str, tmp_path: Path) -> None:
    file = tmp_path / "wording.txt"
    found, unread = [], set()
    for text in ("one {{ messages }}", "two {{ messages }}", "one {{ messages }}"):
        file.write_text(text, encoding="utf-8")
        found.append(folder_of("weights=attention", f"{key}={file}"))
        unread.add(folder_of("weights=uniform", f"judge.template_file={file}"))
    assert found[0] == found[2] != found[1] and len(unread) == 1


def test_a_file_that_happens_to_be_called_as_a_value_is_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a working directory with a file for every word of the configuration: columns, splits, formats, kernels."""
    monkeypatch.chdir(tmp_path)
    asked = ("weights=attention", "judge.template_file=judge/testbed.txt")
    before = folder_of(*asked)
    cfg = load("fit", ["setting=testbed", "experiment=none", *asked])
    numbers = make_identity(cfg).numbers
    words = {value for value in numbers.values() if isinstance(value, str) and "/" not in value}
    assert {"prompt", "validation", "constant", "sdpa"} <= words
    for word in words:
        (tmp_path / word).write_text("a file", encoding="utf-8")
    assert folder_of(*asked) == before


@pytest.mark.parametrize("change", ["code", "file"])
def test_a_component_from_elsewhere_counts_by_its_source_and_by_files_under_any_key(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's own digest does not see it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    places = {"code": tmp_path / f"my_{change}.py", "file": tmp_path / "table.json"}
    cfg = load("fit", ["setting=testbed", "experiment=none", "weights=uniform"])
    own = {"_target_": f"my_{change}.Mine", "words": str(places["file"])}
    cfg.values["transforms"] = {"mine": own}  # what is read alone; it is not built
    for place in places.values():
        place.write_text("class Mine: scale = 1\n", encoding="utf-8")
    found = []
    for number in (1, 2):
        places[change].write_text(f"class Mine: scale = {number}\n", encoding="utf-8")
        found.append(point_folder(Path(), Point(Arm("arm", ()), (), 0), make_identity(cfg).result, {}).name)
    assert found[0] != found[1]


def test_a_class_counts_by_its_name_which_no_other_component_of_its_group_has() -> None:
    """A class may move to another module: no point, analysis or registered study becomes another by that."""
    moved = {"weights": {"_target_": "attnpo.elsewhere.Attention", "layer": "attnpo.kept"}, "form_target_": "other.Own"}
    assert flatten_with_classes(moved) == {
        "weights._target_": "Attention",
        "weights.layer": "attnpo.kept",
        "form_target_": "other.Own",
    }
    groups: dict[str, set[str]] = {}
    for path in CONFIG_DIR.rglob("*.yaml"):
        group = path.relative_to(CONFIG_DIR).parts[0]
        found = re.findall(r"_target_: *(attnpo\.[\w.]+)", path.read_text(encoding="utf-8"))
        groups.setdefault(group, set()).update(found)
    for group, dotted in groups.items():
        assert len({name.rpartition(".")[2] for name in dotted}) == len(dotted), group
    assert sum(map(len, groups.values())) > 100
