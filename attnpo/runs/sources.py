"""A digest of the source files that can move a number of a run. Light: each worker of a study begins with it."""

import hashlib
from functools import cache
from pathlib import Path

from attnpo.files import file_digest

PACKAGE = Path(__file__).resolve().parents[1]

# Rooms and files of the package that no number of a run comes from: they start a command, show what is finished, or
# measure beside the runs (an analysis counts for its own results). All others count, a new one without being named.
SHOWING = (
    *("__init__.py", "__main__.py", "fit.py", "weigh.py", "show.py", "generate.py", "report.py", "verify.py"),
    *("conformance", "display", "inspection", "reports", "theory.py", "losses.py", "weigher.py", "runs/ending.py"),
    *("evaluate.py", "evaluation", "grading", "pair.py", "pairing", "analysis/passport.py", "runs/implicit_reward.py"),
    *("analysis/intervals.py", "analysis/prediction.py", "studies/drift_table.py", "studies/faithfulness.py"),
    *("studies/faithfulness_pages.py", "studies/footnotes.py", "studies/frontier.py", "studies/predictions.py"),
    *("studies/ranking.py", "studies/report.py", "studies/selection.py", "studies/tables.py", "studies/exports.py"),
    *("studies/ending.py", "studies/study_figures.py", "studies/study_page.py", "studies/yardstick.py"),
    *("studies/cost_table.py", "studies/benchmarks.py", "studies/benchmark_scores.py", "studies/benchmark_table.py"),
)


@cache
def source_digest(root: Path | None = None) -> str:
    """Digest of all sources of the package that can move a number of a run, computed once per process."""
    root = root or PACKAGE
    found = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if not any(name == one or name.startswith(f"{one}/") for one in SHOWING):
            found.update(f"{name}\0{file_digest(file)}\0".encode())
    return found.hexdigest()[:16]
