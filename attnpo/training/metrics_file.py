"""The run's metrics as one table, whatever number of sessions wrote it."""

import csv
from pathlib import Path

METRICS = "metrics.csv"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics file, empty cells left out."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def merge_metrics(folder: Path) -> list[dict[str, float]]:
    """A row per optimiser step from all of a run's sessions (``logs/version_N``), also written to ``metrics.csv``.

    Where a resumed session repeats a step, its values win.
    """
    by_step: dict[int, dict[str, float]] = {}
    sessions = sorted((folder / "logs").glob("version_*"), key=lambda path: int(path.name.split("_")[-1]))
    for session in sessions:
        for row in read_metrics(session / METRICS):
            by_step.setdefault(int(row["step"]), {}).update(row)
    rows = [by_step[step] for step in sorted(by_step)]
    names = sorted({name for row in rows for name in row} - {"step", "epoch"})
    with (folder / METRICS).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["step", "epoch", *names])
        writer.writeheader()
        writer.writerows({**row, "step": int(row["step"]), "epoch": int(row["epoch"])} for row in rows)
    return rows
