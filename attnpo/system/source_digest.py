"""Digest of the source files that can affect a run's results. Cheap to import; study workers check it on startup."""

import hashlib
from functools import cache
from pathlib import Path

from attnpo.system.files import file_digest

PACKAGE = Path(__file__).resolve().parents[1]

# Subpackages and files that cannot change a run's results: they start commands, display finished work, or measure apart
# from the runs (an analysis counts for its own results). All other files count, including new ones.
SHOWING = (
    *("__init__.py", "__main__.py", "fit.py", "weigh.py", "show.py", "generate.py", "report.py", "pair.py"),
    *("evaluate.py", "theory.py", "verify.py", "losses.py", "weigher.py", "display", "evaluation", "lab/reports"),
    *("run/show.py", "run/show_config.py"),
    *("lab/figures.py", "lab/results.py", "lab/testbed/benchmark.py"),
    *(
        f"lab/studies/{name}.py"
        for name in (
            *("benchmark_settings", "benchmarks", "faithfulness", "figures", "notes"),
            *("outcome", "page", "predictions", "records", "tables"),
        )
    ),
)


@cache
def source_digest(root: Path | None = None) -> str:
    """Returns the digest of all source files that can affect a run's results, computed once per process."""
    root = root or PACKAGE
    found = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if not any(name == one or name.startswith(f"{one}/") for one in SHOWING):
            found.update(f"{name}\0{file_digest(file)}\0".encode())
    return found.hexdigest()[:16]
