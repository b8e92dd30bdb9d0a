"""Arms compared at equal KL, level by level and over worlds, each on its own path over the grid."""

from collections.abc import Iterator
from dataclasses import dataclass

from attnpo.analysis.page import Paragraph, Section, TableBlock
from attnpo.studies.frontier import AtKL, at_kl, difference
from attnpo.studies.intervals import Interval
from attnpo.studies.runner import Outcome
from attnpo.studies.spots import all_seeds, by_arm, difference_text, gather, has_truth, verdict
from attnpo.studies.tables import Row, columns_of, lost_row

NONE = "-"
ENDS = "<"  # behind a value: no point of the arm goes as far as the level
NOT_EQUAL = "not at equal KL"
SUMMARY_LEVEL = 1.0  # nats: where worlds are compared, if the study has this level


def level_tables(outcome: Outcome) -> list[Section]:
    """Rewards at equal KL, and over worlds; none without a truth, without levels or where no arm has a choice."""
    study = outcome.study
    tuned = any(len((arm.grid or study.grid).overrides()) > 1 for arm in outcome.arms)
    if not study.kl_levels or not tuned or not has_truth(gather(outcome.points)):
        return []
    chosen = {world: at_levels(outcome, world) for world in outcome.worlds}
    note = (
        "test reward on each arm's own path: the base, then the grid points by KL whose validation reward is above "
        "those of all with less; linear in the root of KL between neighbours. In brackets the KL of the path's best "
        f"point where nothing beyond is better on validation; {ENDS} the path ends there, not a comparison at equal KL"
    )
    if study.control is not None:
        note += f"; differences to {study.control} at the same level, paired by seed and prompt"
    note += _few_seeds(outcome, chosen)
    rows = [row for world in outcome.worlds for row in _level_rows(outcome, world, chosen[world])]
    tables = [Section("Reward at equal KL", [TableBlock(columns_of(rows), rows), Paragraph(note)])]
    if study.worlds and study.control is not None:
        tables.append(_worlds_table(outcome, chosen))
    return tables


def _few_seeds(outcome: Outcome, chosen: dict[str, dict[tuple[str, float], "AtLevel"]]) -> str:
    """The arms whose paths stand on fewer seeds than the study has, for the note; empty if there are none."""
    every = len(all_seeds(outcome))
    few = [
        f"{f'{world}: ' if world else ''}{name} on {len(at.found.seeds)}"
        for world, places in chosen.items()
        for (name, _), at in places.items()
        if at.found is not None and len(at.found.seeds) < every
    ]
    return f"; on fewer seeds than the study's {every}: {', '.join(dict.fromkeys(few))}" if few else ""


@dataclass(frozen=True)
class AtLevel:
    """An arm at a KL level and its difference to the control there; each None where there is none.

    ``equal``: both reach the level, so that the difference is one at equal KL.
    """

    found: AtKL | None
    versus: Interval | None
    equal: bool = False

    @property
    def difference(self) -> str:
        """The difference in words, marked where it is none at equal KL."""
        return NONE if self.versus is None else difference_text(self.versus) + ("" if self.equal else ENDS)


def at_levels(outcome: Outcome, world: str) -> dict[tuple[str, float], AtLevel]:
    """A world's arms at every KL level, with their differences to the control."""
    spots = by_arm(outcome, world)
    out = {}
    for level in outcome.study.kl_levels:
        places = {name: at_kl(mine, level) for name, mine in spots.items()}
        control = places.get(outcome.study.control or "")
        for name, found in places.items():
            if found is None or control is None or name == outcome.study.control:
                out[name, level] = AtLevel(found, None)
            else:
                out[name, level] = AtLevel(found, difference(found, control), found.reached and control.reached)
    return out


def _level_rows(outcome: Outcome, world: str, chosen: dict[tuple[str, float], AtLevel]) -> Iterator[Row]:
    study = outcome.study
    for name, spots in by_arm(outcome, world).items():
        row: Row = {**({"world": world} if world else {}), "arm": name}
        for level in study.kl_levels:
            found = chosen[name, level]
            lost = str(lost_row(outcome, name, world)["point"]) if not spots else NONE
            row[f"KL {level:g}"] = lost if found.found is None else _reward(found.found, level)
            if study.control is not None:
                row[f"minus {study.control}, KL {level:g}"] = "" if name == study.control else found.difference
        yield row


def _reward(found: AtKL, level: float) -> str:
    return f"{found.reward:.3f}{'' if found.reached else ENDS}{'' if found.kl == level else f' ({found.kl:.2f})'}"


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
            if found is None or found.versus is None:
                row[world] = NONE if results[world].get(name) else str(lost_row(outcome, name, world)["point"])
            else:
                row[world] = f"{found.difference} {verdict(found.versus) if found.equal else NOT_EQUAL}"
        rows.append(row)
    note = (
        f"difference to {study.control} of the same world at KL {level:g}; helps or harms: its 95 % interval excludes "
        "0, not corrected for the number of cells"
    )
    table = TableBlock(["arm", *outcome.worlds], rows)
    return Section(f"Worlds: difference to {study.control} at equal KL", [table, Paragraph(note)])
