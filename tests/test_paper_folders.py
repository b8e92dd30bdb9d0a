"""Folders of the paper's tables: their commands are sound, their printed numbers are the paper's."""

import csv
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from attnpo.config.compose import load
from attnpo.lab.reports.folder_report import normalize_name
from attnpo.lab.studies.study import expand_arms

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "experiments" / "paper"
FOLDERS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
LAYERS = 32  # of the models of the paper's settings
BENCHMARKS = {"alpaca_eval", "mt_bench", "arena_hard"}
LINK = re.compile(r"\]\(\.\./(\w+)/README\.md")
COMMAND = re.compile(r"^python -m attnpo\.(\w+) (.+)$", re.MULTILINE)
HYPERPARAMETERS = [
    ("training", "learning_rate"),
    ("training", "beta"),
    ("training", "beta_search"),
    ("length_norm", "beta"),
]
TABLES = {
    "ablations",
    "attention_from_other_models",
    "beta_search",
    "hyperparameters",
    "layers",
    "main_results",
    "main_results_three_runs",
    "mistral_7b_base_sft",
    "response_length_arena_hard",
    "sink_share",
    "top_tokens",
    "weight_sources",
    "weight_statistics",
}
Row = dict[str, str]
OURS = (
    "setting",
    "arm",
    "benchmark",
)  # columns of printed.csv that say which rows of ours are meant; the others are the paper's
# Folders that print a part of a table: the file, and which rows.
PARTS: dict[str, tuple[str, Callable[[Row], bool]]] = {
    "layers": ("main_results.csv", lambda row: row["method"] in ("Base", "DPO", "AttentionPO")),
    "beta_search": ("hyperparameters.csv", lambda row: (row["group"], row["name"]) in HYPERPARAMETERS),
}


def text_of(name: str) -> str:
    return (FOLDER / name / "README.md").read_text(encoding="utf-8")


def commands(name: str) -> list[tuple[str, list[str]]]:
    """(entry point, words) of every command in a folder's README."""
    return [(entry, shlex.split(words)) for entry, words in COMMAND.findall(text_of(name))]


def with_linked(name: str) -> str:
    """A folder's README with those it points to."""
    text = text_of(name)
    return "\n".join([text, *(text_of(other) for other in dict.fromkeys(LINK.findall(text)))])


def rows_of(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_table_has_its_folder() -> None:
    assert set(FOLDERS) == TABLES
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in listed for name in FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_commands_follow_from_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the testbed and on a paper setting; what is evaluated and reported was made by a command above it.

    tests/docs composes them.
    """
    monkeypatch.chdir(ROOT)
    made, settings = set(), set()
    for entry, words in commands(name):
        overrides = [word for word in words if "=" in word]
        keys = dict(word.split("=", 1) for word in overrides)
        if entry == "evaluate":
            made |= evaluated(name, keys, made)
            continue
        if entry == "report":
            assert words[0] in ("weights", "study", "scores")
            folders = {word.removeprefix("outputs/") for word in words if word.startswith("outputs/")}
            assert folders <= made
            if "printed" in keys:
                assert keys["printed"] == f"experiments/paper/{name}/printed.csv"
                printed = rows_of(Path(keys["printed"]))
                if words[0] == "scores":  # whose rows stand beside ours, where there are several base models
                    models = {row["base_model"] for row in printed}
                    assert keys.get("label", "") in models if len(models) > 1 else "label" not in keys
                else:  # the name by which ours meets a printed row
                    assert "label" not in keys or keys["label"] in {row["model"] for row in printed}
                    assert ("label" in keys) == ("model" in printed[0] and keys["setting"] != "testbed")
        made.add(keys.get("name", ""))
        if "setting" in keys or entry == "fit":
            settings.add(keys.get("setting", "testbed"))
    assert not settings or ("testbed" in settings and len(settings) > 1)
    assert any(entry == "report" for entry, _ in commands(name)) or name == "hyperparameters"


def test_the_misprints_are_listed_by_a_command_on_files_that_are_there() -> None:
    found = re.findall(r"^python -m experiments\.check_tables (.+)$", text_of("main_results"), re.MULTILINE)
    assert [all((ROOT / word).is_file() for word in words.split()) for words in found] == [True]


def evaluated(name: str, keys: dict[str, str], made: set[str]) -> set[str]:
    """The folders an evaluation makes; it is of a model trained above or of one on the hub, under a name of its row."""
    assert keys["benchmark"] in BENCHMARKS
    trained = re.fullmatch(r"outputs/(.+)/best", keys["model.path"])
    assert trained is None or trained[1] in made
    methods = {row["method"] for row in rows_of(FOLDER / name / "printed.csv")}
    assert keys["label"] in methods or keys["label"] in with_linked(name)
    return {"eval-*"}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_columns_are_explained(name: str) -> None:
    """Scores of benchmarks are said to be collected, and not to have been."""
    text = text_of(name)
    columns = text.partition("## Columns")[2]
    names = list(rows_of(FOLDER / name / "printed.csv")[0])
    if "alpacaeval_lc" in names:
        assert "All four are collected by `attnpo.evaluate`" in columns
    elif name != "beta_search":
        assert all(f"`{column}`" in columns for column in names if column != "model")
    if any(entry == "evaluate" for entry, _ in commands(name)):
        assert "**No GPU run of them exists**" in columns


@pytest.mark.parametrize("name", FOLDERS)
def test_the_printed_numbers_are_the_papers(name: str, paper_tables: Path) -> None:
    file, keep = PARTS.get(name, (f"{name}.csv", lambda row: True))
    printed = rows_of(FOLDER / name / "printed.csv")
    wanted = [row for row in rows_of(paper_tables / file) if keep(row)]
    columns = [column for column in printed[0] if column not in OURS]
    assert len(columns) > 1
    assert [[row[name] for name in columns] for row in printed] == [[row[name] for name in columns] for row in wanted]


@pytest.mark.parametrize("name", [name for name in FOLDERS if "arm" in rows_of(FOLDER / name / "printed.csv")[0]])
def test_printed_rows_name_arms_of_the_studies_under_their_setting(name: str) -> None:
    """Every printed row meets a row of ours, since the studies trained above `report` have its arm in its setting."""
    rows = rows_of(FOLDER / name / "printed.csv")
    studies = [words for entry, words in commands(name) if entry == "fit" and f"setting={rows[-1]['setting']}" in words]
    for setting in {row["setting"] for row in rows}:
        arms = {"base"}
        for words in studies:
            cfg = load("fit", [f"setting={setting}" if word.startswith("setting=") else word for word in words])
            arms |= set() if cfg.study is None else {arm.name for arm in expand_arms(cfg.study, LAYERS)}
        assert {row["arm"] for row in rows if row["setting"] == setting} <= arms
    assert all(normalize_name(row["base_model"]) == normalize_name(row["setting"]) for row in rows)
    said = {method: arm for method, arm in re.findall(r"^\| (.+?) \| (.+) \|$", text_of(name), re.MULTILINE)}
    assert all(row["arm"] == "base" or said[row["method"]].startswith(row["arm"]) for row in rows)


@pytest.mark.parametrize("name", FOLDERS)
def test_methods_of_the_table_are_mapped_to_arms(name: str) -> None:
    methods = {row["method"] for row in rows_of(FOLDER / name / "printed.csv") if "method" in row}
    assert all(f"| {method} |" in with_linked(name) for method in methods)
