"""Collects the gains of judge weights over uniform weights in finished studies, and numbers known before training.

Arms are recognised by their configuration, never by name: plain TwDPO with a judge's untransformed attention, and the
same with uniform weights, which is DPO. ``cases.json`` stores the cases of a report, so that studies that ran elsewhere
can be used without their folders.
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
from attnpo.run.identity import flatten_with_classes, shorten_class_path
from attnpo.run.result import RunResult
from attnpo.schema import UserError, digest
from attnpo.system.files import Json, read_record, safe_filename, write_record
from attnpo.weights.faithfulness import faithfulness_score
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.rollout import Rollout
from attnpo.weights.sources.uniform import Uniform

FILE = "cases.json"
SOURCE, OBJECTIVE, NOISE = "weights._target_", "objective._target_", "prepare.pairs.label_noise"
# Keys in which compared arms may differ besides their weights: axes of the grid, and alignment.
FREE = (SOURCE, LR, BETA, "align.method", "objective.length_from")
OF_LENGTH = ("beta", "length_scale", "length_from")  # fields that may vary in plain TwDPO
# Numbers known before training, by their place in a run's inputs.
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
    """Collected cases of all studies; a case may occur in several studies.

    ``names``: names of worlds by digest of their settings. ``lost``: counts of cases that could not be compared, by
    reason.
    """

    found: list[dict[str, object]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)

    def add(self, key: str, world: str, seed: int, group: str, gain: float, known: Mapping[str, float]) -> None:
        """Adds a case. A repeated case only fills in numbers that were unknown so far."""
        self.found.append({"key": key, "world": world, "seed": seed, "group": group, "gain": gain, **known})

    def cases(self) -> pandas.DataFrame:
        """Returns one row per case by key, with one column per number, NaN if unknown."""
        frame = pandas.DataFrame(self.found, columns=["key", "world", "seed", "group", "gain", *NUMBERS])
        return frame.astype(dict.fromkeys(("gain", *NUMBERS), float)).groupby("key", sort=False).first()


def collect_study_cases(study: StudyResults, name: str, level: float, harvest: Harvest) -> list[str]:
    """Adds every case of a study to ``harvest``; returns notes."""
    arms: dict[str, Record] | None = study.record.get("arms")
    if arms is None:
        raise UserError(
            f"{study.path}/{RECORD}: expected the configs of the study's arms; run the study's command again"
        )
    measured, notes = read_analyses(study.path)
    for label, control in arms_to_compare(arms):
        mine, other = ([one[:2] for one in study.finished_points(arm)] for arm in (label, control))
        settings = numeric_settings(arms[control])
        base = digest({key: value for key, value in settings.items() if key not in (LR, BETA)})
        for seed in sorted({point.seed for point, _ in mine}):
            one, control_one = ([run for run in runs if run[0].seed == seed] for runs in (mine, other))
            reason, gain = gain_at_kl(one, control_one, level)
            if reason:
                harvest.lost[reason] += 1
                continue
            point, result = one[0]
            place = f"{name}: {point.arm.world}" if point.arm.world else name
            known = numbers_before_training(
                result, arms[label], measured.get((safe_filename(point.arm.world), seed), {})
            )
            grids = [sorted(point.values for point, _ in runs) for runs in (one, control_one)]
            key = digest({"arm": numeric_settings(arms[label]), "base": base, "grids": grids, "seed": seed})
            harvest.add(key, harvest.names.setdefault(base, place), seed, f"{place}, seed {seed}", gain, known)
    return notes


def arms_to_compare(arms: Mapping[str, Record]) -> Iterator[tuple[str, str]]:
    """Yields each arm of judge weights with the arm of uniform weights that differs from it only in the weights."""
    plain = {label: record for label, record in arms.items() if is_plain(record)}
    uniform = [label for label, record in plain.items() if is_class(record[SOURCE], Uniform)]
    for label, record in plain.items():
        if is_class(record[SOURCE], Attention, Rollout):
            same = [one for one in uniform if _only_weights_differ(record, plain[one])]
            yield from ((label, one) for one in same[:1])


def numeric_settings(record: Record) -> dict[str, object]:
    """Returns the settings that affect an arm's numbers, whichever version wrote them, without drift settings."""
    return {
        key: value
        for key, value in flatten_with_classes(record).items()
        if not key.startswith("drift.") and not (key in LATER and LATER[key] == value)
    }


def is_plain(record: Record) -> bool:
    """Returns whether an arm uses plain TwDPO, without extra terms, on untransformed weights."""
    transformed = any(key.startswith("transforms.") for key in record)
    values = {f"objective.{item.name}": item.default for item in fields(TwDPO) if item.name not in OF_LENGTH}
    plain = all(record.get(key, _plain_value(value)) == _plain_value(value) for key, value in values.items())
    return is_class(record.get(OBJECTIVE), TwDPO) and SOURCE in record and plain and not transformed


def _only_weights_differ(one: Record, other: Record) -> bool:
    return all(one[key] == other[key] for key in one.keys() & other.keys() if key not in FREE)


def _plain_value(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def is_class(value: object, *classes: type) -> bool:
    """Returns whether an arm's component is one of ``classes``, whichever version wrote its record."""
    return shorten_class_path(value) in {one.__name__ for one in classes}


def gain_at_kl(
    mine: Sequence[tuple[Point, RunResult]], control: Sequence[tuple[Point, RunResult]], level: float
) -> tuple[str, float]:
    """Returns the test reward minus the control's at a KL level, each interpolated over its own grid points.

    The first value is "", or else the reason why there is no gain.
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


def numbers_before_training(result: RunResult, record: Record, measured: Measured) -> dict[str, float]:
    """Returns the numbers of an arm that a user or only the testbed knows before training; NaN if unknown."""
    known = {name: result.input(*place) for name, place in INPUTS.items()}
    known[LENGTH] = sum(result.input("train", f"tokens.{side}.p50") for side in ("chosen", "rejected")) / 2
    known[EFFECTIVE] = known[SHARE] * known[LENGTH]
    known[FAITHFUL], known[TRUE_MASS] = measured.get(_analysis_row(record), (math.nan, math.nan))
    noise = record.get(NOISE)
    known[TRUE_NOISE] = float(noise) if isinstance(noise, int | float) else math.nan
    return known


def _analysis_row(record: Record) -> int | str:
    """Returns the name of an arm's weights in an analysis: the layer or the rollout; "" for several layers or heads."""
    layer = record.get("weights.layer")
    if is_class(record[SOURCE], Rollout):
        return ROLLOUT
    return "" if record.get("weights.layers") or record.get("weights.heads") or not isinstance(layer, int) else layer


def read_analyses(folder: Path) -> tuple[dict[tuple[str, int], Measured], list[str]]:
    """Reads a study's faithfulness analyses by world (as named in files) and seed; returns them with notes.

    If other versions or settings left several analyses of a world and seed, the newest counts.
    """
    out: dict[tuple[str, int], Measured] = {}
    twice = set()
    for path in sorted((folder / ANALYSES).glob("*.json"), key=lambda path: path.stat().st_mtime):
        named = re.fullmatch(r"[^-]+(?:-(.+))?-seed(\d+)-[0-9a-f]{16}", path.stem)
        measured = None if named is None else _read_faithfulness(path)
        if named is None or measured is None:
            continue
        place = (named[1] or "", int(named[2]))
        twice |= {place} & out.keys()
        out[place] = measured
    notes = [
        f"{folder.name}: several faithfulness analyses, using the newest: {f'{world}, ' if world else ''}seed {seed}"
        for world, seed in sorted(twice)
    ]
    return out, notes


def _read_faithfulness(path: Path) -> Measured | None:
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
    """Writes all cases at KL ``level`` with a checksum; keys of cases and worlds are digests of their settings."""
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
    """Adds the cases of a file to ``harvest``; known worlds keep their names.

    Raises UserError for a file of another KL level, or one that is damaged or not a case file.
    """
    content = read_record(path)
    if content is None or not {"level", "worlds", "cases", "lost"} <= content.keys():
        raise UserError(f"{path}: expected the unchanged {FILE} of an earlier report; write it again from the studies")
    made_at = content["level"]
    if made_at != level:
        raise UserError(f"{path}: expected cases at KL {level:g}, but they are at KL {made_at:g}; use --kl {made_at:g}")
    taken = set(harvest.names.values())
    for key, name in content["worlds"].items():
        harvest.names.setdefault(key, name if name not in taken else f"{name} ({key[:6]})")
    for key, one in content["cases"].items():
        harvest.add(key, harvest.names[one["world"]], one["seed"], one["group"], one["gain"], one["known"])
    harvest.lost.update(content["lost"])
