"""What was expected of a study before it ran, beside what came of it: hits, misses and what stays open alike."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from attnpo.display.page import Paragraph, Section, TableBlock
from attnpo.evaluation.intervals import Interval, paired_difference
from attnpo.lab.studies.frontier import AtKL, at_kl
from attnpo.lab.studies.outcome import by_arm, difference_text, gather, has_truth
from attnpo.lab.studies.study import Arm, Claim, Outcome, Study, settings_digest
from attnpo.lab.studies.tables import NOT_EQUAL, Row
from attnpo.run.folders import FIXED
from attnpo.schema import UserError, digest
from attnpo.system.files import read_record, write_record

HIT, MISS, OPEN = "hit", "MISS", "open"
NO_RESULT = "no result at this KL"
TITLE = "Predictions and outcomes"
HEADS = ["about", "prediction", "difference", "outcome", "seeds"]


# ------------------------------------------------------------------------------------------------ before the runs


def check_predicted(study: Study, arms: Sequence[Arm]) -> None:
    """Raises UserError for a prediction about an arm that is none of ``arms``, those of all worlds."""
    known = [(arm.world, arm.name) for arm in arms]
    for name, claim in study.predictions.claims.items() if study.predictions else []:
        for world, arm in (*claim.above, *claim.below):
            if (world, arm) not in known:
                there = ", ".join(arm for place, arm in known if place == world)
                raise UserError(
                    f"study.predictions.claims.{name}: expected arms of the study, got {arm}{of_world(world)}; there "
                    f"are {there} (study.predictions=null leaves the predictions out)"
                )


def of_world(world: str) -> str:
    """Returns a world in a message, empty where there is only one."""
    return f" in world {world}" if world else ""


def fix(study: Study, folder: Path) -> list[str]:
    """Keeps a study's predictions in its folder before any point runs; returns what must be said of them.

    The first that were kept there stay: where others are asked for and points have been run since, this is said.
    """
    if study.predictions is None:
        return []
    path, now = folder / FIXED, _digest(study.predictions.record())
    before = str((read_record(path) or {"fixed": "changed since"})["fixed"]) if path.exists() else now
    from attnpo.run.resume import RESULT

    if not any(folder.glob(f"points/*/{RESULT}")):
        before = now
        path.unlink(missing_ok=True)
    if not path.exists():
        write_record(path, {"fixed": now, **study.predictions.record()})
    if before == now:
        return []
    return [
        f"WARNING: points of this folder were run under other predictions ({FIXED}: {before}; now {now}): what the "
        "present ones say was not fixed before the runs"
    ]


def _digest(record: Mapping[str, object]) -> str:
    return digest(record)[:16]


# ------------------------------------------------------------------------------------------------ after them


def unregistered(outcome: Outcome) -> list[str]:
    """Returns what is to be said where the predictions were fixed for other seeds or other settings than those that
    ran.
    """
    predictions = outcome.study.predictions
    if predictions is None:
        return []
    out = []
    other = sorted({point.seed for point, _ in outcome.points} - set(predictions.seeds))
    if other:
        out.append(
            f"seeds {', '.join(map(str, other))} are not among those the predictions were fixed for: what stands here "
            "of them is exploration, no evidence, and decides no prediction"
        )
    if other_settings(outcome):
        out.append(
            f"grid, arms or worlds ({settings_digest(outcome.record)}) are not those the predictions were fixed for "
            f"({predictions.settings}): what stands here is exploration, no evidence, and decides no prediction"
        )
    return out


def other_settings(outcome: Outcome) -> bool:
    """Returns whether grid, arms or worlds are others than those the predictions were fixed for."""
    predictions = outcome.study.predictions
    fixed = None if predictions is None else predictions.settings
    return fixed is not None and fixed != settings_digest(outcome.record)


def predictions_section(outcome: Outcome) -> list[Section]:
    """Returns every prediction with its difference and what that decides, on the seeds they were fixed for alone.

    None for a study without predictions, without a truth, with none of these seeds, and with other settings.
    """
    predictions = outcome.study.predictions
    if predictions is None or not has_truth(gather(outcome.points)):
        return []
    outcome = replace(outcome, points=[made for made in outcome.points if made[0].seed in predictions.seeds])
    ran = {point.seed for point, _ in outcome.points}
    if not ran or other_settings(outcome):
        return []
    rows: list[Row] = []
    counts = dict.fromkeys((HIT, MISS, OPEN), 0)
    for claim in predictions.claims.values():
        found, equal = measure_claim(outcome, claim)
        decided = NO_RESULT if found is None else decide(found) if equal else NOT_EQUAL
        if found is not None and equal and found.seeds < len(ran):
            decided = f"{OPEN}: {found.seeds} of {len(ran)} seeds have this KL"
        counts[decided if decided in counts else OPEN] += 1
        stands_on = f"{0 if found is None else found.seeds} of {len(predictions.seeds)}"
        cells = (claim.about, claim.says, difference_text(found), decided, stands_on)
        rows.append(dict(zip(HEADS, cells, strict=True)))
    lacking = [str(seed) for seed in predictions.seeds if seed not in ran]
    of = ", ".join(map(str, predictions.seeds))
    note = f"fixed before the runs for seeds {of}: digest {_digest(predictions.record())}. {predictions.rule} "
    counted = f"{counts[HIT]} hit, {counts[MISS]} missed, {counts[OPEN]} open"
    if lacking:
        note += f"So far, with seeds {', '.join(lacking)} still to be run, of {len(rows)} predictions {counted}"
    else:
        note += f"Of {len(rows)} predictions {counted}"
    note += ", without correction for their number"
    return [Section(TITLE, [TableBlock(HEADS, rows), Paragraph(note)])]


def decide(found: Interval | None) -> str:
    """Returns whether an interval bears a prediction out (all of it above 0), contradicts it (below 0) or leaves it
    open.
    """
    if found is None or not found.excludes_zero:
        return OPEN
    return HIT if found.low > 0 else MISS


def measure_claim(outcome: Outcome, claim: Claim) -> tuple[Interval | None, bool]:
    """Returns the sum of the rewards of ``above`` less that of ``below``, paired by seed and prompt, and whether at
    equal KL.

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
    return paired_difference(above, below), not any(place.mark for place in every)
