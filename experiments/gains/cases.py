"""Gain of judge weights over uniform weights in finished studies, and what could be known of it before training.

Arms are told by what they are configured as, never by name: TwDPO in its plain form, whose weights are a judge's
attention as it is read, beside the same with uniform weights, which is DPO. ``cases.json`` holds what a report found:
studies that ran elsewhere are read from it without their folders.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path

import pandas

from attnpo.lab.results import ANALYSES, RECORD, StudyResults
from attnpo.lab.studies.arms import LATER
from attnpo.lab.studies.faithfulness import ROLLOUT
from attnpo.lab.studies.outcome import group_by_point, has_truth, rewards_at_kl
from attnpo.lab.studies.study import BETA, LR, Point
from attnpo.objectives.twdpo import TwDPO
from attnpo.run.identity import component_class, flatten_with_classes
from attnpo.run.result import RunResult
from attnpo.schema import UserError, digest
from attnpo.system.files import Json, read_record, safe_filename, write_record
from attnpo.weights.faithfulness import faithfulness_score
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.rollout import Rollout
from attnpo.weights.sources.uniform import Uniform

FILE = "cases.json"
SOURCE, OBJECTIVE, NOISE = "weights._target_", "objective._target_", "prepare.pairs.label_noise"
# Where the arms of a comparison may differ beside their weights: axes of the grid, and how weights reach the tokens.
FREE = (SOURCE, LR, BETA, "align.method", "objective.length_from")
OF_LENGTH = ("beta", "length_scale", "length_from")  # fields of TwDPO in which its plain forms differ
# Known before training, by its place in a run's inputs; derived from them; and from the study's faithfulness analysis.
AGREEMENT, SHARE, LENGTH = "agreement with labels", "effective share", "response length"
INPUTS = {
    AGREEMENT: ("judge", "pair_accuracy"),
    "agreement of both orders": ("judge", "consistency"),
    SHARE: ("train", "effective_share"),
    "training pairs": ("train", "pairs"),
    "coverage": ("train", "coverage"),
}
EFFECTIVE, FAITHFUL = "effective number", "faithfulness"
KNOWN = (*INPUTS, LENGTH, EFFECTIVE, FAITHFUL)
HIDDEN = (TRUE_NOISE, TRUE_MASS) = "true label noise", "true mass"
NUMBERS = (*KNOWN, *HIDDEN)
Record = Mapping[str, Json]
Measured = dict[int | str, tuple[float, float]]  # faithfulness and true mass, by layer or name of the weights


@dataclass
class Harvest:
    """Cases of all studies as they are found, some of them in several.

    ``names``: of worlds, by the digest of their settings. ``lost``: how many could not be compared, by reason.
    """

    found: list[dict[str, object]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)

    def add(self, key: str, world: str, seed: int, group: str, gain: float, known: Mapping[str, float]) -> None:
        """Adds a case; one that is there already only gains what it did not know."""
        self.found.append({"key": key, "world": world, "seed": seed, "group": group, "gain": gain, **known})

    def cases(self) -> pandas.DataFrame:
        """Returns every case once, by its key, with a column per number, NaN where it is not known."""
        frame = pandas.DataFrame(self.found, columns=["key", "world", "seed", "group", "gain", *NUMBERS])
        return frame.astype(dict.fromkeys(("gain", *NUMBERS), float)).groupby("key", sort=False).first()


def collect(study: StudyResults, name: str, level: float, harvest: Harvest) -> list[str]:
    """Adds every case of a study to ``harvest``; returns what must be said of it."""
    arms: dict[str, Record] | None = study.record.get("arms")
    if arms is None:
        raise UserError(
            f"{study.path}/{RECORD}: expected the configs of the study's arms; run the study's command again"
        )
    measured, notes = analyses_in(study.path)
    for label, control in comparisons(arms):
        mine, other = ([one[:2] for one in study.finished_points(arm)] for arm in (label, control))
        settings = with_paths(arms[control])
        base = digest({key: value for key, value in settings.items() if key not in (LR, BETA)})
        for seed in sorted({point.seed for point, _ in mine}):
            one, control_one = ([run for run in runs if run[0].seed == seed] for runs in (mine, other))
            reason, gain = gain_at(one, control_one, level)
            if reason:
                harvest.lost[reason] += 1
                continue
            point, result = one[0]
            place = f"{name}: {point.arm.world}" if point.arm.world else name
            known = known_before(result, arms[label], measured.get((safe_filename(point.arm.world), seed), {}))
            grids = [sorted(point.values for point, _ in runs) for runs in (one, control_one)]
            key = digest({"arm": with_paths(arms[label]), "base": base, "grids": grids, "seed": seed})
            harvest.add(key, harvest.names.setdefault(base, place), seed, f"{place}, seed {seed}", gain, known)
    return notes


def comparisons(arms: Mapping[str, Record]) -> Iterator[tuple[str, str]]:
    """Yields the arms of judge weights, each with the arm of uniform weights from which it differs in these alone."""
    plain = {label: record for label, record in arms.items() if is_plain(record)}
    uniform = [label for label, record in plain.items() if is_class(record[SOURCE], Uniform)]
    for label, record in plain.items():
        if is_class(record[SOURCE], Attention, Rollout):
            same = [one for one in uniform if _only_weights_differ(record, plain[one])]
            yield from ((label, one) for one in same[:1])


def with_paths(record: Record) -> dict[str, object]:
    """Returns what decides an arm's numbers, equal whichever version wrote it and whether drift was measured or not."""
    return {
        key: value
        for key, value in flatten_with_classes(record).items()
        if not key.startswith("drift.") and not (key in LATER and LATER[key] == value)
    }


def is_plain(record: Record) -> bool:
    """Returns whether an arm trains by TwDPO without anything added to it, on weights as they are read."""
    transformed = any(key.startswith("transforms.") for key in record)
    values = {f"objective.{item.name}": item.default for item in fields(TwDPO) if item.name not in OF_LENGTH}
    plain = all(record.get(key, _plain(value)) == _plain(value) for key, value in values.items())
    return is_class(record.get(OBJECTIVE), TwDPO) and SOURCE in record and plain and not transformed


def _only_weights_differ(one: Record, other: Record) -> bool:
    return all(one[key] == other[key] for key in one.keys() & other.keys() if key not in FREE)


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def is_class(value: object, *classes: type) -> bool:
    """Tells whether an arm's component is one of ``classes``, whichever version wrote its record."""
    return component_class(value) in {one.__name__ for one in classes}


def gain_at(
    mine: Sequence[tuple[Point, RunResult]], control: Sequence[tuple[Point, RunResult]], level: float
) -> tuple[str, float]:
    """Returns the test reward less the control's at a KL level, each on its own path.

    Or the reason why there is none.
    """
    places = []
    for whose, runs in (("the arm", mine), ("the control", control)):
        points = group_by_point(runs)
        if not points or not has_truth(points):
            return f"{whose} has no points with a known truth", math.nan
        place = rewards_at_kl(points, level)
        if place is None or place.mark:
            return f"{whose}'s path has no point near KL {level:g}", math.nan
        places.append(place)
    return "", places[0].mean_reward - places[1].mean_reward


# ------------------------------------------------------------------------------------------------ what is known


def known_before(result: RunResult, record: Record, measured: Measured) -> dict[str, float]:
    """Returns what a user could know of an arm before training, and what the testbed alone knows.

    NaN where nobody does.
    """
    known = {name: result.input(*place) for name, place in INPUTS.items()}
    known[LENGTH] = sum(result.input("train", f"tokens.{side}.p50") for side in ("chosen", "rejected")) / 2
    known[EFFECTIVE] = known[SHARE] * known[LENGTH]
    known[FAITHFUL], known[TRUE_MASS] = measured.get(_row_of(record), (math.nan, math.nan))
    noise = record.get(NOISE)
    known[TRUE_NOISE] = float(noise) if isinstance(noise, int | float) else math.nan
    return known


def _row_of(record: Record) -> int | str:
    """Returns what an analysis calls an arm's weights: the layer, or the rollout.

    Empty for several layers or chosen heads.
    """
    layer = record.get("weights.layer")
    if is_class(record[SOURCE], Rollout):
        return ROLLOUT
    return "" if record.get("weights.layers") or record.get("weights.heads") or not isinstance(layer, int) else layer


def analyses_in(folder: Path) -> tuple[dict[tuple[str, int], Measured], list[str]]:
    """Returns what a study measured before training by world (as files name it) and seed, and what must be said of it.

    Of several measures of a world and seed, which other versions or settings leave, the newest counts.
    """
    out: dict[tuple[str, int], Measured] = {}
    twice = set()
    for path in sorted((folder / ANALYSES).glob("*.json"), key=lambda path: path.stat().st_mtime):
        named = re.fullmatch(r"[^-]+(?:-(.+))?-seed(\d+)-[0-9a-f]{16}", path.stem)
        measured = None if named is None else _faithfulness_in(path)
        if named is None or measured is None:
            continue
        place = (named[1] or "", int(named[2]))
        twice |= {place} & out.keys()
        out[place] = measured
    notes = [
        f"{folder.name}: several measures of faithfulness, the newest taken: {f'{world}, ' if world else ''}seed {seed}"
        for world, seed in sorted(twice)
    ]
    return out, notes


def _faithfulness_in(path: Path) -> Measured | None:
    """Reads score and true mass by layer or name; None for a damaged file or another kind of analysis."""
    try:
        return {
            name if one["layer"] is None else one["layer"]: (
                faithfulness_score(one),
                math.nan if one["mass"] is None else one["mass"],
            )
            for name, one in (read_record(path) or {})["found"]["weights"].items()
        }
    except (AttributeError, KeyError, TypeError, ZeroDivisionError):
        return None


# ------------------------------------------------------------------------------------------------ their file


def write_cases(path: Path, level: float, harvest: Harvest) -> None:
    """Writes all cases at KL ``level``, with a digest of the whole; the keys of cases and worlds say what made them."""
    worlds = {name: key for key, name in harvest.names.items()}
    cases = {
        str(key): {
            "world": worlds[row["world"]],
            **{name: row[name] for name in ("seed", "group", "gain")},
            "known": {name: row[name] for name in NUMBERS if math.isfinite(row[name])},
        }
        for key, row in harvest.cases().to_dict("index").items()
    }
    named = {key: name for key, name in harvest.names.items() if any(one["world"] == key for one in cases.values())}
    write_record(path, {"level": level, "worlds": named, "cases": cases, "lost": dict(harvest.lost)})


def read_cases(path: Path, level: float, harvest: Harvest) -> None:
    """Adds the cases of a file to ``harvest``; a world it knows already keeps its name there.

    UserError for a file that another KL level made, that has changed since it was written, or that is none.
    """
    content = read_record(path)
    if content is None or not {"level", "worlds", "cases", "lost"} <= content.keys():
        raise UserError(
            f"{path}: expected the {FILE} of an earlier report, unchanged since; make it again from the studies"
        )
    made_at = content["level"]
    if made_at != level:
        raise UserError(
            f"{path}: expected cases at KL {level:g}, it has those at KL {made_at:g}; give --kl {made_at:g}"
        )
    taken = set(harvest.names.values())
    for key, name in content["worlds"].items():
        harvest.names.setdefault(key, name if name not in taken else f"{name} ({key[:6]})")
    for key, one in content["cases"].items():
        harvest.add(key, harvest.names[one["world"]], one["seed"], one["group"], one["gain"], one["known"])
    harvest.lost.update(content["lost"])
