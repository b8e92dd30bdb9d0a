"""Registers a study's predictions before it runs and compares them with the results: hit, missed or open."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from attnpo.display.page import Paragraph, Section, TableBlock
from attnpo.evaluation.intervals import Interval, paired_difference
from attnpo.lab.studies.outcome import Outcome, difference_text, rewards_at_kl
from attnpo.lab.studies.study import Arm, Claim, Study, settings_digest
from attnpo.lab.studies.tables import NOT_EQUAL, Row
from attnpo.run.folders import FIXED
from attnpo.schema import UserError, digest
from attnpo.system.files import read_record, write_record

HIT, MISS, OPEN = "hit", "MISS", "open"
NO_RESULT = "no result at this KL"
TITLE = "Predictions and outcomes"
HEADS = ["about", "prediction", "difference", "outcome", "seeds"]


# ------------------------------------------------------------------------------------------------ before the runs


def check_prediction_arms(study: Study, arms: Sequence[Arm]) -> None:
    """Checks that all predictions refer to arms of the study; ``arms`` contains the arms of all worlds.

    Raises:
        UserError: a prediction names an unknown arm.
    """
    known = [(arm.world, arm.name) for arm in arms]
    for name, claim in study.predictions.claims.items() if study.predictions else []:
        for world, arm in (*claim.above, *claim.below):
            if (world, arm) not in known:
                there = ", ".join(arm for place, arm in known if place == world)
                where = f" in world {world}" if world else ""
                raise UserError(
                    f"study.predictions.claims.{name}: expected arms of the study, got {arm}{where}; the arms are "
                    f"{there} (study.predictions=null turns predictions off)"
                )


def register_predictions(study: Study, folder: Path) -> list[str]:
    """Saves a study's predictions to its folder before any point runs; returns warnings for the report.

    Once a point has finished, saved predictions are kept, with a warning if the current predictions differ.
    """
    if study.predictions is None:
        return []
    path, now = folder / FIXED, _digest(study.predictions.to_dict())
    if not any(folder.glob("points/*/result.json")):
        path.unlink(missing_ok=True)
    before = str((read_record(path) or {"fixed": "changed since"})["fixed"]) if path.exists() else now
    if not path.exists():
        write_record(path, {"fixed": now, **study.predictions.to_dict()})
    if before == now:
        return []
    return [
        f"WARNING: points in this folder were run with other predictions ({FIXED}: {before}; now {now}), so the "
        "current predictions were not fixed before the runs"
    ]


def _digest(record: Mapping[str, object]) -> str:
    return digest(record)[:16]


# ------------------------------------------------------------------------------------------------ after them


def registration_warnings(outcome: Outcome) -> list[str]:
    """Returns warnings if the predictions were registered for seeds or settings that differ from the study's."""
    predictions, out = outcome.study.predictions, list[str]()
    if predictions is None:
        return out
    other = sorted({point.seed for point, _ in outcome.points} - set(predictions.seeds))
    if other:
        out.append(
            f"the predictions were not registered for seeds {', '.join(map(str, other))}: the results "
            f"for these seeds are exploratory and do not decide any prediction"
        )
    if has_other_settings(outcome):
        out.append(
            f"the predictions were registered for a different grid, arms or worlds ({predictions.settings}) than the "
            f"study's ({settings_digest(outcome.record)}): all results are exploratory and do not decide any prediction"
        )
    return out


def has_other_settings(outcome: Outcome) -> bool:
    """Returns whether the predictions were registered for a different grid, arms or worlds."""
    predictions = outcome.study.predictions
    fixed = None if predictions is None else predictions.settings
    return fixed is not None and fixed != settings_digest(outcome.record)


def predictions_section(outcome: Outcome) -> list[Section]:
    """Returns a table of all predictions and their outcomes, using only the seeds they were registered for.

    Returns an empty list if there are no predictions, no known true reward or no results for these seeds, or if the
    predictions were registered for other settings.
    """
    predictions = outcome.study.predictions
    if predictions is None or not outcome.has_truth:
        return []
    outcome = replace(outcome, points=[made for made in outcome.points if made[0].seed in predictions.seeds])
    ran = {point.seed for point, _ in outcome.points}
    if not ran or has_other_settings(outcome):
        return []
    rows: list[Row] = []
    for claim in predictions.claims.values():
        found, equal = measure_claim(outcome, claim)
        decided = NO_RESULT if found is None else decide_claim(found) if equal else NOT_EQUAL
        if found is not None and equal and found.seeds < len(ran):
            decided = f"{OPEN}: {found.seeds} of {len(ran)} seeds have results at this KL"
        stands_on = f"{0 if found is None else found.seeds} of {len(predictions.seeds)}"
        cells = (claim.about, claim.says, difference_text(found), decided, stands_on)
        rows.append(dict(zip(HEADS, cells, strict=True)))
    hits, misses = (sum(row["outcome"] == word for row in rows) for word in (HIT, MISS))
    lacking = [str(seed) for seed in predictions.seeds if seed not in ran]
    so_far = f"So far (missing seeds: {', '.join(lacking)}), of" if lacking else "Of"
    of = ", ".join(map(str, predictions.seeds))
    note = (
        f"fixed before the runs for seeds {of}: digest {_digest(predictions.to_dict())}. {predictions.rule} {so_far} "
        f"{len(rows)} predictions {hits} are hit, {misses} missed and {len(rows) - hits - misses} open, not corrected "
        "for their number"
    )
    return [Section(TITLE, [TableBlock(HEADS, rows), Paragraph(note)])]


def decide_claim(found: Interval | None) -> str:
    """Returns a prediction's outcome: hit if its interval is above 0, MISS if below, otherwise open."""
    if found is None or not found.excludes_zero:
        return OPEN
    return HIT if found.low > 0 else MISS


def measure_claim(outcome: Outcome, claim: Claim) -> tuple[Interval | None, bool]:
    """Evaluates a claim; returns the reward of ``above`` minus that of ``below``, and whether this is at equal KL.

    The difference is paired by seed and prompt; it is None if an arm has no value at the level or if the arms share no
    seed.
    """
    cells = [*claim.above, *claim.below]
    every = [rewards_at_kl(outcome.points_by_arm(world).get(arm, []), claim.level) for world, arm in cells]
    places = [place for place in every if place is not None]
    shared = [seed for seed in places[0].seeds if all(seed in place.seeds for place in places)] if places else []
    if len(places) < len(cells) or not shared:
        return None, False
    rewards = [place.rewards[[place.seeds.index(seed) for seed in shared]] for place in places]
    half = len(claim.above)
    found = paired_difference(np.sum(rewards[:half], axis=0), np.sum(rewards[half:], axis=0))
    return found, not any(place.mark for place in places)
