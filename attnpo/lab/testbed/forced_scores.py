"""Forced decoding for the testbed's scoring prompt: feeds the known parts and reads the model's digits.

The answers have the same form as generated ones, so the same parser reads them.
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

_GUESS = 2  # index of the middle digit


class ForcedScores:
    """Generator for the testbed's scoring prompt: returns the known parts, each with its most likely digit (1 to 5).

    Rows have the form that the base was trained on, "part digit | part digit", with the model's own digits.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, grammar: Grammar, batch_size: int = 256
    ) -> None:
        self.model, self.tokenizer, self.grammar, self.batch_size = model, tokenizer, grammar, batch_size
        (self.separator,) = token_ids(tokenizer, [words.PART_SEPARATOR])
        self.digits = token_ids(tokenizer, words.PART_SCORES)

    def generate(self, prompts: Sequence[Sequence[Message]], sampling: Sampling) -> list[str]:
        """Returns one JSON list of parts and scores per prompt; decodes greedily, regardless of ``sampling``.

        Raises:
            UserError: a prompt is not the testbed's scoring task.
        """
        contents = [_user_content(prompt) for prompt in prompts]
        parts = [self._split_parts(content) for content in contents]
        heads = chat_prompts(self.tokenizer, contents)
        scores: dict[int, list[int]] = {}
        order = sorted(range(len(prompts)), key=lambda index: len(heads[index]))
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            scored = self._score_batch([heads[i] for i in chosen], [parts[i] for i in chosen])
            scores.update(zip(chosen, scored, strict=True))
        return [
            json.dumps([{"part": part, "score": score} for part, score in zip(clauses, scores[index], strict=True)])
            for index, clauses in enumerate(parts)
        ]

    def _split_parts(self, content: str) -> list[str]:
        opening = SCORE_TEMPLATE.partition("{question}")[0]
        question, line, review = content.removeprefix(opening).partition("\n")
        if not content.startswith(opening) or not line:
            raise UserError(
                f"verbalizer.known_parts needs the testbed's scoring prompt {SCORE_TEMPLATE!r}, got a prompt that "
                f"begins with {content[:60]!r}: set verbalizer.template_file=verbalizer/testbed.txt and "
                "verbalizer.system_file=null"
            )
        try:
            topic = self.grammar.parse_prompt(question).topic
        except ValueError as problem:
            raise UserError(f"verbalizer.known_parts: {problem}; for other data, set it to null") from problem
        return [part for part, _ in self.grammar.part_scores(review, topic)]

    def _score_batch(self, heads: Sequence[list[int]], parts: Sequence[list[str]]) -> list[list[int]]:
        """Returns the scores of one batch; each digit is the most likely one given the digits before it.

        Each forward pass reads all digits of a row at once: the first pass starts from guesses, and every later pass
        from the digits just read, until no digit changes. After pass n the first n digits are final, so the result
        equals decoding them one by one; the guesses only affect the number of passes.
        """
        rows, places = self._build_rows(heads, parts)
        scores = [[_GUESS] * len(row) for row in places]
        going = [index for index, row in enumerate(places) if row]
        for _ in range(max(map(len, places), default=0) + 1):
            if not going:
                break
            read = self._read_digits([rows[i] for i in going], [places[i] for i in going])
            changed = []
            for index, digits in zip(going, read, strict=True):
                if digits != scores[index]:
                    changed.append(index)
                scores[index] = digits
                for place, digit in zip(places[index], digits, strict=True):
                    rows[index][place] = self.digits[digit]
            going = changed
        return [[digit + 1 for digit in row] for row in scores]

    def _build_rows(
        self, heads: Sequence[list[int]], parts: Sequence[list[str]]
    ) -> tuple[list[list[int]], list[list[int]]]:
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

    def _read_digits(self, rows: Sequence[list[int]], places: Sequence[list[int]]) -> list[list[int]]:
        width = max(map(len, rows))
        # Right padding needs no mask: causal attention never sees it.
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.model.device)
        row = torch.tensor([index for index, row in enumerate(places) for _ in row], device=ids.device)
        column = torch.tensor([place for row in places for place in row], device=ids.device) - 1
        with evaluating(self.model):
            digits = self.model(input_ids=ids).logits[row, column][:, self.digits]
        if not bool(torch.isfinite(digits).all()):
            raise UserError("the verbalizer's model returns logits that are not finite: its weights are broken")
        likeliest = iter(digits.argmax(dim=-1).tolist())
        return [[next(likeliest) for _ in row] for row in places]


def _user_content(prompt: Sequence[Message]) -> str:
    if [turn["role"] for turn in prompt] != ["user"]:
        roles = ", ".join(turn["role"] for turn in prompt)
        raise UserError(
            f"verbalizer.known_parts needs a single user message, got the turns [{roles}]: set "
            "verbalizer.system_file=null"
        )
    return prompt[0]["content"]
