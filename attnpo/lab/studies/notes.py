"""Text of a study's report: warnings above the table, footnotes below it, the conclusion and suggested commands."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from attnpo.cli.terminal import command_text
from attnpo.config.compose import Composition, load
from attnpo.evaluation.intervals import Interval
from attnpo.lab.studies.arms import override_key
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.outcome import Outcome, PointResults, difference_text, reward_difference, values_label, verdict
from attnpo.lab.studies.plan import plan_study
from attnpo.lab.studies.predictions import registration_warnings
from attnpo.lab.studies.study import Arm, Grid, Point, last_line, name_in_world, short_key
from attnpo.lab.studies.tables import arms_at_levels, benchmark_notes
from attnpo.run.result import RunResult
from attnpo.schema import UserError
from attnpo.weights.arrival import KEPT_MASS

NO_CONTROL = (
    "WARNING: there is no control that keeps the sharpness of the weights but destroys their placement "
    "(transform=shuffled), so the cause of a better result is unclear; experiment=controls has all controls"
)


def study_warnings(outcome: Outcome) -> list[str]:
    """Returns warnings about the main table: a missing control, a single arm, failed training, unregistered settings.

    Includes the warnings collected while the study ran.
    """
    study, out = outcome.study, []
    names = dict.fromkeys(arm.name for arm in outcome.arms)
    if len(names) == 1:
        out.append("WARNING: the study has a single arm, so there is nothing to compare it with")
    elif study.control is None:
        out.append("WARNING: there is no control arm (study.control=null), so no differences are shown")
    best = {world: outcome.best_points(world) for world in outcome.worlds}
    for world, found in best.items():
        if study.control is not None and study.control not in found:
            where = f" in world {world}" if world else ""
            out.append(f"WARNING: the control {study.control} has no results{where}, so no arm is compared{where}")
    if len(names) > 1 and not any(_is_control(outcome, point.arm) for point, _ in outcome.points):
        out.append(NO_CONTROL)
    out += [f"WARNING: {line}" for line in registration_warnings(outcome)]
    out += [line for found in best.values() for line in training_warnings(found)]
    overlaps = dict.fromkeys((point.arm.world, result.overlap_warning) for point, result in outcome.points)
    shared = [(f"world {world}" if world else "", warning) for world, warning in overlaps]
    judges = [(where, result.judge_warning) for where, result in _results_by_judge(outcome)]
    told = [f"WARNING: {f'{of}: ' if of else ''}{warning}" for of, warning in (*shared, *judges) if warning is not None]
    return [*out, *outcome.warnings, *told, *_lost_weight_warnings(outcome)]


def _is_control(outcome: Outcome, arm: Arm) -> bool:
    """Returns whether an arm is an additional control: one with transformed weights or with true importance."""
    changed = any(override_key(item) == "transform" and not item.endswith("=null") for item in arm.overrides)
    return arm.name in outcome.study.truth_arms or (changed and arm.name != outcome.study.control)


def training_warnings(best: Mapping[str, PointResults]) -> Iterator[str]:
    """Yields warnings for arms whose best point left the model unchanged or destroyed it with any seed."""
    for name, point in best.items():
        for text in dict.fromkeys(result.training_warning for result in point.results if result.training_warning):
            yield f"WARNING: {name}: {text}"


def footnotes(outcome: Outcome) -> list[str]:
    """Returns the main table's footnotes: seeds, point selection, grids, digest, judges, costs and failures."""
    seeds = sorted({point.seed for point, _ in outcome.points})
    lost = [str(seed) for seed in outcome.seeds if seed not in seeds]
    without = f" (none for seed {', '.join(lost)})" if lost else ""
    lines = [
        f"seeds {', '.join(map(str, seeds))}; {len(outcome.points)} runs{without}, each scored after its last step",
        selection_note(outcome),
        *_grid_notes(outcome),
        *_incomplete_points_note(outcome),
        *_grid_edge_note(outcome),
        f"digest of world, grid{', arms and predictions' if outcome.study.predictions else ' and arms'}, fixed before "
        f"the runs: {outcome.digest}",
    ]
    if len(seeds) == 1:
        known = outcome.has_truth
        shown = "the intervals only cover the choice of prompts, not" if known else "nothing here measures"
        lines.append(f"one seed: {shown} the noise of training")
    return [
        *lines,
        *benchmark_notes(outcome),
        *_judge_notes(outcome),
        *_cost_note(outcome),
        *_failure_notes(outcome),
        *outcome.unmeasured,
    ]


def selection_note(outcome: Outcome) -> str:
    """Returns a note on how each arm's point was selected, and which data the scores come from."""
    one = all(len((arm.grid or outcome.study.grid).point_overrides()) == 1 for arm in outcome.arms)
    if outcome.has_truth:
        tuned = f"points selected on validation prompts with KL up to {outcome.study.kl_limit:g}"
        shown = f"reward and intervals are on {'' if one else 'other, '}held-out test prompts"
        return f"{'one point per arm, nothing tuned' if one else tuned}; {shown}"
    chosen = "one point per arm" if one else "points selected by validation accuracy"
    return (
        f"{chosen}; scores are on the same validation pairs and therefore slightly optimistic; chosen tokens and "
        "rejected tokens are median lengths of the training responses"
    )


def _grid_notes(outcome: Outcome) -> Iterator[str]:
    """Yields a note on the shared grid, if any arm uses it, and one for each group of arms with identical grids."""
    study = outcome.study
    arms = dict.fromkeys(arm.name if arm.layer is None else study.layer_arm for arm in outcome.arms)
    own = {name: grid for name, grid in study.grids.items() if grid != study.grid}
    if not own or any(name not in own for name in arms):
        yield f"grid of all arms{' except those listed next' if own else ''}: {study.grid}"
    alike: dict[str, list[str]] = {}
    for name, grid in own.items():
        said = f" ({grid.origin})" if grid.origin else ", whose beta has a different unit" if not grid.keys else ""
        alike.setdefault(f"{said}: {grid}", []).append(name)
    for text, names in alike.items():
        yield f"grid of {', '.join(names)}{text}"


def _incomplete_points_note(outcome: Outcome) -> Iterator[str]:
    """Yields a note on grid points that could not be selected because some of their seeds are missing."""
    ran = dict.fromkeys((point.arm.label, point.values) for point, _ in (*outcome.points, *outcome.failed))
    parts = []
    for world in outcome.worlds:
        for name, points in outcome.points_by_arm(world).items():
            have = {point.values: len(point.results) for point in points}
            label = name_in_world(world, name)
            parts += [
                f"{label} {values_label(values)}{outcome.missing_seeds_mark(have.get(values, 0))}"
                for of, values in ran
                if of == label and points and have.get(values, 0) < max(have.values())
            ]
    if parts:
        yield f"grid points that could not be selected, because some of their seeds are missing: {', '.join(parts)}"


def _grid_edge_note(outcome: Outcome) -> Iterator[str]:
    """Yields a note on selected points at the edge of their grid, since a wider grid might contain a better one."""
    parts = [
        f"{name_in_world(world, name)} ({', '.join(edges)})"
        for world in outcome.worlds
        for name, point in outcome.best_points(world).items()
        if (edges := edge_axes(point, (point.arm.grid or outcome.study.grid)))
    ]
    if parts:
        yield f"selected at the edge of the grid; a wider grid might contain a better point: {', '.join(parts)}"


def edge_axes(point: PointResults, grid: Grid) -> list[str]:
    """Returns the axes (e.g. "beta 0.03") on which a point has the smallest or largest of three or more grid values."""
    given = dict(value.split("=", 1) for value in point.values)
    found = []
    for key, values in grid.axes.items():
        numbers = [float(one) for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
        if 2 < len(numbers) == len(values) and float(given[key]) in (min(numbers), max(numbers)):
            found.append(f"{short_key(key)} {given[key]}")
    return found


def _judge_notes(outcome: Outcome) -> Iterator[str]:
    """Yields a note on the quality of each judge per world and seed; judges with equal statistics count as one."""
    for where, result in _results_by_judge(outcome):
        parts = ("pair_accuracy", "agreement", "consistency", "other_tokens")
        pairs, rounds, orders, other = (f"{100 * result.input('judge', name):.1f} %" for name in parts)
        yield (
            f"{where}, on the study's pairs: {pairs} of verdicts agree with the labels (mean of both orders), {rounds} "
            f"in a single order; the two orders agree on {orders} of pairs; {other} of verdicts name neither "
            f"label"
        )


def _lost_weight_warnings(outcome: Outcome) -> Iterator[str]:
    """Yields a warning about arms that lost much weight when judge tokens were aligned with training tokens."""
    arms: dict[str, list[RunResult]] = {}
    for point, result in outcome.points:
        if "warning" in result.split("train"):
            arms.setdefault(point.arm.label, []).append(result)
    parts = [
        f"{arm} " + " and ".join(f"{fmean(one.input('train', name) for one in results):.3f}" for name in KEPT_MASS)
        for arm, results in arms.items()
    ]
    if parts:
        yield (
            "WARNING: much weight was lost when aligning with the training tokens; share of the weight kept in chosen "
            "and in rejected "
            f"responses: {', '.join(parts)}; the log and report.html of a run suggest remedies"
        )


def _results_by_judge(outcome: Outcome) -> Iterator[tuple[str, RunResult]]:
    """Yields a label for each judge (arms, world and seed) and a run result that contains its statistics."""
    judged: dict[tuple[str, int], list[tuple[RunResult, list[str]]]] = {}
    for point, result in outcome.points:
        if not result.judge:
            continue
        known = judged.setdefault((point.arm.world, point.seed), [])
        arms = next((arms for other, arms in known if other.judge == result.judge), None)
        if arms is None:
            known.append((result, [point.arm.name]))
        elif point.arm.name not in arms:
            arms.append(point.arm.name)
    worlds = {world: i for i, world in enumerate(outcome.worlds)}
    for (world, seed), found in sorted(judged.items(), key=lambda item: (worlds[item[0][0]], item[0][1])):
        for result, arms in found:
            whose = f" of {', '.join(arms)}" if len(found) > 1 else ""
            yield f"judge{whose}, {f'world {world}, ' if world else ''}seed {seed}", result


def _cost_note(outcome: Outcome) -> Iterator[str]:
    names = {"base": "base", "judge": "judge and verbalizer passes", "scorers": "training of scorers"}
    spent = {words: [cost[name] for cost in outcome.costs.values() if name in cost] for name, words in names.items()}
    parts = [f"{words} {fmean(values):.1f} s (mean of {len(values)})" for words, values in spent.items() if values]
    if parts:
        yield f"spent once for all arms, not included in s/run: {', '.join(parts)}"


def _failure_notes(outcome: Outcome) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Point]] = {}
    for point, error in outcome.failed:
        groups.setdefault((point.arm.world, last_line(error)), []).append(point)
    for (world, error), points in groups.items():
        if len(points) == 1:
            yield f"FAILED {points[0].label}: {error}"
            continue
        arms = ", ".join(dict.fromkeys(point.arm.name for point in points))
        seeds = ", ".join(dict.fromkeys(str(point.seed) for point in points))
        where = f"world {world}, " if world else ""
        yield f"FAILED {where}seed {seeds}, {len(points)} points of {arms}: {error}"


GROUPS = {"helps": "better than", "harms": "worse than", "no clear difference": "a tie with"}


def result_lines(outcome: Outcome) -> list[str]:
    """Returns the study's result in sentences, world by world; the first one begins with "Result:"."""
    lines = [name_in_world(world, text) for world in outcome.worlds for text in describe_result(outcome, world)]
    return [f"Result: {lines[0]}", *lines[1:]]


def describe_result(outcome: Outcome, world: str) -> Iterator[str]:
    """Yields sentences that compare a world's arms with the control; claims nothing if the true reward is unknown."""
    best, control = outcome.best_points(world), outcome.study.control
    if not best:
        yield "no arm has results"
        return
    if not outcome.has_truth:
        shares = {name: point.mean_metric("val/rewards/accuracies") for name, point in best.items()}
        said = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items() if not math.isnan(share))
        yield f"validation pairs ranked as labelled: {said or 'not measured'}; no claim is made without an interval"
        return
    if control not in best:
        top = max(best.values(), key=lambda point: point.reward_interval.mean)
        yield f"highest reward {top.reward_interval.mean:.3f}: {top.arm.name}; there is no control, so no claim is made"
        return
    tuned = any(len(points) > 1 for points in outcome.points_by_arm(world).values())
    level = outcome.study.kl_levels[0] if tuned and outcome.study.kl_levels else None
    equal = {name: at for (name, of), at in arms_at_levels(outcome, world).items() if of == level}
    compared: dict[str, Interval | None] = {  # no verdict on fewer seeds, as in the tables
        name: at.versus
        for name, at in equal.items()
        if at.is_at_equal_kl and at.versus is not None and at.versus.seeds == len(outcome.seeds)
    }
    where = f" at KL {level:g}" if compared else ""
    if not compared:
        compared = {name: reward_difference(point, best[control]) for name, point in best.items() if name != control}
    found: dict[str, list[str]] = {name: [] for name in GROUPS}
    for name, versus in compared.items():
        if versus is not None:
            found[verdict(versus)].append(f"{name} {difference_text(versus)}")
    for name, words in GROUPS.items():
        if found[name]:
            yield f"{words} {control}{where} (reward difference, 95 % interval): {'; '.join(found[name])}"
    if not any(found.values()):
        yield f"no arm can be compared with {control}"
    elif not tuned:
        apart = ", ".join(f"{name} {point.mean_truth_score('test', 'kl'):.2f}" for name, point in best.items())
        yield f"each arm has one point and nothing is tuned; arms are not at equal KL, because KL differs ({apart})"
    elif where:
        away = ", ".join(name for name in best if name not in (*compared, control))
        apart = f"; not at this KL with all seeds: {away}" if away else ""
        yield f"the intervals are not corrected for the number of arms{apart}"
    elif sum(map(len, found.values())) > 1:
        moved = [point.mean_truth_score("test", "kl") for point in best.values()]
        yield (
            f"each arm is at its best point; KL to the base differs ({min(moved):.2f} to {max(moved):.2f}), see the "
            "tables at equal KL; the intervals are not corrected for the number of arms"
        )
    if len(outcome.seeds) == 1:
        yield "one seed: the intervals only cover the choice of prompts, not the noise of training"


def next_commands(composed: Composition, outcome: Outcome) -> list[str]:
    """Returns commands that report on the study, run it with more seeds, and run another study in the same setting."""
    seeds = len(outcome.seeds)
    more = 5 if seeds < 5 else seeds + 5
    other = "controls" if outcome.study.name != "controls" else "layer_sweep"
    places = ("experiment", "name", "seeds", "study", "grid", "grids")
    kept = [item for item in composed.overrides if override_key(item).partition(".")[0] not in places]
    longer = [*(item for item in composed.overrides if override_key(item) != "seeds"), f"seeds={more}"]
    found = [
        _arguments_if_valid(words, composed.config_dir) for words in (longer, [f"experiment={other}", *kept, "seeds=1"])
    ]
    return [command_text("report", str(outcome.folder)), *(command_text("fit", *words) for words in found if words)]


def _arguments_if_valid(words: Sequence[str], config_dir: Path | None) -> list[str] | None:
    try:
        cfg: FitConfig = load("fit", words, config_dir)
        plan_study(cfg)
    except UserError:
        return None
    return cfg.composed.arguments()
