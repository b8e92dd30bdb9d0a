"""The last words of a study: what came out, a tie said as a tie, and what to do next as commands that can be pasted."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from attnpo.cli.terminal import command_text
from attnpo.config.compose import Composition, load
from attnpo.lab.studies.arms import key_of
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.frontier import difference
from attnpo.lab.studies.outcome import (
    Outcome,
    all_seeds,
    best_by_arm,
    by_arm,
    difference_text,
    gather,
    has_truth,
    training_warnings,
    verdict,
)
from attnpo.lab.studies.plan import plan_study
from attnpo.schema import UserError

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
    found = [_planned(words, composed.config_dir) for words in (longer, [f"experiment={other}", *kept, "seeds=1"])]
    return [command_text("report", str(outcome.folder)), *(command_text("fit", *words) for words in found if words)]


def _planned(words: Sequence[str], config_dir: Path | None) -> list[str] | None:
    """Returns what ``fit`` is given for the study of ``words``; None where it refuses to plan that."""
    try:
        cfg: FitConfig = load("fit", words, config_dir)
        plan_study(cfg)
    except UserError:
        return None
    return cfg.composed.arguments()
