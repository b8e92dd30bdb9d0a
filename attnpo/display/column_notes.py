"""Explanations of table columns in run and study reports, shown above the column headers."""

import re
from collections.abc import Sequence

NOTES = {
    "world": "variant of the setting in which an arm ran, with its own base and judge",
    "arm": "what is compared: a way to weight tokens, or a method",
    "point": "learning rate, beta and other grid values, chosen for each arm on validation data alone",
    "values": "where the grid values come from",
    "reward": "true reward of sampled answers to held-out test prompts, mean over seeds and prompts; higher is better",
    "95 %": "95 % interval of the previous column, over seeds and prompts; with one seed, over prompts only",
    "win rate": "share of test prompts where the answer has a higher true reward than the base's; 0.5 is the base",
    "KL": "KL divergence from the base in nats per response; a higher value means a larger change",
    "length": "mean number of tokens in a sampled answer",
    "broken": "share of answer parts that break the grammar; lower is better",
    "val loss": "loss on validation pairs, computed with the arm's own weights, so not comparable between arms",
    "val accuracy": "share of validation pairs ranked as labelled by the arm's weighted reward",
    "val margin": "mean chosen reward minus mean rejected reward, computed with the arm's own weights and beta",
    "chosen tokens": "median number of tokens in a chosen training response",
    "rejected tokens": "median number of tokens in a rejected training response",
    "pairs": "number of training pairs kept",
    "steps": "optimiser steps",
    "sum": "mean sum of a response's weights after alignment; 1 if nothing is lost",
    "eff. weights/n": "effective number of weighted tokens per response token: 1 if uniform, near 0 if few have weight",
    "coverage": "share of training tokens that match a token of the weight source",
    "source coverage": "share of the weight source's tokens that match a training token",
    "kept chosen": "share of a chosen response's weights that reached training tokens; the rest is lost",
    "kept rejected": "share of a rejected response's weights that reached training tokens; the rest is lost",
    "s/run": "seconds per run, without work shared by all arms",
    "decisive": "on tokens that determine the true reward, according to the grammar",
    "of tokens": "share of tokens that are decisive",
    "drift KL": "KL divergence from the base on the responses of this table, in nats per response",
    "end": "on the end-of-turn token",
    "below 1": "on tokens with less than uniform weight",
    "other": "KL per token on tokens that are not decisive",
    "polarity": "share of answers with the desired sentiment minus the share with the opposite one",
    "clean": "share of correctly labelled training pairs ranked as labelled",
    "wrong": "share of training pairs with swapped labels ranked as labelled: high values mean memorisation",
    "validation": "share of validation pairs ranked as labelled, computed without weights",
    "chosen": "mean change in log-probability of a chosen response, in nats",
    "rejected": "mean change in log-probability of a rejected response, in nats",
    "base's": "mean change in log-probability of the base's own answers, in nats",
    "p50": "median beta of a training token, including its weight",
    "max": "largest beta of a training token, including its weight",
    "claim": "prediction made before the runs",
    "seeds": "seeds of the runs",
    "prompts": "prompts that were answered: validation prompts to select grid points, test prompts for results",
    "ended": "share of answers that ended within the token limit",
    "base reward": "true reward of the base's answers to the same prompts",
    "base length": "mean number of tokens in the base's answers",
    "base broken": "share of parts of the base's answers that break the grammar",
}  # fmt: skip
AT_KL = re.compile(r"KL ([\d.e+-]+)")
MINUS = re.compile(r"minus (.+?)(?:, KL ([\d.e+-]+))?")


def column_notes(columns: Sequence[str]) -> dict[str, str]:
    """Returns the available explanations for the given columns, by header."""
    found = {name: _describe_column(name) for name in columns}
    return {name: note for name, note in found.items() if note}


def _describe_column(name: str) -> str:
    if (at := AT_KL.fullmatch(name)) is not None:
        return f"true test reward at KL {at[1]} to the base, on the arm's curve over its grid"
    if (minus := MINUS.fullmatch(name)) is not None:
        where = f" at KL {minus[2]}" if minus[2] else ""
        return (
            f"true reward minus that of {minus[1]}{where}, paired by seed and prompt, with a 95 % interval; if "
            "the interval contains 0, there is no significant difference"
        )
    return NOTES.get(name, "")
