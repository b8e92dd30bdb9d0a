"""An arm's test rewards at a given KL, of every seed read off its own path over the grid.

The points stand in the order of their KL on test prompts; which of them stay is decided on validation prompts alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from attnpo.evaluation.intervals import Interval, paired_difference
from attnpo.lab.studies.outcome import PointResults

Rewards = Float[np.ndarray, "prompts"]
ENDS, CHORD = "<", "~"  # after a value that is none at the level: the path ends before it, or has nothing near it
FAR = 2.0  # times the level: from a first point beyond that nothing is known of the level


@dataclass(frozen=True)
class PathPoint:
    """A policy on the path of an arm and a seed: its KL to the base on test prompts, its rewards."""

    kl: float
    validation: float
    rewards: Rewards


@dataclass(frozen=True)
class AtKL:
    """An arm at a KL level.

    ``rewards``: on test prompts, a row per seed of ``seeds``. ``kl``: the mean over seeds of the level, or of less
    where nothing beyond is better on validation. ``mark`` is empty where the value is one at the level, of the seeds
    that have one; where none has, it is ENDS if no point goes as far (the value is the end of the path), or CHORD if
    the level lies between the base and a first point of more than FAR times the level.
    """

    seeds: tuple[int, ...]
    rewards: Float[np.ndarray, "seeds prompts"]
    kl: float
    mark: str = ""

    @property
    def reward(self) -> float:
        """Returns the mean over seeds and prompts."""
        return float(self.rewards.mean())


def path_of(points: Sequence[PointResults], seed: int) -> list[PathPoint]:
    """Returns the path of an arm and a seed: the base, then the grid points by rising KL.

    A point stays if its validation reward is above those of all points with less KL; one whose KL is not finite has no
    place. The base only gives the path its start; it competes with no point, and is left out where its rewards were not
    stored.
    """
    mine = [point for point in points if seed in point.seeds]
    found = (_path_point(point, seed) for point in mine)
    marks = sorted((mark for mark in found if math.isfinite(mark.kl)), key=lambda mark: mark.kl)
    kept: list[PathPoint] = []
    for mark in marks:
        if not kept or mark.validation > kept[-1].validation:
            kept.append(mark)
    return [*_base(mine[:1], seed), *kept]


def _path_point(point: PointResults, seed: int) -> PathPoint:
    place = point.seeds.index(seed)
    test, validation = (point.scores(split)[place] for split in ("test", "validation"))
    return PathPoint(max(test.numbers["kl"], 0.0), validation.numbers["reward"], np.array(test.rewards))


def _base(points: Sequence[PointResults], seed: int) -> list[PathPoint]:
    known = [point.scores("test")[point.seeds.index(seed)].base_rewards for point in points]
    return [PathPoint(0.0, -math.inf, np.array(rewards)) for rewards in known if rewards is not None]


def at_kl(points: Sequence[PointResults], level: float) -> AtKL | None:
    """Returns an arm's test rewards at a KL level: of each seed linear in the root of KL between neighbours on its
    path.

    None where no seed's path has anything within the level.
    """
    places = [_of_seed(points, seed, level) for seed in sorted({seed for point in points for seed in point.seeds})]
    known = [place for place in places if place is not None]
    if not known:
        return None
    kept = [place for place in known if not place.mark] or [place for place in known if place.mark == known[0].mark]
    rewards = np.concatenate([place.rewards for place in kept])
    seeds = tuple(seed for place in kept for seed in place.seeds)
    return AtKL(seeds, rewards, float(np.mean([place.kl for place in kept])), kept[0].mark)


def _of_seed(points: Sequence[PointResults], seed: int, level: float) -> AtKL | None:
    marks = path_of(points, seed)
    within = [mark for mark in marks if mark.kl <= level]
    beyond = [mark for mark in marks if mark.kl > level]
    if not within:
        return None
    before = within[-1]
    if not beyond:
        far = (point.scores("test")[point.seeds.index(seed)].numbers["kl"] for point in points if seed in point.seeds)
        reached = any(level <= kl < math.inf for kl in far)
        return AtKL((seed,), before.rewards[None], before.kl, "" if reached else ENDS)
    low, high = math.sqrt(before.kl), math.sqrt(beyond[0].kl)
    share = (math.sqrt(level) - low) / (high - low)
    mark = CHORD if before.kl == 0 and beyond[0].kl > FAR * level else ""
    return AtKL((seed,), ((1 - share) * before.rewards + share * beyond[0].rewards)[None], level, mark)


def difference(one: AtKL | PointResults, other: AtKL | PointResults) -> Interval | None:
    """Returns the difference of two arms' test rewards, paired by seed and prompt; None when they share no seed."""
    shared = [seed for seed in one.seeds if seed in other.seeds]
    if not shared:
        return None
    rows = [found.rewards[[found.seeds.index(seed) for seed in shared]] for found in (one, other)]
    return paired_difference(rows[0], rows[1])
