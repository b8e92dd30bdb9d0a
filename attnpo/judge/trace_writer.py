"""What a judge writes for itself before its verdict: a trace, token by token, up to the text that ends it."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from attnpo.judge.base import WrittenTrace
from attnpo.models.backbone import require_causal_lm
from attnpo.models.generate import Request, Until, end_ids_of, longest_first, new_tokens, padding_id, written_text
from attnpo.schema import Sampling, UserError


class TraceWriter:
    """Lets a causal LM write on after prompts until it has written ``until``, ended its turn, or had its tokens.

    ``token_budget``: most tokens of a batch, prompts and room for the traces together; one prompt at least.
    ``end_ids``: ids that end a turn, beside those of the tokenizer and of the model's folder. UserError for a model
    that cannot generate.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        until: str,
        *,
        token_budget: int,
        end_ids: Sequence[int] = (),
    ) -> None:
        self.model = require_causal_lm(model)
        self.tokenizer, self.sampling, self.token_budget = tokenizer, sampling, token_budget
        if not self.model.can_generate():
            raise UserError(_cannot(self.model, "transformers gives its class no generate"))
        self._until = Until(until, tokenizer)
        self._ends = end_ids_of(self.model, tokenizer, end_ids)

    def write(self, prompts: Sequence[Sequence[int]]) -> Iterator[dict[int, WrittenTrace]]:
        """Yields the traces by the prompt's place, batch by batch, longest prompts first.

        UserError where the model's own code fails in generating.
        """
        most = self.sampling.max_new_tokens
        lengths = [len(prompt) for prompt in prompts]
        for batch in longest_first(lengths, lambda longest: self.token_budget // (longest + most)):
            rows = self._rows([Request(prompts[place]) for place in batch])
            yield {place: self._trace(row, index) for index, (place, row) in enumerate(zip(batch, rows, strict=True))}

    def _rows(self, requests: Sequence[Request]) -> list[list[int]]:
        pad_id = padding_id(self.model, self.tokenizer, self._ends)
        most = self.sampling.max_new_tokens
        try:
            return new_tokens(self.model, requests, self.sampling, most, self._ends, pad_id, self._until)
        except (torch.OutOfMemoryError, UserError):
            raise
        except Exception as error:  # code of any model
            words = " ".join(str(error).split())[:200]
            raise UserError(_cannot(self.model, f"{type(error).__name__}: {words}")) from error

    def _trace(self, row: list[int], index: int) -> WrittenTrace:
        closed = index in self._until.found and self._until.found[index] == len(row)
        ids = row if closed or row[-1] not in self._ends else row[:-1]
        return WrittenTrace(tuple(ids), written_text(self.tokenizer, ids), closed)


def _cannot(model: nn.Module, why: str) -> str:
    return (
        f"judge.trace: {type(model).__name__} cannot write a trace ({why}): name another model as judge.path, or set "
        "judge.trace=null"
    )
