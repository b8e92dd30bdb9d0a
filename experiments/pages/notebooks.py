"""Executes the notebooks and writes them back with their outputs.

    python -m experiments.pages.notebooks                 all of them, as `make notebooks` does
    python -m experiments.pages.notebooks 06_theory ...   some of them

One kernel runs all notebooks in a temporary folder, clearing its state in between, so that libraries are loaded only
once. Outputs that differ between executions without meaning (times, counters, memory addresses) are removed.
ATTNPO_OVERRIDES selects another world than the testbed, ATTNPO_CACHE another store.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIMIT = 1800  # seconds per cell, on a busy machine
# Runs before each notebook: clears all names, and imports tqdm without its warning about missing widgets.
CLEAN = """%reset -f
import os, warnings
os.chdir({folder!r})
with warnings.catch_warnings(action="ignore"):
    import tqdm.auto"""
MEMORY = re.compile(r" at 0x[0-9a-f]+")
CLOCK = re.compile(r"^\d\d:\d\d:\d\d ", re.MULTILINE)  # at the start of log lines


def execute_notebooks(paths: Sequence[Path], folder: Path) -> Iterator[NotebookNode]:
    """Executes the notebooks in ``folder`` and yields each with its outputs, normalised by ``normalize_outputs``.

    Raises:
        CellExecutionError: a cell ended with an error.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    manager = KernelManager(kernel_name="python3")
    try:
        for path in paths:
            notebook = nbformat.read(path, as_version=4)
            notebook.cells.insert(0, nbformat.v4.new_code_cell(CLEAN.format(folder=str(folder))))
            client = NotebookClient(notebook, km=manager, timeout=LIMIT, record_timing=False)
            client.execute(cwd=str(folder))
            if client.kc is not None:
                client.kc.stop_channels()
            del notebook.cells[0]
            yield normalize_outputs(notebook)
    finally:
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)


def normalize_outputs(notebook: NotebookNode) -> NotebookNode:
    """Numbers the cells from 1, joins streams, and removes times and memory addresses; returns the notebook."""
    notebook.metadata.language_info = {"name": "python"}
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, 1):
        cell.execution_count, cell.metadata = number, {}
        cell.outputs = list(_join_streams(cell.outputs))
        for out in cell.outputs:
            if out.output_type == "stream":
                out.text = CLOCK.sub("", out.text)
            if "execution_count" in out:
                out.execution_count = number
            if "text/plain" in out.get("data", {}):
                out.data["text/plain"] = MEMORY.sub("", out.data["text/plain"])
    return notebook


def _join_streams(outputs: Sequence[NotebookNode]) -> Iterator[NotebookNode]:
    """Yields the outputs with consecutive pieces of one stream joined."""
    last: NotebookNode | None = None
    for out in outputs:
        if last is not None and out.output_type == last.output_type == "stream" and out.name == last.name:
            last.text += out.text
            continue
        if last is not None:
            yield last
        last = out
    if last is not None:
        yield last


def main(argv: Sequence[str] | None = None) -> int:
    """Executes the notebooks and saves them in place."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks to execute, without .ipynb; default: all")
    names = parser.parse_args(argv).names
    paths = [path for path in NOTEBOOKS if not names or path.stem in names]
    if len(paths) < len(names):
        parser.error(f"expected names from {', '.join(path.stem for path in NOTEBOOKS)}")
    with tempfile.TemporaryDirectory() as folder:
        for path, notebook in zip(paths, execute_notebooks(paths, Path(folder)), strict=True):
            nbformat.write(notebook, path)
            sys.stdout.write(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
