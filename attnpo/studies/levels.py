"""Arms compared at equal KL, level by level and over worlds; the points are chosen on validation data alone."""

from collections.abc import Iterator
from dataclasses import dataclass

from attnpo.analysis.page import Paragraph, Section, TableBlock
from attnpo.studies.intervals import Interval
from attnpo.studies.runner import Outcome
from attnpo.studies.spots import Spot, against, best_within, by_arm, difference_text, gather, has_truth, verdict
from attnpo.studies.tables import Row, columns_of, lost_row

NONE = "-"
SUMMARY_LEVEL = 1.0  # nats: where worlds are compared, if the study has this level


def level_tables(outcome: Outcome) -> list[Section]:
    """Rewards at equal KL, and over worlds; none without a truth, without levels or where no arm has a choice."""
    study = outcome.study
    tuned = any(len((arm.grid or study.grid).overrides()) > 1 for arm in outcome.arms)
    if not study.kl_levels or not tuned or not has_truth(gather(outcome.points)):
        return []
    chosen = {world: at_levels(outcome, world) for world in outcome.worlds}
    note = (
        "each arm at the point with the highest validation reward among those with validation KL up to the level; the "
        f"numbers are of test prompts, reward and in brackets KL; {NONE} where no point is within"
    )
    if study.control is not None:
        note += f"; differences to {study.control} at its own point for the same level, paired by seed and prompt"
    rows = [row for world in outcome.worlds for row in _level_rows(outcome, world, chosen[world])]
    tables = [Section("Reward at equal KL", [TableBlock(columns_of(rows), rows), Paragraph(note)])]
    if study.worlds and study.control is not None:
        tables.append(_worlds_table(outcome, chosen))
    return tables


@dataclass(frozen=True)
class AtLevel:
    """An arm's point at a KL level and its difference to the control's own; each None where there is none."""

    spot: Spot | None
    versus: Interval | None


def at_levels(outcome: Outcome, world: str) -> dict[tuple[str, float], AtLevel]:
    """The points of a world's arms at every KL level, with their differences to the control."""
    spots = by_arm(outcome, world)
    out = {}
    for level in outcome.study.kl_levels:
        within = {name: best_within(mine, level) for name, mine in spots.items()}
        control = within.get(outcome.study.control or "")
        for name, spot in within.items():
            compared = spot is not None and control is not None and name != outcome.study.control
            out[name, level] = AtLevel(spot, against(spot, control) if compared and spot and control else None)
    return out


def _level_rows(outcome: Outcome, world: str, chosen: dict[tuple[str, float], AtLevel]) -> Iterator[Row]:
    study = outcome.study
    for name, spots in by_arm(outcome, world).items():
        row: Row = {**({"world": world} if world else {}), "arm": name}
        for level in study.kl_levels:
            found = chosen[name, level]
            lost = str(lost_row(outcome, name, world)["point"]) if not spots else NONE
            row[f"KL<={level:g}"] = lost if found.spot is None else _reward(found.spot)
            if study.control is not None:
                none = "" if name == study.control else NONE
                row[f"minus {study.control}, KL<={level:g}"] = difference_text(found.versus, none)
        yield row


def _reward(spot: Spot) -> str:
    return f"{spot.truth('test', 'reward'):.3f} ({spot.truth('test', 'kl'):.2f})"


def _worlds_table(outcome: Outcome, chosen: dict[str, dict[tuple[str, float], AtLevel]]) -> Section:
    """Arms by worlds: the difference to the control at one KL level, with what its interval says."""
    study = outcome.study
    level = SUMMARY_LEVEL if SUMMARY_LEVEL in study.kl_levels else study.kl_levels[len(study.kl_levels) // 2]
    results = {world: by_arm(outcome, world) for world in outcome.worlds}
    rows: list[Row] = []
    for name in dict.fromkeys(arm.name for arm in outcome.arms if arm.name != study.control):
        row: Row = {"arm": name}
        for world in outcome.worlds:
            found = chosen[world].get((name, level))
            versus = None if found is None else found.versus
            lost = str(lost_row(outcome, name, world)["point"]) if not results[world].get(name) else NONE
            row[world] = lost if versus is None else f"{difference_text(versus)} {verdict(versus)}"
        rows.append(row)
    note = (
        f"difference to {study.control} of the same world at validation KL up to {level:g}; helps or harms: its 95 % "
        "interval excludes 0, not corrected for the number of cells"
    )
    table = TableBlock(["arm", *outcome.worlds], rows)
    return Section(f"Worlds: difference to {study.control} at equal KL", [table, Paragraph(note)])
