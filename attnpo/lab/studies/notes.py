"""Words beside a study's numbers: warnings above the table, footnotes below it, the result and the next commands."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TypeGuard

from attnpo.cli.terminal import command_text
from attnpo.config.compose import Composition, load
from attnpo.lab.studies.arms import key_of
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.frontier import difference
from attnpo.lab.studies.outcome import (
    PointResults,
    all_seeds,
    best_by_arm,
    by_arm,
    difference_text,
    gather,
    has_truth,
    label_of,
    lacking_seeds,
    training_warnings,
    verdict,
)
from attnpo.lab.studies.plan import plan_study
from attnpo.lab.studies.predictions import unregistered
from attnpo.lab.studies.study import Arm, Grid, Outcome, Point, last_line, short
from attnpo.lab.studies.tables import benchmark_notes
from attnpo.run.result import RunResult
from attnpo.schema import UserError
from attnpo.weights.arrival import KEPT_MASS

NO_CONTROL = (
    "WARNING: no control that keeps sharpness and destroys placement (transform=shuffled): a lead does not show its "
    "reason; experiment=controls has them all"
)


def warnings(outcome: Outcome) -> list[str]:
    """Returns what keeps a study's table from being believed: no control, a single arm, a control that is lost, ill
    settings.

    Behind them what the study's own checks found.
    """
    study, out = outcome.study, []
    names = dict.fromkeys(arm.name for arm in outcome.arms)
    if len(names) == 1:
        out.append("WARNING: a single arm: there is nothing to compare it with")
    elif study.control is None:
        out.append("WARNING: no control arm (study.control=null): no difference is shown")
    for world in outcome.worlds if study.control is not None else []:
        has = any((point.arm.name, point.arm.world) == (study.control, world) for point, _ in outcome.points)
        if not has:
            where = f" in world {world}" if world else ""
            out.append(f"WARNING: the control {study.control} has no results{where}: no arm is compared{where}")
    if len(names) > 1 and not any(_controls(outcome, point.arm) for point, _ in outcome.points):
        out.append(NO_CONTROL)
    out += [f"WARNING: {line}" for line in unregistered(outcome)]
    out += [line for world in outcome.worlds for line in training_warnings(best_by_arm(outcome, world))]
    return [*out, *outcome.warnings, *_overlaps(outcome), *_poor_judges(outcome), *_lost_weights(outcome)]


def _controls(outcome: Outcome, arm: Arm) -> bool:
    """Returns whether an arm is a control beside the study's own: transformed weights, or the truth as weights."""
    changed = any(key_of(item) == "transform" and not item.endswith("=null") for item in arm.overrides)
    return arm.name in outcome.study.truth_arms or (changed and arm.name != outcome.study.control)


def footnotes(outcome: Outcome) -> list[str]:
    """Returns what stands under the table: seeds, choice of points, what was fixed before, what it
    cost, what failed.
    """
    seeds = sorted({point.seed for point, _ in outcome.points})
    lost = [str(seed) for seed in all_seeds(outcome) if seed not in seeds]
    without = f" (none of seed {', '.join(lost)})" if lost else ""
    lines = [
        f"seeds {', '.join(map(str, seeds))}; {len(outcome.points)} runs{without}, each scored after its last step",
        how_chosen(outcome),
        *_grids(outcome),
        *_no_candidates(outcome),
        *_at_edges(outcome),
        f"digest of world, grid{', arms and predictions' if outcome.study.predictions else ' and arms'}, fixed before "
        f"the runs: {outcome.digest}",
    ]
    if len(seeds) == 1:
        known = has_truth(gather(outcome.points))
        shown = "the intervals hold for the choice of prompts only, not for" if known else "nothing here tells of"
        lines.append(f"one seed: {shown} the noise of training")
    return [
        *lines,
        *benchmark_notes(outcome),
        *_judges(outcome),
        *_costs(outcome),
        *_failures(outcome),
        *outcome.unmeasured,
    ]


def how_chosen(outcome: Outcome) -> str:
    """Returns how the shown point of an arm was chosen and on what its numbers stand."""
    one = all(len((arm.grid or outcome.study.grid).overrides()) == 1 for arm in outcome.arms)
    if not has_truth(gather(outcome.points)):
        chosen = "one point per arm" if one else "points chosen by validation accuracy"
        return (
            f"{chosen}; the numbers are of the same validation pairs, so slightly optimistic; chosen and rejected "
            "tokens are the medians of the training responses"
        )
    if one:
        return "one point per arm, nothing tuned; reward and intervals on held-out test prompts"
    return (
        f"points chosen on validation prompts with KL up to {outcome.study.kl_limit:g}; reward and intervals on other, "
        "held-out test prompts"
    )


def _grids(outcome: Outcome) -> Iterator[str]:
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


def _no_candidates(outcome: Outcome) -> Iterator[str]:
    """Yields the grid points that no arm can stand on, since they lack seeds that others of the arm have."""
    every = len(all_seeds(outcome))
    parts = [
        f"{f'{world}: ' if world else ''}{name} {label_of(values)} ({have} of {every} seeds)"
        for world in outcome.worlds
        for name, lacking in lacking_seeds(outcome, world).items()
        for values, have in lacking.items()
    ]
    if parts:
        yield f"of the grid, but no candidates, since they lack seeds: {', '.join(parts)}"


def _at_edges(outcome: Outcome) -> Iterator[str]:
    """Yields the chosen points that lie on the edge of their grid: a longer one might have a better point."""
    parts = [
        f"{f'{world}: ' if world else ''}{name} ({', '.join(edges)})"
        for world in outcome.worlds
        for name, point in best_by_arm(outcome, world).items()
        if (edges := on_edge(point, (point.arm.grid or outcome.study.grid)))
    ]
    if parts:
        yield f"on the edge of its grid, so that a longer one might have a better point: {', '.join(parts)}"


def on_edge(point: PointResults, grid: Grid) -> list[str]:
    """Returns the axes, of at least three values, on which a point has the first or the last one, as "beta 0.03"."""
    ordered = {key: sorted(map(float, values)) for key, values in grid.axes.items() if _numbers(values)}
    given = dict(value.split("=", 1) for value in point.values)
    return [
        f"{short(key)} {given[key]}"
        for key, values in ordered.items()
        if len(values) > 2 and float(given[key]) in (values[0], values[-1])
    ]


def _numbers(values: Sequence[object]) -> TypeGuard[Sequence[float]]:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _judges(outcome: Outcome) -> Iterator[str]:
    """Yields a line per world, seed and judge on how good it is; judges are told apart by how they judge."""
    for where, result in _judged(outcome):
        parts = ("pair_accuracy", "agreement", "consistency", "other_tokens")
        pairs, rounds, orders, other = (f"{100 * result.input('judge', name):.1f} %" for name in parts)
        yield (
            f"{where}, on the study's pairs: {pairs} agree with the labels (both orders averaged), {rounds} of single "
            f"rounds, orders agree in {orders}, {other} of verdicts are neither label"
        )


def _poor_judges(outcome: Outcome) -> Iterator[str]:
    """Yields a line per judge whose verdicts tell nothing of preference."""
    for where, result in _judged(outcome):
        if result.judge_warning is not None:
            yield f"WARNING: {where}: {result.judge_warning}"


def _overlaps(outcome: Outcome) -> Iterator[str]:
    """Warns of each world whose validation pairs or prompts are trained on as well."""
    found = dict.fromkeys((point.arm.world, result.overlap_warning) for point, result in outcome.points)
    for world, warning in found:
        if warning is not None:
            yield f"WARNING: {f'world {world}: ' if world else ''}{warning}"


def _lost_weights(outcome: Outcome) -> Iterator[str]:
    """Warns of arms whose runs warn of it: much of their weights is lost on the way to the training tokens."""
    arms: dict[str, list[RunResult]] = {}
    for point, result in outcome.points:
        if "warning" in result.split("train"):
            world = f"{point.arm.world}: " if point.arm.world else ""
            arms.setdefault(world + point.arm.name, []).append(result)
    parts = [
        f"{arm} " + " and ".join(f"{fmean(one.input('train', name) for one in results):.3f}" for name in KEPT_MASS)
        for arm, results in arms.items()
    ]
    if parts:
        yield (
            "WARNING: weights lost on the way to the training tokens, kept mass of chosen and of rejected responses: "
            f"{', '.join(parts)}; the log and report.html of a run say what can help"
        )


def _judged(outcome: Outcome) -> Iterator[tuple[str, RunResult]]:
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


def _costs(outcome: Outcome) -> Iterator[str]:
    """Yields what was spent once for all arms, on average over worlds and seeds."""
    spent = {
        "base": [cost.base for cost in outcome.costs.values() if cost.base is not None],
        "judge and verbalizer passes": [cost.judge for cost in outcome.costs.values() if cost.judge is not None],
        "training of scorers": [cost.scorers for cost in outcome.costs.values() if cost.scorers is not None],
    }
    parts = [
        f"{name} {sum(values) / len(values):.1f} s (mean of {len(values)})" for name, values in spent.items() if values
    ]
    if parts:
        yield f"not in s/run, once for all arms: {', '.join(parts)}"


def _failures(outcome: Outcome) -> Iterator[str]:
    """Yields what failed: point by point, or in one line where many points of a world failed alike."""
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


def ending(composed: Composition, outcome: Outcome) -> Iterator[str]:
    """Yields the outcome of a study, then up to three commands, each on a line of its own."""
    yield "came out:"
    for world in outcome.worlds:
        for text in came_out(outcome, world):
            yield f"  {f'{world}: ' if world else ''}{text}"
    yield "next, each as it can be pasted:"
    for text in next_commands(composed, outcome):
        yield f"  {text}"


def came_out(outcome: Outcome, world: str) -> Iterator[str]:
    """Yields a world's arms against the control, in words: by intervals where a truth is known, else
    without a claim.
    """
    best, control = best_by_arm(outcome, world), outcome.study.control
    if not best:
        yield "no arm has results"
        return
    yield from training_warnings(best)
    if not has_truth(gather(outcome.points)):
        shares = {name: point.metric("val/rewards/accuracies") for name, point in best.items()}
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
        versus = None if point is other else difference(point, other)
        if versus is not None:
            found[verdict(versus)].append(f"{name} {difference_text(versus)}")
    for name, words in GROUPS.items():
        if found[name]:
            yield f"{words} {control} (difference of reward, 95 %): {'; '.join(found[name])}"
    if not any(found.values()):
        yield f"no arm stands beside {control}: nothing is compared"
    elif all(len(points) == 1 for points in by_arm(outcome, world).values()):
        apart = ", ".join(f"{name} {point.truth('test', 'kl'):.2f}" for name, point in best.items())
        yield f"one point each, nothing tuned, each at a KL to the base of its own ({apart}): no comparison at equal KL"
    elif sum(map(len, found.values())) > 1:
        moved = [point.truth("test", "kl") for point in best.values()]
        yield (
            f"each arm at its best point, at a KL to the base of its own ({min(moved):.2f} to {max(moved):.2f}); for "
            "equal KL see the tables of that name; not corrected for the number of arms"
        )
    if len(all_seeds(outcome)) == 1:
        yield "one seed: the intervals hold for the prompts, not for the noise of training"


def next_commands(composed: Composition, outcome: Outcome) -> list[str]:
    """Returns commands for the study as a table, more seeds of it, and another study on its setting, if ``fit`` can."""
    seeds = len(all_seeds(outcome))
    more = 5 if seeds < 5 else seeds + 5
    other = "controls" if outcome.study.name != "controls" else "layer_sweep"
    places = ("experiment", "name", "seeds", "study", "grid", "grids")
    kept = [item for item in composed.overrides if key_of(item).partition(".")[0] not in places]
    longer = [*(item for item in composed.overrides if key_of(item) != "seeds"), f"seeds={more}"]
    found = [_plan(words, composed.config_dir) for words in (longer, [f"experiment={other}", *kept, "seeds=1"])]
    return [command_text("report", str(outcome.folder)), *(command_text("fit", *words) for words in found if words)]


def _plan(words: Sequence[str], config_dir: Path | None) -> list[str] | None:
    """Returns what ``fit`` is given for the study of ``words``; None where it refuses to plan that."""
    try:
        cfg: FitConfig = load("fit", words, config_dir)
        plan_study(cfg)
    except UserError:
        return None
    return cfg.composed.arguments()
