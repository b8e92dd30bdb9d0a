"""Study records: rewards at equal KL per seed, averaged over prompts; small enough to commit to Git.

Studies of the same world with the same arms can be pooled from their records into one study with all their seeds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Float

from attnpo.display.tables import Cell
from attnpo.evaluation.intervals import Interval, MeanSquares, correct_by_holm
from attnpo.lab.studies.outcome import Outcome, difference_text, paired_rewards
from attnpo.lab.studies.study import name_in_world
from attnpo.lab.studies.tables import arms_at_levels
from attnpo.schema import UserError, digest
from attnpo.system.files import parse_json

RECORDS = "records.json"
Scores = dict[str, list[list[float]]]


class RecordRow(TypedDict, total=False):
    """Row of a record: an arm at a KL level; ``squares`` are the mean squares of seeds, prompts and residuals."""

    world: str
    arm: str
    kl: float
    mark: str
    settings: str
    rewards: dict[str, float]
    differences: dict[str, float]
    squares: list[float] | None
    prompts: int


class StudyRecord(TypedDict):
    """Content of records.json; ``world`` is a digest."""

    study: str
    digest: str
    world: str
    control: str | None
    rows: list[RecordRow]


def study_record(outcome: Outcome) -> StudyRecord:
    """Returns the record of a study with a known true reward.

    Each row contains a world, an arm, a KL level, ``rewards`` by seed, a mark if the rewards are not at this level, and
    ``differences`` from the control by seed with their mean squares over seeds and prompts.
    """
    rows: list[RecordRow] = []
    settings: Any = outcome.record["arms"]
    for world in outcome.worlds:
        found = arms_at_levels(outcome, world)
        for (name, level), at in found.items():
            if at.place is None:
                continue
            row: RecordRow = {"world": world, "arm": name, "kl": level, "mark": at.mark or at.place.mark}
            control = outcome.study.control or name
            row["settings"] = digest([settings[name_in_world(world, one)] for one in (name, control)])[:16]
            row["rewards"] = _means_by_seed(at.place.seeds, at.place.rewards)
            other = found.get((control, level))
            if at.versus is not None and other is not None and other.place is not None:
                seeds, differences = paired_rewards(at.place, other.place)
                row["differences"] = _means_by_seed(seeds, differences)
                squares = at.versus.squares
                row["squares"] = None if squares is None else [squares.seed, squares.prompt, squares.residual]
                row["prompts"] = differences.shape[1]
            rows.append(row)
    world_digest = digest(outcome.record["world"])[:16]
    study = outcome.study
    return StudyRecord(study=study.name, digest=outcome.digest, world=world_digest, control=study.control, rows=rows)


def _means_by_seed(seeds: Sequence[int], rewards: Float[np.ndarray, "seeds prompts"]) -> dict[str, float]:
    return {str(seed): round(float(mean), 6) for seed, mean in zip(seeds, rewards.mean(axis=1), strict=True)}


def read_study_record(path: Path) -> StudyRecord:
    """Reads a record from a file or a study folder. Raises UserError if it is not a record."""
    file = path / RECORDS if path.is_dir() else path
    try:
        content: StudyRecord = parse_json(file.read_text(encoding="utf-8"))
        _ = content["world"], content["control"], [row["rewards"] for row in content["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UserError(f"{file}: expected a study's {RECORDS}, as written by fit: {problem!r}") from problem
    return content


def pool_records(records: Sequence[StudyRecord]) -> list[dict[str, Cell]]:
    """Pools differences from studies of the same world; adds p-values with and without Holm's correction.

    Raises:
        UserError: worlds, controls or arms differ between the studies, or two studies have the same seed.
    """
    for key, values in (
        ("world", {record["world"] for record in records}),
        ("control", {record["control"] for record in records}),
    ):
        if len(values) > 1:
            raise UserError(f"report pool: the studies differ in their {key}: only pool studies with the same {key}")
    found: dict[tuple[str, str, float], list[RecordRow]] = {}
    for record in records:
        for row in record["rows"]:
            if row.get("squares") and not row["mark"]:
                found.setdefault((row["world"], row["arm"], row["kl"]), []).append(row)
    pooled = {place: _pool_rows(place, rows) for place, rows in found.items()}
    p_values = [squares.p_value(value.mean) for value in pooled.values() if (squares := value.squares)]
    corrected = correct_by_holm(p_values)
    return [
        {
            **({"world": world} if world else {}),
            **{"arm": arm, "KL": level, "seeds": value.seeds, "difference": difference_text(value)},
            **{"p": p_text(alone), f"p, Holm over {len(pooled)}": p_text(of_all)},
        }
        for ((world, arm, level), value), alone, of_all in zip(pooled.items(), p_values, corrected, strict=True)
    ]


def p_text(value: float) -> str:
    """Formats a p-value with four decimals, or as "<0.0001"."""
    return f"{value:.4f}" if value >= 0.0001 else "<0.0001"


def _pool_rows(place: tuple[str, str, float], rows: Sequence[RecordRow]) -> Interval:
    """Returns the mean difference over all seeds; prompt and residual variances are averaged over the studies."""
    world, arm, level = place
    at = f"report pool: {arm} at KL {level:g}{f' in {world}' if world else ''}"
    if len({row["settings"] for row in rows}) > 1 or len({row["prompts"] for row in rows}) > 1:
        raise UserError(f"{at}: the studies differ in this arm's settings or prompts and cannot be pooled")
    seeds = [seed for row in rows for seed in row["differences"]]
    if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        raise UserError(f"{at}: several studies have seed {', '.join(repeated)}, but each seed may be used only once")
    sizes, prompts = [len(row["differences"]) for row in rows], rows[0]["prompts"]
    means = np.array([gain for row in rows for gain in row["differences"].values()])
    weights = np.array(sizes) - 1
    _, of_prompts, of_residuals = np.array([row["squares"] for row in rows]).T
    residual = float(np.average(of_residuals, weights=weights))
    shared = (of_prompts - of_residuals) / sizes
    prompt = residual + len(seeds) * max(0.0, float(np.average(shared, weights=weights)))
    squares = MeanSquares(prompts * float(means.var(ddof=1)), prompt, residual, len(seeds), prompts)
    mean, reach = float(means.mean()), squares.half_width()
    return Interval(mean, mean - reach, mean + reach, len(seeds), prompts, squares)


def rliable_scores(records: Sequence[StudyRecord]) -> tuple[Scores, list[str]]:
    """Returns scores in rliable's format (arm -> runs x tasks), and the arms omitted because a score is missing.

    Each seed is a run, and each pair of world and KL level is a task. Scores not at their KL level count as missing.
    """
    scores: dict[str, dict[tuple[str, tuple[str, float]], float]] = {}
    for row in (row for record in records for row in record["rows"]):
        cells = scores.setdefault(row["arm"], {})
        for seed, reward in row["rewards"].items():
            if not row["mark"]:
                cells[seed, (row["world"], row["kl"])] = reward
    runs = sorted({seed for cells in scores.values() for seed, _ in cells}, key=int)
    tasks = sorted({task for cells in scores.values() for _, task in cells})
    whole = {arm: cells for arm, cells in scores.items() if len(cells) == len(runs) * len(tasks)}
    table = {arm: [[cells[seed, task] for task in tasks] for seed in runs] for arm, cells in whole.items()}
    return table, [arm for arm in scores if arm not in whole]
