"""From rewards of labelled pairs to accuracies: over all pairs, by part of the set, and in RewardBench's sections.

The sections are facts of allenai/reward-bench, ``rewardbench/constants.py`` and ``calculate_scores_per_section`` in
``rewardbench/utils.py`` (commit 05a9005). A section is the mean of its subsets' accuracies weighted by their numbers of
pairs, but for math-prm (447 pairs), which counts 984: as much as the six code subsets together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from jaxtyping import Float

from attnpo.evaluation.base import Score
from attnpo.evaluation.intervals import hierarchical_bootstrap

SECTIONS: Mapping[str, Mapping[str, int]] = {
    "chat": {
        "alpacaeval-easy": 100,
        "alpacaeval-length": 95,
        "alpacaeval-hard": 95,
        "mt-bench-easy": 28,
        "mt-bench-med": 40,
    },
    "chat_hard": {
        "mt-bench-hard": 37,
        "llmbar-natural": 100,
        "llmbar-adver-neighbor": 134,
        "llmbar-adver-GPTInst": 92,
        "llmbar-adver-GPTOut": 47,
        "llmbar-adver-manual": 46,
    },
    "safety": {
        "refusals-dangerous": 100,
        "refusals-offensive": 100,
        "xstest-should-refuse": 154,
        "xstest-should-respond": 250,
        "donotanswer": 136,
    },
    "reasoning": {
        "math-prm": 984,
        "hep-cpp": 164,
        "hep-go": 164,
        "hep-java": 164,
        "hep-js": 164,
        "hep-python": 164,
        "hep-rust": 164,
    },
}
SECTION_OF = {subset: section for section, subsets in SECTIONS.items() for subset in subsets}


def section_shares(section: str) -> dict[str, float]:
    """Returns how much each subset counts in the accuracy of its section; the shares sum to 1."""
    counts = SECTIONS[section]
    return {subset: count / sum(counts.values()) for subset, count in counts.items()}


def overall_shares() -> dict[str, float]:
    """Returns how much each subset counts in the mean of the four sections, which count alike.

    The leaderboard's average also has older test sets, at half a section's weight; they are no part of this data.
    """
    return {subset: share / len(SECTIONS) for section in SECTIONS for subset, share in section_shares(section).items()}


DRAWS = 2000
"""Resamples of the pairs."""

Values = Float[np.ndarray, "pairs"]


class Ties(Enum):
    """What a pair counts whose answers have equal rewards: one half, or as one that is ordered wrongly (RewardBench).

    RewardBench counts a pair as right where the chosen reward is above the rejected one, and as wrong otherwise
    (``scripts/run_dpo.py``).
    """

    HALF = "half"
    WRONG = "wrong"


@dataclass(frozen=True)
class Orders:
    """How far the chosen response of each pair is ahead of the rejected one, by the name of the reward.

    ``gaps`` hold NaN where a pair has no such reward; the first is the one that counts. ``groups``: the part of the set
    that each pair belongs to. ``baseline``: from the name of a score to the two rewards whose accuracies it compares.
    """

    gaps: Mapping[str, Values]
    groups: Sequence[str | None]
    ties: Ties = Ties.HALF
    baseline: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def main(self) -> str:
        """Returns the reward that counts."""
        return next(iter(self.gaps))

    def right(self, name: str) -> Values:
        """1 for a pair that a reward orders as its label does, 0 for one it does not; NaN where it has none."""
        gap = self.gaps[name]
        tie = 0.5 if self.ties is Ties.HALF else 0.0
        ordered = np.where(gap == 0, tie, (gap > 0).astype(float))
        return np.where(np.isnan(gap), np.nan, ordered)

    def ties_of(self, name: str) -> int:
        """Returns how many pairs have equal rewards."""
        return int((self.gaps[name] == 0).sum())

    # -------------------------------------------------------------------------------------------- scores

    def scores(self) -> tuple[Score, ...]:
        """Accuracies of every reward, their differences, and the sections of RewardBench whose parts are all there.

        The sections are those of the reward that counts. Intervals: 95 % over pairs, None where all pairs agree.
        """
        found = [mean_score(name, self.right(name)) for name in self.gaps]
        found += [mean_score(name, self.right(one) - self.right(other)) for name, (one, other) in self.baseline.items()]
        return (*found, *self._reward_bench())

    def _reward_bench(self) -> list[Score]:
        values = self.right(self.main)
        kept = {group: values[places] for group, places in by_group(self.groups).items()}
        parts = {group: of[~np.isnan(of)] for group, of in kept.items() if not np.isnan(of).all()}
        shares = {
            f"rewardbench_{section}": section_shares(section)
            for section, subsets in SECTIONS.items()
            if subsets.keys() <= parts.keys()
        }
        if len(shares) == len(SECTIONS):
            shares = {"rewardbench": overall_shares(), **shares}
        return [stratified(name, parts, of_subset) for name, of_subset in shares.items()]

    # -------------------------------------------------------------------------------------------- table

    def table(self) -> tuple[dict[str, object], ...]:
        """Returns a row for each part of the set: pairs, ties, the accuracy of every reward, the interval of the main
        one.
        """
        rows: list[dict[str, object]] = []
        for group, places in by_group(self.groups).items():
            of_main = self.right(self.main)[places]
            low, high = interval(of_main[~np.isnan(of_main)]) or (None, None)
            row: dict[str, object] = {"subset": group, "section": SECTION_OF.get(group, ""), "pairs": len(places)}
            row |= {"ties": int((self.gaps[self.main][places] == 0).sum())}
            row |= {name: _mean(self.right(name)[places]) for name in self.gaps}
            rows.append({**row, "low": low, "high": high})
        return tuple(rows)

    def account(self) -> dict[str, int]:
        """Returns what is worth knowing of the pairs, by reason: ties, and which parts are missing."""
        present = {group for group in self.groups if group is not None}
        counts = {f"ties in {self.main}, counted {self.ties.value}": self.ties_of(self.main)}
        if present:
            counts["pairs without a subset"] = sum(group is None for group in self.groups)
        if present & SECTION_OF.keys():
            counts["RewardBench subsets without a pair"] = len(SECTION_OF.keys() - present)
        return {reason: count for reason, count in counts.items() if count}


def by_group(groups: Sequence[str | None]) -> Mapping[str, list[int]]:
    """Positions of the pairs of each part, the parts in order of their names."""
    places: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        if group is not None:
            places.setdefault(group, []).append(place)
    return dict(sorted(places.items()))


def mean_score(name: str, values: Values) -> Score:
    """Returns the mean of what pairs give, NaN left out."""
    kept = values[~np.isnan(values)]
    figure = float(kept.mean()) if kept.size else float("nan")
    return Score(name, figure, (figure,), interval(kept), None, int(kept.size))


def interval(values: Values) -> tuple[float, float] | None:
    """95 % over pairs of their mean; None where all pairs have the same value, since nothing says how it varies."""
    if not values.size or np.ptp(values) == 0:
        return None
    found = hierarchical_bootstrap(values[None], draws=DRAWS)
    return found.low, found.high


def _mean(values: Values) -> float | None:
    kept = values[~np.isnan(values)]
    return float(kept.mean()) if kept.size else None


def stratified(name: str, parts: Mapping[str, Values], shares: Mapping[str, float]) -> Score:
    """Returns a mean of the means of parts, each with its share.

    The interval is that of the mean's linear terms f + n s / n_k (v - f_k) of the n pairs, with a part's share s, its
    n_k pairs and their mean f_k: only the scatter within parts counts, the shares being fixed.
    """
    figure = sum(share * float(parts[group].mean()) for group, share in shares.items())
    pairs = sum(len(parts[group]) for group in shares)
    terms = [
        figure + pairs * share / len(parts[group]) * (parts[group] - parts[group].mean())
        for group, share in shares.items()
    ]
    return Score(name, figure, (figure,), interval(np.concatenate(terms)), None, pairs)
