"""Every notebook is committed with its outputs, and an execution on a small world gives the same kinds of them."""

import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pandas
import pytest
from nbformat import NotebookNode

from attnpo.config.compose import load
from attnpo.lab.testbed import prepare
from attnpo.lab.testbed.grammar import ReviewPrompt
from attnpo.lab.testbed.pairs import prompt_row, write_jsonl
from experiments.pages.notebooks import NOTEBOOKS, execute_notebooks, normalize_outputs
from tests.docs.test_links import LINK
from tests.run.worlds import GRAMMAR, World, build_world

NAMES = [
    "01_judge_attention",
    "02_layer_sweep",
    "03_weights_vs_truth",
    "04_frontier",
    "05_paper_tables",
    "06_theory",
    "07_your_own_weight_source",
    "08_plain_lightning",
]
LARGEST = 1 << 20  # bytes, pictures included
SCREEN = 40  # lines of a cell
# What tells of the machine or the moment: places in a file system, times of day, colours of a terminal.
TELLTALE = re.compile(
    r"(?<![\w.:/<])/(?:home|root|tmp|work|usr|Users|mnt|var|opt)/|\b\d\d:\d\d:\d\d\b|\x1b\[|0x[0-9a-f]{6}"
)
# The testbed as it is, with fewer of everything; the last words win over the notebooks' own.
SMALL = [
    "trainer.max_steps=2",
    "trainer.threads=1",
    "batch.pairs=4",
    "batch.micro=4",
    "truth.prompts=4",
    "truth.max_new_tokens=8",
    "callbacks=none",
    "data.train_rows=16",
    "data.val_rows=6",
    "auto_layer.pairs=2",
    f"prepare.grammar.min_clauses={GRAMMAR.min_clauses}",
    f"prepare.grammar.max_clauses={GRAMMAR.max_clauses}",
]


def cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Its cells with code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kind(out: NotebookNode) -> tuple[object, ...]:
    """What one output is: a stream, a table with its columns and the number of its rows, a picture, a text."""
    if out.output_type in ("stream", "error"):
        return out.output_type, out.get("name") or out.get("ename")
    tables = []
    if "dataframe" in (page := out.data.get("text/html", "")):
        tables = [(tuple(map(str, table.columns)), len(table)) for table in pandas.read_html(io.StringIO(page))]
    return (*sorted(out.data), *tables)


def kinds(notebook: NotebookNode) -> list[list[tuple[object, ...]]]:
    """The kinds of the outputs of every cell; warnings, which are a world's own, are not counted."""
    return [[kind(out) for out in cell.outputs if out.get("name") != "stderr"] for cell in cells(notebook)]


def read(path: Path) -> NotebookNode:
    notebook: NotebookNode = nbformat.read(path, as_version=4)
    return notebook


# ------------------------------------------------------------------------------------------------ as they are committed


def test_the_notebooks_are_these() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_can_be_read_with_its_outputs(path: Path) -> None:
    """On a code host: small, executed from top to bottom, with a table and a picture, and nothing of the machine."""
    assert path.stat().st_size <= LARGEST
    notebook = read(path)
    code = cells(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    found = [out for cell in code for out in cell.outputs]
    mime = {name for out in found for name in out.get("data", {})}
    assert mime - {"image/svg+xml"} == {"text/plain", "text/html", "image/png"}
    assert [out for out in found if out.output_type == "error"] == []
    for cell in notebook.cells:
        assert len(cell.source.splitlines()) <= SCREEN
        texts = [cell.source, *(out.get("text", "") for out in cell.get("outputs", []))]
        texts += [out.get("data", {}).get(name, "") for out in cell.get("outputs", []) for name in mime - {"image/png"}]
        assert [text for text in texts if TELLTALE.search(text)] == []
    assert notebook == normalize_outputs(read(path)), "run `make notebooks`"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_needs_the_api_alone(path: Path) -> None:
    """Imports of attnpo are the API; the classes of two others are named by the docs, which hold them."""
    source = "\n".join(cell.source for cell in cells(read(path)))
    inner = re.findall(r"^\s*(?:from|import) (attnpo\.\S+)", source, re.MULTILINE)
    page = (NOTEBOOKS[0].parents[1] / "docs" / "python_api.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^from (attnpo\.\S+)", page, re.MULTILINE))
    known |= {"attnpo.data.rules", "attnpo.training.optimizer"}  # of what that page names as further arguments
    allowed = {"07": {"attnpo.weights.sources.formula"}, "08": known}.get(path.stem[:2], set())
    assert set(inner) <= allowed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_links_resolve(path: Path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    assert [target for target in LINK.findall(text) if not (path.parent / target).exists()] == []


# ------------------------------------------------------------------------------------------------ executed


def small_testbed(store: Path, world: World) -> None:
    """Puts a random model and its pairs into ``store`` where the testbed of ``SMALL`` would be built in minutes."""
    testbed = load("fit", SMALL).prepare

    def base(folder: Path) -> dict[str, object]:
        shutil.copytree(world.model, folder, dirs_exist_ok=True)
        return {"gate_passed": True}

    def pairs(folder: Path) -> dict[str, object]:
        shutil.copy(world.data / "train.jsonl", folder / "train.jsonl")
        shutil.copy(world.data / "test.jsonl", folder / "validation.jsonl")
        prompts: list[ReviewPrompt] = GRAMMAR.prompts("test")
        write_jsonl(folder / "test_prompts.jsonl", map(prompt_row, prompts))
        return {}

    model = store / "prepared" / f"base-{testbed.base_key()}"
    prepare._ensure_built(model, "base", base)
    prepare._ensure_built(store / "prepared" / f"data-{testbed.data_key()}", "pairs", pairs, model)


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, NotebookNode]]:
    """Every notebook, executed anew on a small testbed."""
    folder, store = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("store")
    small_testbed(store, build_world(tmp_path_factory.mktemp("world"), train=24, layers=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNPO_OVERRIDES", " ".join(SMALL))
        patch.setenv("ATTNPO_CACHE", str(store))
        yield {
            path.stem: notebook for path, notebook in zip(NOTEBOOKS, execute_notebooks(NOTEBOOKS, folder), strict=True)
        }


def test_an_execution_gives_the_same_kinds_of_outputs(again: dict[str, NotebookNode]) -> None:
    """All in one test, since they share a kernel, which loads the libraries once."""
    for path in NOTEBOOKS:
        assert kinds(read(path)) == kinds(again[path.stem]), path.stem
