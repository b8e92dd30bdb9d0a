"""Where every arm's policy moved from its base, at the arm's chosen point: two tables of a study."""

import math
from collections.abc import Iterator, Mapping

from attnpo.analysis.drift import BELOW, DECISIVE, END, NO_WEIGHT, OTHER
from attnpo.display.page import Block, Paragraph, Section, TableBlock
from attnpo.studies.selection import PointResults, best_by_arm, gather, has_truth
from attnpo.studies.study import Outcome
from attnpo.studies.tables import NONE, Row, columns_of

TOKENS = {
    "KL": "kl",
    "decisive": f"truth/{DECISIVE}/kl",
    "of tokens": f"truth/{DECISIVE}/tokens",
    "KL/tok decisive": f"truth/{DECISIVE}/kl_per_token",
    "KL/tok other": f"truth/{OTHER}/kl_per_token",
    "end": f"classes/{END}/kl",
}
PAIRS = {
    "ranks clean": "ranking_accuracy/train_clean",
    "flipped": "ranking_accuracy/train_flipped",
    "val": "ranking_accuracy/validation",
    "chosen": "displacement/train_chosen",
    "rejected": "displacement/train_rejected",
    "base's": "displacement/base_answers",
    "beta p50": "effective_beta/p50",
    "beta max": "effective_beta/max",
}
DIGITS = {"KL": 2, "chosen": 2, "rejected": 2, "base's": 2}


def drift_table(outcome: Outcome) -> list[Section]:
    """The section "Where the policy moved"; none for a study whose runs did not measure it."""
    points = gather(outcome.points)
    if not any(result.drift for point in points for result in point.results):
        return []
    part = "answers" if any("answers" in result.drift for point in points for result in point.results) else "pairs"
    tokens, pairs = list[Row](), list[Row]()
    for world in outcome.worlds:
        for name, point in best_by_arm(outcome, world).items():
            named: Row = {**({"world": world} if world else {}), "arm": name}
            tokens.append({**named, **dict(_tokens(point, part, has_truth(points)))})
            pairs.append({**named, **_shown(point, PAIRS)})
    blocks: list[Block] = [
        TableBlock(columns_of(tokens), tokens, "by token", DIGITS),
        Paragraph(_note(part)),
        TableBlock(columns_of(pairs), pairs, "by response", DIGITS),
        Paragraph(
            "ranks: share of training pairs (with clean and with flipped labels) and of validation pairs whose chosen "
            "response gained more log-probability than the rejected one, no weights; chosen, rejected, base's: mean "
            "change of log-probability in nats of training responses and of answers sampled from the base; beta: what "
            "a token sees, beta |y| w over the training tokens"
        ),
    ]
    return [Section("Where the policy moved", blocks)]


def _tokens(point: PointResults, part: str, known: bool) -> Iterator[tuple[str, float | str]]:
    """The cells of the first table."""
    yield from _shown(point, {name: f"{part}/{path}" for name, path in TOKENS.items()}).items()
    below = sum(point.drift(f"{part}/classes/{name}/kl") for name in (NO_WEIGHT, BELOW))
    yield "below 1", NONE if math.isnan(below) else below
    if known:
        yield "polarity", point.truth("test", "polarity")
        yield "broken", point.truth("test", "broken")


def _shown(point: PointResults, paths: Mapping[str, str]) -> dict[str, float | str]:
    values = {name: point.drift(path) for name, path in paths.items()}
    return {name: NONE if math.isnan(value) else value for name, value in values.items()}


def _note(part: str) -> str:
    where = "answers to test prompts sampled from the policy" if part == "answers" else "responses of validation pairs"
    return (
        f"each arm at its chosen point, means over seeds, on {where}. KL: nats per response, policy to base over the "
        "whole vocabulary; of it the shares on decisive tokens (by the grammar, the same for every arm; beside it "
        "their share of the tokens), on the end of the turn, and on tokens weighted below uniform (|y| w below 1)"
    )
