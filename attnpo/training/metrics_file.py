"""Merges a run's metrics from all its sessions into one table.

Each session appends to its own file under ``logs/``. ``metrics.csv`` is the result of the last merge and is replaced
atomically, so no row is lost if the process is killed.
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
    """Reads the rows of a metrics file, skipping empty cells and an incomplete last line."""
    if not path.is_file():
        return []
    text = path.read_bytes().decode(errors="replace")
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(lines)]


def merge_metrics(folder: Path) -> list[Row]:
    """Merges ``metrics.csv`` and later sessions (``logs/version_N``) into one row per step; saves and returns the rows.

    If a resumed session repeats a step, its values replace the earlier ones.
    """
    by_step: dict[int, Row] = {}
    for path in (folder, *_session_folders(folder)):
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


def restore_metrics(folder: Path, rows: Path) -> None:
    """Replaces all logged metrics of a run with the file ``rows``, which was saved with a checkpoint."""
    for session in _session_folders(folder):
        shutil.rmtree(session)
    shutil.copyfile(rows, folder / METRICS)


def _session_folders(folder: Path) -> list[Path]:
    return sorted((folder / LOGS).glob("version_*"), key=lambda path: int(path.name.split("_")[-1]))
