"""Labelled pairs that no training saw: a file, a split of a folder, or a data set on the hub."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from attnpo.data.adapters import Columns
from attnpo.data.base import PairSet, pairs_from_rows, row_range
from attnpo.data.tables import read_table
from attnpo.models.spec import AUTO
from attnpo.schema import PreferencePair, UserError

log = logging.getLogger(__name__)

KEY = "benchmark."


@dataclass(frozen=True)
class UnseenPairs:
    """Pairs to be ordered (config node ``benchmark.data``); rows as ``PairSource`` reads them, all of one split.

    ``group``: the column that says which part of the set a pair belongs to, RewardBench's ``subset``; None, or a column
    that the data lack: no parts. ``subset`` and ``revision`` are for the hub. ``path`` auto stands for the validation
    pairs of the run that trained the model, as that run read them.
    """

    path: str
    split: str = "test"
    rows: str | None = None
    columns: Columns = field(default_factory=Columns)
    group: str | None = "subset"
    revision: str | None = None
    subset: str | None = None

    def unread(self) -> dict[str, str]:
        """Keys without effect: a run's own validation pairs are read as the run read them."""
        why = f"{KEY}data.path=auto: the run says which pairs these are"
        return dict.fromkeys(("split", "rows", "columns", "revision", "subset"), why) if self.path == AUTO else {}

    def load(self) -> PairSet:
        """Returns all usable pairs, with the account of every row. UserError when there is none, or nothing can be
        read.
        """
        try:
            return self._load()
        except UserError as error:
            text = str(error)  # the keys of a pair set lie one level deeper here than in training
            raise UserError(KEY + text if text.startswith("data.") else text) from error

    def _load(self) -> PairSet:
        table = read_table(self.path, self.split, "data.split", self.subset, self.revision)
        where = f"data.path={self.path} ({self.split})"
        self.columns.check(table.column_names, where)
        rows = row_range(self.rows, len(table), "data.rows")
        pairs = pairs_from_rows(table.select(rows), self.columns, rows)
        if not pairs.pairs:
            raise UserError(
                f"{where} has no usable pair: {pairs.summary()}; columns found: {', '.join(table.column_names)}. Look "
                "at these rows, or map the columns with benchmark.data.columns.prompt=..., .chosen=..., .rejected=..."
            )
        log.log(logging.WARNING if pairs.dropped else logging.INFO, "%s%s: %s", KEY, where, pairs.summary())
        return pairs

    def group_of(self, pair: PreferencePair) -> str | None:
        """Returns the part of the set that a pair belongs to; None where its row names none."""
        value = None if self.group is None else pair.extra.get(self.group)
        return None if value is None or not str(value).strip() else str(value).strip()


def by_group(groups: Sequence[str | None]) -> Mapping[str, list[int]]:
    """Positions of the pairs of each part, the parts in order of their names."""
    places: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        if group is not None:
            places.setdefault(group, []).append(place)
    return dict(sorted(places.items()))
