"""Preference pairs built from the base's own samples, in the format of ultrafeedback_binarized.

Both answers of a pair have the same prompt, and the one with the higher true reward is chosen. Rows keep the true
scores, so that flipped pairs (label noise) can be recognised by score_chosen < score_rejected.
"""

import hashlib
import json
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnpo.lab.testbed.grammar import Grammar, ReviewPrompt
from attnpo.lab.testbed.recipes import PairRecipe
from attnpo.lab.testbed.sampling import sample_answers
from attnpo.lab.testbed.tokenizer import SPECIALS
from attnpo.schema import UserError

logger = logging.getLogger(__name__)

Row = dict[str, object]


def build_pairs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, grammar: Grammar, recipe: PairRecipe, split: str
) -> list[Row]:
    """Builds the rows of `split` ("train" or "validation").

    Prompts are sampled in chunks in a fixed order until there are enough pairs. Every answer is used at most once.

    Raises:
        UserError: the base's answers are too uniform to yield enough pairs.
    """
    wanted = recipe.train if split == "train" else recipe.validation
    prompts = grammar.prompts(split)
    rng = random.Random(f"pairs {recipe.seed} {split}")
    rows: list[Row] = []
    chunk = 128  # prompts sampled at once; a constant, so the first pairs do not depend on how many are wanted
    for turn in range(recipe.max_rounds):
        for start in range(0, len(prompts), chunk):
            rows += _pairs_of(model, tokenizer, grammar, recipe, prompts[start : start + chunk], rng)
            if len(rows) >= wanted:
                rows = rows[:wanted]
                return _with_noise(rows, recipe) if split == "train" else rows
        logger.info("testbed pairs: %d of %d after round %d over the %s prompts", len(rows), wanted, turn + 1, split)
    raise UserError(
        f"testbed pairs: only {len(rows)} of {wanted} {split} pairs with a reward gap >= {recipe.margin} after "
        f"{recipe.max_rounds} rounds; lower pairs.margin or pairs.{split}, or raise pairs.max_rounds"
    )


def _pairs_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    grammar: Grammar,
    recipe: PairRecipe,
    prompts: Sequence[ReviewPrompt],
    rng: random.Random,
) -> list[Row]:
    repeated = [prompt for prompt in prompts for _ in range(recipe.answers_per_prompt)]
    answers = sample_answers(
        model,
        tokenizer,
        [prompt.text for prompt in repeated],
        seed=rng.getrandbits(48),
        temperature=recipe.temperature,
        max_new_tokens=recipe.max_new_tokens,
    )
    usable: dict[ReviewPrompt, list[tuple[str, float]]] = {prompt: [] for prompt in prompts}
    for prompt, text, ended, length in zip(repeated, answers.texts, answers.ended, answers.lengths, strict=True):
        if ended and length >= recipe.min_tokens and not any(special in text for special in SPECIALS):
            usable[prompt].append((text, grammar.true_reward(text, prompt.topic).reward))
    return [
        pair_row(prompt, better, worse)
        for prompt, scored in usable.items()
        for better, worse in match_answers(scored, recipe.margin)
    ]


def match_answers(
    scored: Sequence[tuple[str, float]], margin: float
) -> list[tuple[tuple[str, float], tuple[str, float]]]:
    """Returns disjoint (better, worse) pairs of answers in sampling order.

    Each answer is paired with the first free one whose reward differs by at least `margin`.
    """
    free = list(scored)
    pairs: list[tuple[tuple[str, float], tuple[str, float]]] = []
    while free:
        one = free.pop(0)
        for other in free:
            if abs(one[1] - other[1]) >= margin:
                free.remove(other)
                pairs.append((one, other) if one[1] > other[1] else (other, one))
                break
    return pairs


def pair_row(prompt: ReviewPrompt, chosen: tuple[str, float], rejected: tuple[str, float]) -> Row:
    """Builds one row of the data files; `chosen` and `rejected` are (answer, true reward)."""
    user = {"role": "user", "content": prompt.text}
    better = [user, {"role": "assistant", "content": chosen[0]}]
    worse = [user, {"role": "assistant", "content": rejected[0]}]
    return {
        "prompt": prompt.text,
        "prompt_id": _prompt_id(prompt.text),
        "chosen": better,
        "rejected": worse,
        "messages": better,
        "score_chosen": chosen[1],
        "score_rejected": rejected[1],
        "topic": prompt.topic,
    }


def _with_noise(rows: Sequence[Row], recipe: PairRecipe) -> list[Row]:
    """Swaps the sides of an exact share of the rows, together with their scores."""
    count = round(recipe.label_noise * len(rows))
    flipped = set(random.Random(f"noise {recipe.seed}").sample(range(len(rows)), count))
    return [_flip(row) if index in flipped else row for index, row in enumerate(rows)]


def _flip(row: Mapping[str, object]) -> Row:
    return {
        **row,
        "chosen": row["rejected"],
        "rejected": row["chosen"],
        "messages": row["rejected"],
        "score_chosen": row["score_rejected"],
        "score_rejected": row["score_chosen"],
    }


def prompt_row(prompt: ReviewPrompt) -> Row:
    """Builds one row of test_prompts.jsonl, which has only the prompt."""
    return {
        "prompt": prompt.text,
        "prompt_id": _prompt_id(prompt.text),
        "messages": [{"role": "user", "content": prompt.text}],
        "topic": prompt.topic,
    }


def write_pairs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    grammar: Grammar,
    recipe: PairRecipe,
    folder: Path,
) -> dict[str, int | float]:
    """Writes train.jsonl, validation.jsonl and test_prompts.jsonl; returns counts, mean gap and flipped share."""
    train = build_pairs(model, tokenizer, grammar, recipe, "train")
    validation = build_pairs(model, tokenizer, grammar, recipe, "validation")
    tests = [prompt_row(prompt) for prompt in grammar.prompts("test")]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("validation", validation), ("test_prompts", tests)):
        write_jsonl(folder / f"{name}.jsonl", rows)
    gaps = [abs(float(str(row["score_chosen"])) - float(str(row["score_rejected"]))) for row in train]
    flipped = [float(str(row["score_chosen"])) < float(str(row["score_rejected"])) for row in train]
    return {
        "train_pairs": len(train),
        "validation_pairs": len(validation),
        "test_prompts": len(tests),
        "mean_gap": sum(gaps) / len(gaps),
        "flipped_share": sum(flipped) / len(flipped),
    }


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes one JSON object per line, in UTF-8."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _prompt_id(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
