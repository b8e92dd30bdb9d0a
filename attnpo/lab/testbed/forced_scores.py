"""Answers to the testbed's scoring prompt by forced decoding: known parts are fed, the model's digits are read.

The answers have the form that a model would write, so the same reader takes them.
"""

import json
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnpo.lab.testbed import words
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.sampling import evaluating
from attnpo.lab.testbed.tokenizer import SCORE_TEMPLATE, chat_prompts, encode_all, token_ids
from attnpo.schema import Message, Sampling, UserError

_GUESS = 2  # the digit in the middle


class ForcedScores:
    """Answers the testbed's scoring prompt with the known parts and the likeliest digit (1 to 5) after each.

    A row grows as the base was taught it, "part digit | part digit", each digit being the model's own.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, grammar: Grammar, batch_size: int = 256
    ) -> None:
        self.model, self.tokenizer, self.grammar, self.batch_size = model, tokenizer, grammar, batch_size
        (self.separator,) = token_ids(tokenizer, [words.PART_SEPARATOR])
        self.digits = token_ids(tokenizer, words.PART_SCORES)

    def generate(self, prompts: Sequence[Sequence[Message]], sampling: Sampling) -> list[str]:
        """Returns one JSON list of parts and scores per prompt, in their order; greedy whatever ``sampling`` says.

        UserError for a prompt that is not the testbed's scoring task.
        """
        contents = [_content(prompt) for prompt in prompts]
        parts = [self._parts(content) for content in contents]
        heads = chat_prompts(self.tokenizer, contents)
        scores: dict[int, list[int]] = {}
        order = sorted(range(len(prompts)), key=lambda index: len(heads[index]))
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            scored = self._score([heads[i] for i in chosen], [parts[i] for i in chosen])
            scores.update(zip(chosen, scored, strict=True))
        return [
            json.dumps([{"part": part, "score": score} for part, score in zip(clauses, scores[index], strict=True)])
            for index, clauses in enumerate(parts)
        ]

    def _parts(self, content: str) -> list[str]:
        opening = SCORE_TEMPLATE.partition("{question}")[0]
        question, line, review = content.removeprefix(opening).partition("\n")
        if not content.startswith(opening) or not line:
            raise UserError(
                f"the testbed scores parts with its own wording {SCORE_TEMPLATE!r}, got a prompt that begins "
                f"{content[:60]!r}: set verbalizer.template_file=verbalizer/testbed.txt and verbalizer.system_file=null"
            )
        try:
            topic = self.grammar.parse_prompt(question).topic
        except ValueError as problem:
            raise UserError(f"verbalizer.known_parts: {problem}; set it to null for data of another kind") from problem
        return [part for part, _ in self.grammar.part_scores(review, topic)]

    def _score(self, heads: Sequence[list[int]], parts: Sequence[list[str]]) -> list[list[int]]:
        """Returns the scores of one batch.

        Each digit is the likeliest one given the digits before it. All digits of a row are read in one pass given
        guesses, then again given what was read, until nothing changes: pass n settles the n-th digit at the latest, and
        once none changes each is what reading them one by one gives. The first guess decides only how many passes.
        """
        rows, places = self._rows(heads, parts)
        scores = [[_GUESS] * len(row) for row in places]
        going = [index for index, row in enumerate(places) if row]
        for _ in range(max(map(len, places), default=0) + 1):
            if not going:
                break
            read = self._digits([rows[i] for i in going], [places[i] for i in going])
            changed = []
            for index, digits in zip(going, read, strict=True):
                if digits != scores[index]:
                    changed.append(index)
                scores[index] = digits
                for place, digit in zip(places[index], digits, strict=True):
                    rows[index][place] = self.digits[digit]
            going = changed
        return [[digit + 1 for digit in row] for row in scores]

    def _rows(self, heads: Sequence[list[int]], parts: Sequence[list[str]]) -> tuple[list[list[int]], list[list[int]]]:
        encoded = iter(encode_all(self.tokenizer, [part for clauses in parts for part in clauses]))
        rows, places = [], []
        for head, clauses in zip(heads, parts, strict=True):
            row, at = list(head), list[int]()
            for _ in clauses:
                row += [*([self.separator] if at else []), *next(encoded)]
                at.append(len(row))
                row.append(self.digits[_GUESS])
            rows.append(row)
            places.append(at)
        return rows, places

    def _digits(self, rows: Sequence[list[int]], places: Sequence[list[int]]) -> list[list[int]]:
        width = max(map(len, rows))
        # Right padding without a mask: causal attention never looks at it.
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.model.device)
        row = torch.tensor([index for index, row in enumerate(places) for _ in row], device=ids.device)
        column = torch.tensor([place for row in places for place in row], device=ids.device) - 1
        with evaluating(self.model):
            digits = self.model(input_ids=ids).logits[row, column][:, self.digits]
        if not bool(torch.isfinite(digits).all()):
            raise UserError("the verbalizer's model gives logits that are not finite: its weights are broken")
        likeliest = iter(digits.argmax(dim=-1).tolist())
        return [[next(likeliest) for _ in row] for row in places]


def _content(prompt: Sequence[Message]) -> str:
    if [turn["role"] for turn in prompt] != ["user"]:
        roles = ", ".join(turn["role"] for turn in prompt)
        raise UserError(
            f"the testbed scores parts in one user message, got the turns [{roles}]: set verbalizer.system_file=null"
        )
    return prompt[0]["content"]
