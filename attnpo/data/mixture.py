"""A mixture of sets of pairs: what each set is, and which of its pairs are taken."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from attnpo.data.adapters import Columns
from attnpo.schema import UserError, check_least, digest

SET = "data.mix"
"""The key of a pair's ``extra`` that names its set."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class MixedSet:
    """A set of a mixture (config node ``data.mix.NAME``).

    ``weight``: its part of the training pairs, relative to the other sets' weights. ``count``: so many training pairs
    of it. None of both, in every set, takes all. The other keys are those of ``data``; None takes the mixture's.
    """

    path: str
    weight: float | None = None
    count: int | None = None
    train_split: str | None = None
    val_split: str | None = None
    train_rows: str | None = None
    val_rows: str | None = None
    revision: str | None = None
    subset: str | None = None
    exchanged: bool | None = None
    columns: Columns | None = None

    def __post_init__(self) -> None:
        check_least("data.mix", 1, count=self.count)
        if self.weight is not None and not self.weight > 0:
            raise UserError(f"weight: expected a number above 0, got {self.weight:g}; leave the set out instead")
        if self.weight is not None and self.count is not None:
            raise UserError(f"weight={self.weight:g} and count={self.count} both say how much is taken: give one")

    def own(self) -> dict[str, object]:
        """Returns the keys of ``data`` that it does not take from the mixture."""
        return {name: value for name, value in vars(self).items() if value is not None and name not in AMOUNTS}


AMOUNTS = ("weight", "count")


@dataclass(frozen=True)
class SetAccount:
    """What became of the rows of one set: ``read``, ``kept`` as pairs, ``dropped``, and ``taken`` of those kept."""

    path: str
    read: int
    kept: int
    dropped: int
    taken: int

    def __str__(self) -> str:
        return f"{self.read} rows read, {self.kept} kept, {self.dropped} dropped, {self.taken} taken"


def check_mixture(sets: Mapping[str, MixedSet]) -> None:
    """Raises UserError for no set, a name that is none, and amounts that some sets have and others lack."""
    if not sets:
        raise UserError("data.mix: expected at least one set, as in data.mix={chat: {path: FILE}}; null: data.path")
    wrong = next((name for name in sets if not _NAME.fullmatch(str(name))), None)
    if wrong is not None:
        raise UserError(f"data.mix: {wrong!r} is no name of a set; expected letters, digits, _ and -")
    for key in AMOUNTS:
        lacking = [name for name, one in sets.items() if getattr(one, key) is None]
        if lacking and len(lacking) < len(sets):
            raise UserError(
                f"data.mix.{lacking[0]} has no {key}, and other sets have one: give every set a {key}, or none"
            )


def amounts(kept: Mapping[str, int], sets: Mapping[str, MixedSet]) -> dict[str, int]:
    """Returns how many of the ``kept`` pairs of each set are taken; none is taken twice.

    Counts as they are. With weights as many as there can be: the set that is scarcest for its weight gives all it has.

    Raises:
        UserError: a count is above what its set has, or a weight is so small that its set would give no pair.
    """
    first = next(iter(sets.values()))
    if first.count is None and first.weight is None:
        return dict(kept)
    if first.weight is None:
        counts = {name: one.count or 0 for name, one in sets.items()}
    else:
        weights = {name: one.weight or 0.0 for name, one in sets.items()}
        most = min(kept[name] / weight for name, weight in weights.items())
        counts = {name: min(kept[name], round(most * weight)) for name, weight in weights.items()}
    for name, count in counts.items():
        if count > kept[name]:
            raise UserError(
                f"data.mix.{name}.count={count}: the set has {kept[name]} usable pairs, and none is taken twice; "
                "lower it"
            )
        if not count:
            raise UserError(
                f"data.mix.{name}.weight={sets[name].weight:g} takes none of its {kept[name]} pairs beside those of "
                "the other sets: raise it, or leave the set out"
            )
    return counts


def draws(name: str, kept: int, seed: int) -> list[tuple[str, str, int]]:
    """Returns a number drawn for each pair of a set, with the set and the pair's place, in order: the first ones are
    taken.
    """
    return sorted((digest([seed, name, place]), name, place) for place in range(kept))


@contextmanager
def of_set(name: str) -> Iterator[None]:
    """Opens a context whose errors name the set of the mixture that they are about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"data.mix.{name}: {error}") from error
