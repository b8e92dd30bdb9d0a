"""Rows of the three pretraining tasks (answer, judge, score parts), drawn fresh from the grammar for every step."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from attnpo.lab.testbed import words
from attnpo.lab.testbed.grammar import Grammar, Prompt
from attnpo.lab.testbed.tokenizer import (
    END,
    SCORE_TEMPLATE,
    VERDICTS,
    chat_prompts,
    encode_all,
    judge_prompts,
    token_ids,
)

ANSWER, JUDGE, SCORE = range(3)


@dataclass(frozen=True)
class TaskRow:
    """Token ids of one row, the places of its target tokens, and the task it belongs to."""

    ids: list[int]
    places: list[int]
    task: int


@dataclass(frozen=True)
class Rows:
    """Right-padded ids and, per target: its row, the column that predicts it, its token and its task."""

    ids: Int[Tensor, "rows tokens"]
    row: Int[Tensor, " targets"]
    column: Int[Tensor, " targets"]
    targets: Int[Tensor, " targets"]
    tasks: Int[Tensor, " targets"]


class TaskSampler:
    """Draws the rows of each task from one seeded stream; prompts come from the training part only.

    `damage` is the share of clauses that are damaged in the reviews to be judged and scored, because the base will
    judge its own samples, which contain slips that no review of the grammar shows.
    """

    def __init__(
        self, grammar: Grammar, tokenizer: PreTrainedTokenizerFast, rng: random.Random, damage: float = 0.0
    ) -> None:
        self.damage, self.vocabulary = damage, grammar.vocabulary()
        self.grammar, self.tokenizer, self.rng = grammar, tokenizer, rng
        self.shorten(1.0)
        self.prompts = grammar.prompts("train")
        self.end, self.separator = token_ids(tokenizer, [END, words.PART_SEPARATOR])
        self.verdicts = token_ids(tokenizer, VERDICTS)
        self.scores = token_ids(tokenizer, words.PART_SCORES)

    def shorten(self, scale: float) -> None:
        """Makes the reviews drawn from now on `scale` times as long as the grammar's, by leaving out fillers first."""
        whole = self.grammar
        self.scale = scale
        self.drawn = replace(
            whole,
            min_clauses=max(1, round(scale * whole.min_clauses)),
            max_clauses=max(1, round(scale * whole.max_clauses)),
            p_sentiment=min(max(whole.p_sentiment, 1.0 - whole.p_neutral), whole.p_sentiment / scale),
        )

    def _review(self) -> tuple[Prompt, str]:
        prompt = self.rng.choice(self.prompts)
        return prompt, self.drawn.sample_review(self.rng, prompt)

    def _with_slips(self, prompt: Prompt, review: str) -> str:
        """Returns the review with clauses damaged: a word lost or exchanged, two run together, a wrong topic."""
        clauses = [clause.split() for clause in review.removesuffix(" .").split(" . ")]
        for index, clause in enumerate(clauses):
            if self.rng.random() >= self.damage:
                continue
            kind, place = self.rng.randrange(4), self.rng.randrange(len(clause))
            if kind == 0:
                del clause[place]
            elif kind == 1:
                clause[place] = self.rng.choice(self.vocabulary)
            elif kind == 2:
                clauses[index] = clause[:place] + self.rng.choice(clauses)
            else:
                other = replace(prompt, topic=self.rng.choice(list(words.TOPICS)))
                clauses[index] = self.grammar.sample_review(self.rng, other).split(" . ")[0].split()
        return "".join(" ".join(clause).removesuffix(" .") + " . " for clause in clauses if clause).rstrip()

    def answer_rows(self, count: int) -> list[TaskRow]:
        """Prompts with a review; every review token and the end token is a target."""
        drawn = [self._review() for _ in range(count)]
        heads = chat_prompts(self.tokenizer, [prompt.text for prompt, _ in drawn])
        tails = [[*ids, self.end] for ids in encode_all(self.tokenizer, [review for _, review in drawn])]
        return [
            TaskRow(head + tail, list(range(len(head), len(head) + len(tail))), ANSWER)
            for head, tail in zip(heads, tails, strict=True)
        ]

    def judge_rows(self, count: int, min_gap: float = 0.0) -> list[TaskRow]:
        """Two reviews of one prompt, rewards unequal and `min_gap` apart; the verdict is the only target."""
        rows: list[tuple[str, str, str]] = []
        verdicts: list[int] = []
        while len(rows) < count:
            prompt, first = self._review()
            first = self._with_slips(prompt, first)
            second = self._with_slips(prompt, self.drawn.sample_review(self.rng, prompt))
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
        return [TaskRow([*row, verdict], [len(row)], JUDGE) for row, verdict in zip(ids, verdicts, strict=True)]

    def score_rows(self, count: int) -> list[TaskRow]:
        """Returns a review and its parts, each followed by its importance; the digits and what follows are targets."""
        drawn = [(p, self._with_slips(p, review)) for p, review in (self._review() for _ in range(count))]
        contents = [SCORE_TEMPLATE.format(question=prompt.text, answer=review) for prompt, review in drawn]
        rows: list[TaskRow] = []
        for head, (prompt, review) in zip(chat_prompts(self.tokenizer, contents), drawn, strict=True):
            row, targets = list(head), list[int]()
            for part, score in self.grammar.part_scores(review, prompt.topic):
                if len(row) > len(head):
                    row.append(self.separator)
                row.extend(encode_all(self.tokenizer, [part])[0])
                targets.extend((len(row), len(row) + 1))
                row.append(self.scores[score - 1])
            row.append(self.end)
            rows.append(TaskRow(row, targets, SCORE))
        return rows


def pad_rows(rows: Sequence[TaskRow]) -> Rows:
    """Returns the rows right-padded to the longest; the places of targets are shifted here to what predicts them."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.tensor([[*row.ids, *[0] * (longest - len(row.ids))] for row in rows])
    row = torch.tensor([index for index, task_row in enumerate(rows) for _ in task_row.places])
    column = torch.tensor([place for task_row in rows for place in task_row.places])
    tasks = torch.tensor([task_row.task for task_row in rows for _ in task_row.places])
    return Rows(ids, row, column - 1, ids[row, column], tasks)
