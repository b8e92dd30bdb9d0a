"""Where every arm's policy moved from its base, at the arm's chosen point: narrow tables that stand side by side."""

import math

from attnpo.display.page import Block, Paragraph, Section, TableBlock
from attnpo.lab.analysis.drift import BELOW, DECISIVE, END, NO_WEIGHT, OTHER
from attnpo.lab.studies.selection import PointResults, best_by_arm, gather, has_truth
from attnpo.lab.studies.study import Outcome
from attnpo.lab.studies.tables import NONE, Row, columns_of

TRUTH = "KL per token; answers"
# By caption and column the numbers of ``RunResult.drift`` that are added up; {} is where tokens were looked at.
TABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "KL, and shares of it": {
        "KL": ("{}/kl",),
        "decisive": (f"{{}}/truth/{DECISIVE}/kl",),
        "of tokens": (f"{{}}/truth/{DECISIVE}/tokens",),
        "end": (f"{{}}/classes/{END}/kl",),
        "below 1": (f"{{}}/classes/{NO_WEIGHT}/kl", f"{{}}/classes/{BELOW}/kl"),
    },
    TRUTH: {
        "decisive": (f"{{}}/truth/{DECISIVE}/kl_per_token",),
        "other": (f"{{}}/truth/{OTHER}/kl_per_token",),
    },
    "pairs ranked as labelled": {
        "clean": ("ranking_accuracy/train_clean",),
        "wrong": ("ranking_accuracy/train_flipped",),
        "validation": ("ranking_accuracy/validation",),
    },
    "moved by; beta of a token": {
        "chosen": ("displacement/train_chosen",),
        "rejected": ("displacement/train_rejected",),
        "base's": ("displacement/base_answers",),
        "p50": ("effective_beta/p50",),
        "max": ("effective_beta/max",),
    },
}
DIGITS = {"KL": 2, "chosen": 2, "rejected": 2, "base's": 2}
NOTES = (
    "KL: nats per response, policy to base over the whole vocabulary. Of it the shares on decisive tokens (by the "
    "grammar, the same for every arm; beside it their share of the tokens), on the end of the turn, and on tokens "
    "weighted below uniform (|y| w below 1)",
    "ranked as labelled: the chosen response gained more log-probability than the rejected one, summed without "
    "weights; training pairs with clean and with wrong labels (high there: learnt by heart), and validation pairs",
    "moved by: mean change of log-probability, nats per response, of training pairs' responses and of answers sampled "
    "from the base; beta of a token: beta |y| w over the training tokens",
)


def drift_table(outcome: Outcome) -> list[Section]:
    """Returns the section "Where the policy moved"; none for a study whose runs did not measure it."""
    points = gather(outcome.points)
    measured = [result.drift for point in points for result in point.results if result.drift]
    if not measured:
        return []
    sampled = any("answers" in one for one in measured)
    blocks: list[Block] = []
    for caption, columns in TABLES.items():
        rows: list[Row] = [
            {
                **({"world": world} if world else {}),
                "arm": name,
                **{head: _cell(point, paths, "answers" if sampled else "pairs") for head, paths in columns.items()},
                **(_answers_of(point) if caption == TRUTH and has_truth(points) else {}),
            }
            for world in outcome.worlds
            for name, point in best_by_arm(outcome, world).items()
        ]
        blocks.append(TableBlock(columns_of(rows), rows, caption, DIGITS))
    where = "on answers sampled from the policy" if sampled else "on the responses of validation pairs"
    first = f"each arm at its chosen point, means over seeds; tokens are looked at {where}"
    return [Section("Where the policy moved", [*blocks, *map(Paragraph, (first, *NOTES))])]


def _cell(point: PointResults, paths: tuple[str, ...], part: str) -> float | str:
    value = sum(point.drift(path.format(part)) for path in paths)
    return NONE if math.isnan(value) else value


def _answers_of(point: PointResults) -> Row:
    """Returns what the answers became beside it."""
    return {name: point.truth("test", name) for name in ("polarity", "broken")}
