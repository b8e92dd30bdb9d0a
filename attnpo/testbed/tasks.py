"""Rows of the three pretraining tasks (answer, judge, score parts), drawn fresh from the grammar for every step."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from attnpo.testbed import words
from attnpo.testbed.grammar import Grammar, Prompt
from attnpo.testbed.tokenizer import (
    END,
    SCORE_TEMPLATE,
    VERDICTS,
    chat_prompts,
    encode_all,
    judge_prompts,
)


@dataclass(frozen=True)
class Rows:
    """Right-padded ids and, as flat lists, the places whose next token is a target of the task."""

    ids: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    targets: torch.Tensor


class TaskSampler:
    """Draws the rows of each task from one seeded stream; prompts come from the training part only."""

    def __init__(self, grammar: Grammar, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
        self.grammar, self.tokenizer, self.rng = grammar, tokenizer, rng
        self.prompts = grammar.prompts("train")
        self.end = tokenizer.convert_tokens_to_ids(END)
        self.verdicts = tokenizer.convert_tokens_to_ids(list(VERDICTS))
        self.scores = tokenizer.convert_tokens_to_ids(list(words.PART_SCORES))
        self.separator = tokenizer.convert_tokens_to_ids(words.PART_SEPARATOR)

    def _review(self) -> tuple[Prompt, str]:
        prompt = self.rng.choice(self.prompts)
        return prompt, self.grammar.sample_review(self.rng, prompt)

    def answer_rows(self, count: int) -> Rows:
        """Prompts with a review; every review token and the end token is a target."""
        drawn = [self._review() for _ in range(count)]
        heads = chat_prompts(self.tokenizer, [prompt.text for prompt, _ in drawn])
        tails = [[*ids, self.end] for ids in encode_all(self.tokenizer, [review for _, review in drawn])]
        places = [list(range(len(head), len(head) + len(tail))) for head, tail in zip(heads, tails, strict=True)]
        return pad_rows([head + tail for head, tail in zip(heads, tails, strict=True)], places)

    def judge_rows(self, count: int, min_gap: float = 0.0) -> Rows:
        """Two reviews of one prompt, rewards unequal and `min_gap` apart; the verdict is the only target."""
        rows: list[tuple[str, str, str]] = []
        verdicts: list[int] = []
        while len(rows) < count:
            prompt, first = self._review()
            second = self.grammar.sample_review(self.rng, prompt)
            gap = (
                self.grammar.true_reward(first, prompt.topic).reward
                - self.grammar.true_reward(second, prompt.topic).reward
            )
            if gap == 0 or abs(gap) < min_gap:
                continue
            rows.append((prompt.text, first, second))
            verdicts.append(self.verdicts[0] if gap > 0 else self.verdicts[1])
        splice = [self.rng.random() < 0.5 for _ in rows]
        ids = judge_prompts(self.tokenizer, rows, splice)
        places = [[len(row)] for row in ids]
        return pad_rows([[*row, verdict] for row, verdict in zip(ids, verdicts, strict=True)], places)

    def score_rows(self, count: int) -> Rows:
        """A review and its parts, each followed by its importance; the digits and what follows are targets."""
        drawn = [self._review() for _ in range(count)]
        contents = [SCORE_TEMPLATE.format(question=prompt.text, answer=review) for prompt, review in drawn]
        rows, places = [], []
        for head, (prompt, review) in zip(chat_prompts(self.tokenizer, contents), drawn, strict=True):
            row, targets = list(head), []
            for part, score in self.grammar.part_scores(review, prompt.topic):
                if len(row) > len(head):
                    row.append(self.separator)
                row.extend(encode_all(self.tokenizer, [part])[0])
                targets.extend((len(row), len(row) + 1))
                row.append(self.scores[score - 1])
            row.append(self.end)
            rows.append(row)
            places.append(targets)
        return pad_rows(rows, places)


def pad_rows(rows: Sequence[Sequence[int]], places: Sequence[Sequence[int]]) -> Rows:
    """Right-padded rows; `places` are the target tokens' own positions, shifted here to what predicts them."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    row = torch.tensor([index for index, own in enumerate(places) for _ in own])
    column = torch.tensor([place for own in places for place in own])
    return Rows(ids, row, column - 1, ids[row, column])
