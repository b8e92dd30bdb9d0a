"""Notes on the columns of a run's and a study's tables, a sentence each: shown over their heads on the page."""

import re
from collections.abc import Sequence

NOTES = {
    "world": "the setting's variant in which an arm ran, with a base and a judge of its own",
    "arm": "what is compared: one way to weigh tokens, or one method",
    "point": "learning rate, beta and other grid values, chosen on validation data alone; each arm has its own",
    "values": "where the grid values come from",
    "reward": "true reward of sampled answers to held-out test prompts, mean over seeds and prompts; more is better",
    "95 %": "interval of the column before it, over seeds and prompts, widened for few seeds",
    "win rate": "share of test prompts where the answer has more true reward than the base's; 0.5 is the base",
    "KL": "distance from the base in nats per response; arms with more KL have moved farther",
    "length": "mean tokens of a sampled answer",
    "broken": "share of the answers' parts that break the grammar; less is better",
    "val loss": "the arm's own loss on validation pairs: weighted by its own weights, so not comparable between arms",
    "val accuracy": "share of validation pairs ranked as labelled by the arm's own weighted reward",
    "val margin": "mean of chosen less rejected reward, each counted with the arm's own weights and beta",
    "chosen tokens": "median tokens of a chosen training response",
    "rejected tokens": "median tokens of a rejected training response",
    "pairs": "training pairs that were kept",
    "steps": "optimiser steps",
    "sum": "mean sum of a response's weights after alignment; 1 where nothing is lost",
    "eff. weights/n": "effective number of weighted tokens over a response's tokens: 1 is even, near 0 a few tokens",
    "coverage": "share of training tokens that found a partner among the tokens that were weighed",
    "source coverage": "share of the tokens that were weighed that found a partner among the training tokens",
    "kept chosen": "share of a chosen response's weights that arrived on training tokens; the rest is lost",
    "kept rejected": "share of a rejected response's weights that arrived on training tokens; the rest is lost",
    "s/run": "seconds of one run, without what is done once for all arms",
    "decisive": "on tokens that decide the true reward, by the grammar",
    "of tokens": "share of tokens that are decisive",
    "end": "on the end of the turn",
    "below 1": "on tokens weighted below uniform",
    "other": "KL per token on tokens that are not decisive",
    "polarity": "share of answers with the wanted sentiment, less that with the other",
    "clean": "training pairs with the right label that are ranked as labelled",
    "wrong": "training pairs with an exchanged label that are ranked as labelled: high is learnt by heart",
    "validation": "validation pairs ranked as labelled, counted without weights",
    "chosen": "mean change of a chosen response's log-probability, nats",
    "rejected": "mean change of a rejected response's log-probability, nats",
    "base's": "mean change of the log-probability of the base's own answers, nats",
    "p50": "median beta of a training token, with its weight",
    "max": "largest beta of a training token, with its weight",
    "claim": "what was predicted before the runs",
    "seeds": "seeds of the runs",
    "prompts": "the prompts that answers were sampled to: points are chosen on validation, test is reported",
    "ended": "share of the answers that came to their end within the tokens they were given",
    "base reward": "true reward of the base's answers to the same prompts",
    "base length": "mean tokens of the base's answers",
    "base broken": "share of the parts of the base's answers that break the grammar",
}  # fmt: skip
AT_KL = re.compile(r"KL ([\d.e+-]+)")
MINUS = re.compile(r"minus (.+?)(?:, KL ([\d.e+-]+))?")


def column_notes(columns: Sequence[str]) -> dict[str, str]:
    """Returns what is known of the columns, by head."""
    found = {name: _note(name) for name in columns}
    return {name: note for name, note in found.items() if note}


def _note(name: str) -> str:
    if (at := AT_KL.fullmatch(name)) is not None:
        return f"true test reward on the arm's own path over its grid, read at KL {at[1]} to the base"
    if (minus := MINUS.fullmatch(name)) is not None:
        where = f" at KL {minus[2]}" if minus[2] else ""
        return (
            f"difference of true reward to {minus[1]}{where}, paired by seed and prompt, with its 95 % interval; one "
            "that holds 0 shows no difference"
        )
    return NOTES.get(name, "")
