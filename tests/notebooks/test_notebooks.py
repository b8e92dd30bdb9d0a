"""Every notebook is stored without outputs and runs from top to bottom on a small world."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.runs.worlds import build_world

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPO_OVERRIDES", " ".join(build_world(tmp_path).overrides()))
    monkeypatch.setenv("ATTNPO_CACHE", str(tmp_path / "store"))
    monkeypatch.setenv("PYTHONPATH", str(path.resolve().parents[1]))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    kinds = [
        kind
        for cell in notebook.cells
        if cell.cell_type == "code"
        for out in cell.outputs
        for kind in out.get("data", {})
    ]
    assert "text/html" in kinds and "image/png" in kinds
