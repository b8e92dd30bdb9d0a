"""Words beside a study's numbers: warnings above the table, footnotes below it, the result and the next commands."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from attnpo.cli.terminal import command_text
from attnpo.config.compose import Composition, load
from attnpo.lab.studies.arms import override_key
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.outcome import Outcome, PointResults, difference_text, reward_difference, values_label, verdict
from attnpo.lab.studies.plan import plan_study
from attnpo.lab.studies.predictions import registration_warnings
from attnpo.lab.studies.study import Arm, Grid, Point, last_line, name_in_world, short_key
from attnpo.lab.studies.tables import benchmark_notes
from attnpo.run.result import RunResult
from attnpo.schema import UserError
from attnpo.weights.arrival import KEPT_MASS

NO_CONTROL = (
    "WARNING: no control that keeps sharpness and destroys placement (transform=shuffled): a lead does not show its "
    "reason; experiment=controls has them all"
)


def study_warnings(outcome: Outcome) -> list[str]:
    """Returns what keeps a table from being believed: no control, a lone arm, a lost control, ill settings.

    Behind them what the study's own checks found.
    """
    study, out = outcome.study, []
    names = dict.fromkeys(arm.name for arm in outcome.arms)
    if len(names) == 1:
        out.append("WARNING: a single arm: there is nothing to compare it with")
    elif study.control is None:
        out.append("WARNING: no control arm (study.control=null): no difference is shown")
    best = {world: outcome.best_points(world) for world in outcome.worlds}
    for world, found in best.items():
        if study.control is not None and study.control not in found:
            where = f" in world {world}" if world else ""
            out.append(f"WARNING: the control {study.control} has no results{where}: no arm is compared{where}")
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
    """Returns whether an arm is a control beside the study's own: transformed weights, or the truth as weights."""
    changed = any(override_key(item) == "transform" and not item.endswith("=null") for item in arm.overrides)
    return arm.name in outcome.study.truth_arms or (changed and arm.name != outcome.study.control)


def training_warnings(best: Mapping[str, PointResults]) -> Iterator[str]:
    """Warns of arms whose chosen point moved no weight or destroyed the model in a seed."""
    for name, point in best.items():
        for text in dict.fromkeys(result.training_warning for result in point.results if result.training_warning):
            yield f"WARNING: {name}: {text}"


def footnotes(outcome: Outcome) -> list[str]:
    """Returns what stands under the table: seeds, choice of points, what was fixed, costs, failures."""
    seeds = sorted({point.seed for point, _ in outcome.points})
    lost = [str(seed) for seed in outcome.seeds if seed not in seeds]
    without = f" (none of seed {', '.join(lost)})" if lost else ""
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
        shown = "the intervals hold for the choice of prompts only, not for" if known else "nothing here tells of"
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
    """Returns how the shown point of an arm was chosen and on what its numbers stand."""
    one = all(len((arm.grid or outcome.study.grid).point_overrides()) == 1 for arm in outcome.arms)
    if outcome.has_truth:
        tuned = f"points chosen on validation prompts with KL up to {outcome.study.kl_limit:g}"
        shown = f"reward and intervals on {'' if one else 'other, '}held-out test prompts"
        return f"{'one point per arm, nothing tuned' if one else tuned}; {shown}"
    chosen = "one point per arm" if one else "points chosen by validation accuracy"
    return (
        f"{chosen}; the numbers are of the same validation pairs, so slightly optimistic; chosen and rejected "
        "tokens are the medians of the training responses"
    )


def _grid_notes(outcome: Outcome) -> Iterator[str]:
    """Yields the study's grid, where an arm has it, and those of single arms, alike ones in one line."""
    study = outcome.study
    arms = dict.fromkeys(arm.name if arm.layer is None else study.layer_arm for arm in outcome.arms)
    own = {name: grid for name, grid in study.grids.items() if grid != study.grid}
    if not own or any(name not in own for name in arms):
        yield f"grid, the same for every arm{' but those named next' if own else ''}: {study.grid}"
    alike: dict[str, list[str]] = {}
    for name, grid in own.items():
        said = f" ({grid.origin})" if grid.origin else ", whose beta has another unit" if not grid.keys else ""
        alike.setdefault(f"{said}: {grid}", []).append(name)
    for text, names in alike.items():
        yield f"grid of {', '.join(names)}{text}"


def _incomplete_points_note(outcome: Outcome) -> Iterator[str]:
    """Yields the grid points that no arm can stand on, since they lack seeds that others of the arm have."""
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
        yield f"of the grid, but no candidates, since they lack seeds: {', '.join(parts)}"


def _grid_edge_note(outcome: Outcome) -> Iterator[str]:
    """Yields the chosen points that lie on the edge of their grid: a longer one might have a better point."""
    parts = [
        f"{name_in_world(world, name)} ({', '.join(edges)})"
        for world in outcome.worlds
        for name, point in outcome.best_points(world).items()
        if (edges := edge_axes(point, (point.arm.grid or outcome.study.grid)))
    ]
    if parts:
        yield f"on the edge of its grid, so that a longer one might have a better point: {', '.join(parts)}"


def edge_axes(point: PointResults, grid: Grid) -> list[str]:
    """Returns the axes, of at least three values, on which a point has the first or the last one, as "beta 0.03"."""
    given = dict(value.split("=", 1) for value in point.values)
    found = []
    for key, values in grid.axes.items():
        numbers = [float(one) for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
        if 2 < len(numbers) == len(values) and float(given[key]) in (min(numbers), max(numbers)):
            found.append(f"{short_key(key)} {given[key]}")
    return found


def _judge_notes(outcome: Outcome) -> Iterator[str]:
    """Yields a line per world, seed and judge on how good it is; judges are told apart by how they judge."""
    for where, result in _results_by_judge(outcome):
        parts = ("pair_accuracy", "agreement", "consistency", "other_tokens")
        pairs, rounds, orders, other = (f"{100 * result.input('judge', name):.1f} %" for name in parts)
        yield (
            f"{where}, on the study's pairs: {pairs} agree with the labels (both orders averaged), {rounds} of single "
            f"rounds, orders agree in {orders}, {other} of verdicts are neither label"
        )


def _lost_weight_warnings(outcome: Outcome) -> Iterator[str]:
    """Warns of arms whose runs warn of it: much of their weights is lost on the way to the training tokens."""
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
            "WARNING: weights lost on the way to the training tokens, kept mass of chosen and of rejected responses: "
            f"{', '.join(parts)}; the log and report.html of a run say what can help"
        )


def _results_by_judge(outcome: Outcome) -> Iterator[tuple[str, RunResult]]:
    """Yields each judge in words (of which arms, world, seed) with a result that has the account of its verdicts."""
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
        yield f"not in s/run, once for all arms: {', '.join(parts)}"


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


def conclusion_lines(composed: Composition, outcome: Outcome) -> Iterator[str]:
    """Yields the outcome of a study, then up to three commands, each on a line of its own."""
    yield "came out:"
    for world in outcome.worlds:
        for text in describe_result(outcome, world):
            yield f"  {name_in_world(world, text)}"
    yield "next, each as it can be pasted:"
    for text in next_commands(composed, outcome):
        yield f"  {text}"


def describe_result(outcome: Outcome, world: str) -> Iterator[str]:
    """Yields a world's arms against the control, in words; without a known truth no claim."""
    best, control = outcome.best_points(world), outcome.study.control
    if not best:
        yield "no arm has results"
        return
    yield from training_warnings(best)
    if not outcome.has_truth:
        shares = {name: point.mean_metric("val/rewards/accuracies") for name, point in best.items()}
        said = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items() if not math.isnan(share))
        yield f"chosen above rejected in the validation pairs: {said or 'not measured'}; no interval, so no claim"
        results = (result for point in best.values() for result in point.results)
        yield from dict.fromkeys(result.overlap_warning for result in results if result.overlap_warning)
        return
    other = best.get(control or "")
    if control is None or other is None:
        top = max(best.values(), key=lambda point: point.interval.mean)
        yield f"highest reward {top.interval.mean:.3f}: {top.arm.name}; no control to compare it with, so no claim"
        return
    found: dict[str, list[str]] = {name: [] for name in GROUPS}
    for name, point in best.items():
        versus = None if point is other else reward_difference(point, other)
        if versus is not None:
            found[verdict(versus)].append(f"{name} {difference_text(versus)}")
    for name, words in GROUPS.items():
        if found[name]:
            yield f"{words} {control} (difference of reward, 95 %): {'; '.join(found[name])}"
    if not any(found.values()):
        yield f"no arm stands beside {control}: nothing is compared"
    elif all(len(points) == 1 for points in outcome.points_by_arm(world).values()):
        apart = ", ".join(f"{name} {point.mean_truth_score('test', 'kl'):.2f}" for name, point in best.items())
        yield f"one point each, nothing tuned, each at a KL to the base of its own ({apart}): no comparison at equal KL"
    elif sum(map(len, found.values())) > 1:
        moved = [point.mean_truth_score("test", "kl") for point in best.values()]
        yield (
            f"each arm at its best point, at a KL to the base of its own ({min(moved):.2f} to {max(moved):.2f}); for "
            "equal KL see the tables of that name; not corrected for the number of arms"
        )
    if len(outcome.seeds) == 1:
        yield "one seed: the intervals hold for the prompts, not for the noise of training"


def next_commands(composed: Composition, outcome: Outcome) -> list[str]:
    """Returns commands for the study as a table, more seeds of it, and another study on its setting, if ``fit`` can."""
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
