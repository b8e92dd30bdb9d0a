"""The paper's theory on policies small enough to enumerate (``python -m attnpo.theory``).

The names that notebooks and scripts use are importable from here; each loads its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnpo.theory.bounds_figure import tightness_figure as tightness_figure
    from attnpo.theory.cases import solve as solve
    from attnpo.theory.figures import theory_figure as theory_figure
    from attnpo.theory.paper import paper_row as paper_row
    from attnpo.theory.problem import random_problem as random_problem
    from attnpo.theory.spread import Reads as Reads
    from attnpo.theory.spread import spread_weights as spread_weights
    from attnpo.theory.study import run_study as run_study
    from attnpo.theory.tables import frames as frames

_HOLDS = {
    "Reads": "spread",
    "frames": "tables",
    "paper_row": "paper",
    "random_problem": "problem",
    "run_study": "study",
    "solve": "cases",
    "spread_weights": "spread",
    "theory_figure": "figures",
    "tightness_figure": "bounds_figure",
}

__all__ = [
    "Reads",
    "frames",
    "paper_row",
    "random_problem",
    "run_study",
    "solve",
    "spread_weights",
    "theory_figure",
    "tightness_figure",
]


def __getattr__(name: str) -> object:
    """Loads the module of a name. AttributeError, with the names there are, for any other."""
    if name not in _HOLDS:
        raise AttributeError(f"module 'attnpo.theory' has no attribute {name!r}; its names: {', '.join(_HOLDS)}")
    value: object = getattr(import_module(f"attnpo.theory.{_HOLDS[name]}"), name)
    globals()[name] = value
    return value
