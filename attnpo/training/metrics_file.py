"""Run's metrics as one table, whatever number of sessions wrote it.

A session appends to its own file under ``logs/``; ``metrics.csv`` holds what was merged last and is replaced as a
whole, so that no row is lost with a process.
"""

import csv
import io
import shutil
from pathlib import Path

from attnpo.system.files import write_atomically

METRICS = "metrics.csv"
LOGS = "logs"
RUN_ID = "wandb.json"

Row = dict[str, float]


def read_metrics(path: Path) -> list[Row]:
    """Returns the rows of a metrics file without empty cells, and without a last line that has no end yet."""
    if not path.is_file():
        return []
    text = path.read_bytes().decode(errors="replace")
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(lines)]


def merge_metrics(folder: Path) -> list[Row]:
    """Returns a row per step of ``metrics.csv`` and all sessions since (``logs/version_N``), written there again.

    Where a resumed session repeats a step, its values win.
    """
    by_step: dict[int, Row] = {}
    for path in (folder, *_sessions(folder)):
        for row in read_metrics(path / METRICS):
            if "step" in row:
                by_step.setdefault(int(row["step"]), {}).update(row)
    rows = [by_step[step] for step in sorted(by_step)]
    names = sorted({name for row in rows for name in row} - {"step", "epoch"})
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, ["step", "epoch", *names])
    writer.writeheader()
    writer.writerows({**row, "step": int(row["step"]), "epoch": int(row["epoch"])} for row in rows)
    write_atomically(folder / METRICS, table.getvalue())
    return rows


def take_metrics(folder: Path, rows: Path) -> None:
    """Replaces all that the run has logged by the file ``rows``, which was kept with a checkpoint."""
    for session in _sessions(folder):
        shutil.rmtree(session)
    shutil.copyfile(rows, folder / METRICS)


def _sessions(folder: Path) -> list[Path]:
    return sorted((folder / LOGS).glob("version_*"), key=lambda path: int(path.name.split("_")[-1]))
