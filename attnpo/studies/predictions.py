"""What was expected of a study before it ran, beside what came of it: hits, misses and what stays open alike."""

import numpy as np

from attnpo.analysis.intervals import Interval, paired_difference
from attnpo.display.page import Paragraph, Section, TableBlock
from attnpo.schema import digest
from attnpo.studies.frontier import AtKL, at_kl
from attnpo.studies.selection import by_arm, difference_text, gather, has_truth
from attnpo.studies.study import Claim, Outcome
from attnpo.studies.tables import NOT_EQUAL, Row

HIT, MISS, OPEN = "hit", "MISS", "open"
NO_RESULT = "no result at this KL"
HEADS = ["about", "prediction", "difference", "outcome"]


def predictions_section(outcome: Outcome) -> list[Section]:
    """Every prediction with its difference and what that decides; none for a study without predictions or a truth."""
    predictions = outcome.study.predictions
    if predictions is None or not has_truth(gather(outcome.points)):
        return []
    rows: list[Row] = []
    counts = dict.fromkeys((HIT, MISS, OPEN), 0)
    for claim in predictions.claims.values():
        found, equal = measured(outcome, claim)
        decided = decide(found) if equal else NOT_EQUAL if found is not None else NO_RESULT
        counts[decided if decided in counts else OPEN] += 1
        rows.append(
            {"about": claim.about, "prediction": claim.says, "difference": difference_text(found), "outcome": decided}
        )
    ran = sorted({point.seed for point, _ in outcome.points})
    other = [seed for seed in ran if seed not in predictions.seeds]
    lacking = [seed for seed in predictions.seeds if seed not in ran]
    partial = f"; seeds {', '.join(map(str, lacking))} of them are still to be run" if lacking and not other else ""
    note = (
        f"fixed before the runs for seeds {', '.join(map(str, predictions.seeds))}{partial}: digest "
        f"{digest(predictions.record())[:16]}. {predictions.rule} Of {len(rows)} predictions {counts[HIT]} hit, "
        f"{counts[MISS]} missed, {counts[OPEN]} stay open"
    )
    return [Section("Predictions and outcomes", [TableBlock(HEADS, rows), Paragraph(note)])]


def decide(found: Interval | None) -> str:
    """Whether an interval bears a prediction out (all of it above 0), contradicts it (below 0) or leaves it open."""
    if found is None or not found.excludes_zero:
        return OPEN
    return HIT if found.low > 0 else MISS


def measured(outcome: Outcome, claim: Claim) -> tuple[Interval | None, bool]:
    """The sum of the rewards of ``above`` less that of ``below``, paired by seed and prompt, and whether at equal KL.

    None where an arm has no place at the level or the arms share no seed.
    """
    sides: list[list[AtKL]] = []
    for cells in (claim.above, claim.below):
        points = [by_arm(outcome, world).get(arm) for world, arm in cells]
        places = [None if not every else at_kl(every, claim.level) for every in points]
        sides.append([place for place in places if place is not None])
        if len(sides[-1]) < len(cells):
            return None, False
    every = [place for side in sides for place in side]
    shared = [seed for seed in every[0].seeds if all(seed in place.seeds for place in every)]
    if not shared:
        return None, False
    above, below = (
        np.sum([place.rewards[[place.seeds.index(seed) for seed in shared]] for place in side], axis=0)
        for side in sides
    )
    return paired_difference(above, below), all(place.reached for place in every)
