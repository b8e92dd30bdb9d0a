"""What the weights of a study's arms cost (``study.costs``), and the scorers it trained: tables beside its results."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from attnpo.display.page import Block, Paragraph, Section, TableBlock
from attnpo.display.tables import Cell
from attnpo.lab.studies.reads import Reads, ScorerRun, times_trained
from attnpo.lab.studies.scorer_names import scorers_of
from attnpo.lab.studies.selection import PointResults, best_by_arm
from attnpo.lab.studies.study import Outcome
from attnpo.run.result import RunResult

Row = dict[str, Cell]
FORWARDS, BACKWARDS, WEIGHING = "forwards/pair", "backwards/pair", "ms/pair"
OF_SCORERS = ("scorers", "their forwards/pair", "their backwards/pair", "their s")
TRAINING = "training ms/pair"
ACCURACY = "val/rewards/accuracies"
DIGITS = {
    **{FORWARDS: 1, BACKWARDS: 1, WEIGHING: 2, "their forwards/pair": 1, "their backwards/pair": 1, "their s": 1},
    **{TRAINING: 2, "pairs": 0, "steps": 0, "s": 1, "val accuracy": 3, "reward": 3, "minus base": 3, "KL": 2},
}
COSTS_NOTE = (
    "what an arm's weights ask of models beyond the training that all arms have: sequences read of each training pair "
    "(a prompt with one response, or a judge's prompt with both; a written answer counts once, however long) forward "
    "and backward; milliseconds of what is done before training, the pass that is stored or the source's own work, on "
    "the machine that did it, a judge's pass for all layers it reads; their: the same of the scorers trained for the "
    f"arm, which arms share, with the seconds of those runs; {TRAINING}: of the arm's chosen point, per pair and pass, "
    "where weights computed in every step cost what is more than uniform's"
)


def cost_tables(outcome: Outcome) -> list[Section]:
    """Returns what weights cost, where the study asks for it, and the scorers, where it has any; means over seeds."""
    sections: list[Section] = []
    if outcome.study.costs:
        rows = [row for world in outcome.worlds for row in _cost_rows(outcome, world)]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        shown: list[Block] = [TableBlock(columns, rows, digits=DIGITS), Paragraph(COSTS_NOTE)]
        sections.append(Section("What the weights cost", shown))
    if outcome.scorers or outcome.lost_scorers:
        rows = [row for world in outcome.worlds for row in _scorer_rows(outcome, world)]
        lost = [Paragraph(line, warning=True) for line in outcome.lost_scorers]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        tables = [TableBlock(columns, rows, digits=DIGITS)] if rows else []
        sections.append(Section("Scorers", [*lost, *tables, Paragraph(_scorers_note(outcome))]))
    return sections


def _cost_rows(outcome: Outcome, world: str) -> Iterator[Row]:
    best = best_by_arm(outcome, world)
    for arm in (arm for arm in outcome.arms if arm.world == world):
        source = arm.name if arm.layer is None else outcome.study.layer_arm
        known = [reads for (of, _, name), reads in outcome.reads.items() if (of, name) == (world, source)]
        row: Row = {**({"world": world} if world else {}), "arm": arm.name}
        if not known:
            yield row
            continue
        point = best.get(arm.name)
        again = _again(known[0], point)
        seconds = [reads.seconds for reads in known if reads.seconds is not None]
        weighing = 1000 * fmean(seconds) if seconds else None
        row |= {FORWARDS: known[0].once + again, BACKWARDS: again, WEIGHING: weighing}
        named = list(dict.fromkeys(scorers_of(arm.overrides).values()))
        runs = [[made[name] for name in named if name in made] for made in _made(outcome, world)] if named else []
        row |= dict(zip(OF_SCORERS, [", ".join(named), *_sums(runs)], strict=True)) if outcome.study.scorers else {}
        yield {**row, TRAINING: None if point is None else _training(point, known[0])}


def _again(reads: Reads, point: PointResults | None) -> float:
    """Sequences of a pair that were read forward and backward once more, over the whole training."""
    if not reads.again:
        return 0.0
    results: Sequence[RunResult] = () if point is None else point.results
    return reads.again * fmean([times_trained(result, reads.step_pairs) for result in results] or [math.nan])


def _training(point: PointResults, reads: Reads) -> float:
    """Milliseconds of training per pair and pass, the mean over seeds."""
    return fmean(1000 * r.seconds.get("train", math.nan) / (r.steps * reads.step_pairs) for r in point.results)


def _made(outcome: Outcome, world: str) -> list[dict[str, ScorerRun]]:
    """Returns the trained scorers of each seed."""
    return [made for (of, _), made in outcome.scorers.items() if of == world]


def _sums(runs: list[list[ScorerRun]]) -> tuple[Cell, Cell, Cell]:
    """Forwards, backwards and seconds of an arm's scorers together, means over seeds; nothing where it has none."""
    whole = [made for made in runs if made]
    if not whole:
        return None, None, None
    return (
        fmean(sum(run.forwards for run in made) for made in whole),
        fmean(sum(run.backwards for run in made) for made in whole),
        fmean(sum(run.result.seconds["all"] for run in made) for made in whole),
    )


def _scorer_rows(outcome: Outcome, world: str) -> Iterator[Row]:
    arms = [arm for arm in outcome.arms if arm.world == world]
    for name in outcome.study.scorers:
        runs = [made[name] for made in _made(outcome, world) if name in made]
        if not runs:
            continue
        results = [run.result for run in runs]
        row: Row = {
            **({"world": world} if world else {}),
            "scorer": name,
            "of arms": ", ".join(arm.name for arm in arms if name in scorers_of(arm.overrides).values()),
            "pairs": fmean(result.input("train", "pairs") for result in results),
            "steps": fmean(result.steps for result in results),
            "s": fmean(result.seconds["all"] for result in results),
            "val accuracy": fmean(result.metrics.get(ACCURACY, math.nan) for result in results),
        }
        truths = [result.truth["test"].numbers for result in results if result.truth is not None]
        if truths:
            row |= {
                "reward": fmean(numbers["reward"] for numbers in truths),
                "minus base": fmean(numbers["reward"] - numbers["base_reward"] for numbers in truths),
                "KL": fmean(numbers["kl"] for numbers in truths),
            }
        yield row


def _scorers_note(outcome: Outcome) -> str:
    note = (
        "runs that the study trains for its arms on the pairs of the same world and seed, once for all grid points and "
        "not in s/run; val accuracy: share of validation pairs that the scorer's own reward orders as it was taught to "
        "(with exchanged responses the other way round)"
    )
    truth = any(run.result.truth is not None for made in outcome.scorers.values() for run in made.values())
    return note + ("; reward, KL: of its own answers to test prompts" if truth else "")
