"""Reports on several studies of the same world, pooled into one study with all their seeds."""

import json
from collections.abc import Sequence
from pathlib import Path

from attnpo.display.printed import KeyedTable
from attnpo.lab.reports.output import publish_report
from attnpo.lab.studies.records import pool_records, read_study_record, rliable_scores
from attnpo.schema import UserError
from attnpo.system.files import write_atomically


def write_pooled_report(paths: Sequence[Path], output: Path, mark: str) -> None:
    """Prints the pooled differences and writes them to ``output``. Raises UserError if the studies cannot be pooled."""
    records = [read_study_record(path) for path in paths]
    rows = pool_records(records)
    if not rows:
        raise UserError("report pool: no arm has a difference at equal KL with at least two seeds: pool more studies")
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    keys = tuple(name for name in ("world", "KL", "arm") if name in columns)
    title = f"Differences from {records[0]['control']} at equal KL, {len(paths)} studies pooled"
    notes = [
        "all seeds are weighted equally; intervals over seeds and prompts, as in a single study. Studies were pooled "
        "after their runs, so this is not a registered test"
    ]
    table = KeyedTable("pooled", title, columns, tuple(rows), keys, None, {"KL": 1})
    every = [row for record in records for row in record["rows"] if "differences" in row]
    few = sum(1 for row in every if row["mark"] or not row["squares"])
    notes += [f"{few} of {len(every)} differences are left out: not at equal KL, or from a single seed"] * bool(few)
    scores, incomplete = rliable_scores(records)
    if incomplete:
        notes.append(f"not in rliable.json, because some rewards are missing: {', '.join(incomplete)}")
    publish_report(title, [table], notes, output, "pooled", mark)
    write_atomically(output / "rliable.json", json.dumps(scores) + "\n")
