"""A study's benchmarks shown: columns of its main table, what they stand on, and a figure over layers."""

from collections import Counter
from collections.abc import Iterator

from attnpo.display.look import Level, Looks
from attnpo.display.page import Image
from attnpo.display.tables import Cell
from attnpo.evaluation.spreads import grading_noise
from attnpo.lab.figures import LayerPoint, layer_curve
from attnpo.lab.studies.benchmark_scores import BASE_ROW, RowScore
from attnpo.lab.studies.study import Outcome
from attnpo.system.files import clean

OVER_SEEDS, GRADING = " ±", " grading"
SHARE_DIGITS, DIGITS = 4, 2  # of figures between -1 and 1, and of others


def benchmark_cells(outcome: Outcome, world: str, row: str) -> dict[str, Cell]:
    """Returns the cells of a row: the mean over seeds, its half width where there are several, the
    spread of grading.
    """
    cells: dict[str, Cell] = {}
    for name, rows in outcome.benchmarks.items():
        score = rows.get((world, row))
        if score is None:
            continue
        cells[name] = score.failed or score.mean
        if any(other.half_width is not None for other in rows.values()):
            cells[name + OVER_SEEDS] = score.half_width
        if any(other.grading is not None for other in rows.values()):
            cells[name + GRADING] = None if score.failed else score.grading
    return cells


def benchmark_digits(outcome: Outcome) -> dict[str, int]:
    """Decimals of the benchmarks' columns."""
    digits = {}
    for name, rows in outcome.benchmarks.items():
        largest = max((abs(value) for score in rows.values() for value in score.values), default=0.0)
        for head in (name, name + OVER_SEEDS, name + GRADING):
            digits[head] = SHARE_DIGITS if largest <= 1 else DIGITS
    return digits


def benchmark_notes(outcome: Outcome) -> Iterator[str]:
    """Yields what the columns of each benchmark are, what differs by no more than noise, and what was missing."""
    for name, rows in outcome.benchmarks.items():
        known = [score for score in rows.values() if not score.failed]
        if not known:
            continue
        first = known[0]
        rounds = "1 round" if first.rounds == 1 else f"{first.rounds} rounds, their mean"
        parts = [f"{name}: {first.name} of {first.questions} questions in {rounds}"]
        if any(score.half_width is not None for score in known):
            parts.append("± half width of the 95 % interval over seeds (Student's t)")
        if any(score.grading is not None for score in known):
            parts.append("grading: standard deviation from grading the same answers again")
        yield "; ".join(parts)
        yield from _within_noise(outcome, name)
        counts: Counter[str] = Counter()
        for score in rows.values():
            counts.update(score.counts)
        if +counts:
            yield f"{name}, counted over all rows: {', '.join(f'{why} {count}' for why, count in (+counts).items())}"


def _within_noise(outcome: Outcome, benchmark: str) -> Iterator[str]:
    """Names the rows of each world whose difference to the control, else to the base, is below the grading noise."""
    rows = outcome.benchmarks[benchmark]
    against = outcome.study.control or BASE_ROW
    for world in outcome.worlds:
        control = rows.get((world, against))
        if control is None:
            continue
        names = [
            name for (of, name), score in rows.items() if of == world and name != against and _same(score, control)
        ]
        if names:
            where = f"{world}: " if world else ""
            yield (
                f"{benchmark}: {where}differs from {against} by less than the grading noise of a difference, "
                f"1.96 sqrt(a^2 + b^2), which is no difference: {', '.join(names)}"
            )


def _same(one: RowScore, other: RowScore) -> bool:
    if one.failed or other.failed or one.grading is None or other.grading is None:
        return False
    return abs(one.mean - other.mean) < grading_noise(one.grading, other.grading)


def layer_figures(outcome: Outcome, world: str, looks: Looks) -> Iterator[Image]:
    """Yields a figure per benchmark of score over layer, the other rows as levels; none where arms are no layers."""
    arms = [arm for arm in outcome.arms if arm.world == world]
    of, stem = (f", world {world}", f"-{clean(world)}") if world else ("", "")
    for name, rows in outcome.benchmarks.items():
        scored = {row: score for (at, row), score in rows.items() if at == world and not score.failed}
        layers = [
            LayerPoint(arm.layer, scored[arm.name].mean, *scored[arm.name].bounds, arm.name)
            for arm in arms
            if arm.layer is not None and arm.name in scored
        ]
        if len(layers) < 2:
            continue
        split = {arm.name for arm in arms if arm.layer is not None}
        title = f"{outcome.study.name}{f', {world}' if world else ''}: {name}, each arm at its chosen point"
        path = layer_curve(
            layers,
            outcome.folder / f"layers-{clean(name)}{stem}.png",
            baselines={row: Level(score.mean, *score.bounds) for row, score in scored.items() if row not in split},
            ylabel=f"{name} ({scored[next(iter(scored))].name})",
            title=title,
            looks=looks,
            control=outcome.study.control,
        )
        several = any(score.half_width is not None for score in scored.values())
        bars = "seeds" if several else "questions"
        yield Image(path, f"{name} by layer{of}, each at its chosen grid point, with 95 % intervals over {bars}")
