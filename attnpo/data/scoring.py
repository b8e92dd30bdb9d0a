"""What frozen models make of tokens: a training's stored reference, rewards of unseen pairs, scorers of weights."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.data.collate import TrainingExample
from attnpo.models.generate import longest_first
from attnpo.models.layouts import Layout, padded
from attnpo.models.scored import ScoredLM
from attnpo.schema import EncodedResponse, TokenStats, UserError
from attnpo.weights.capture import LogpPair
from attnpo.weights.sources.scorers import Scorer

TOKENS_PER_FORWARD = 16384  # padded, both branches of each pair


def score_examples(
    model: ScoredLM, examples: Sequence[TrainingExample], pad_id: int, layout: Layout = padded
) -> Iterator[tuple[str, LogpPair]]:
    """Pair id and log-probabilities (chosen, rejected) of every example, computed shortest first, in eval mode."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    ordered = sorted(examples, key=lambda example: example.longest)
    with torch.no_grad():
        for chunk in within_budget(ordered):
            rows = [*(example.chosen for example in chunk), *(example.rejected for example in chunk)]
            inputs, ids, mask = layout([(row.prompt_ids, row.response_ids) for row in rows], pad_id)
            logps = model(inputs.to(device), ids.to(device), mask.to(device)).logps.float().cpu()
            for i, example in enumerate(chunk):
                counts = [len(side.response_ids) for side in example.sides]
                yield example.pair_id, (logps[i, : counts[0]].clone(), logps[len(chunk) + i, : counts[1]].clone())
    model.train(was_training)


def within_budget(ordered: Sequence[TrainingExample]) -> Iterator[list[TrainingExample]]:
    """Examples, shortest first, in batches of at most ``TOKENS_PER_FORWARD`` padded tokens (one pair at least)."""
    batch: list[TrainingExample] = []
    for example in ordered:
        if batch and 2 * (len(batch) + 1) * example.longest > TOKENS_PER_FORWARD:
            yield batch
            batch = []
        batch.append(example)
    if batch:
        yield batch


# --------------------------------------------------------------------------------------------- scorers of weights

Scores = Mapping[str, Float[Tensor, " m"]]


@dataclass(frozen=True)
class ModelScorer:
    """A frozen model as a scorer of training tokens (``attnpo.weights.base.Scorer``), in the number format it has."""

    model: ScoredLM
    pad_id: int

    def scores(self, ids: Sequence[EncodedResponse], names: Collection[str]) -> list[Scores]:
        """Returns the statistics ``names`` of each response's tokens, in the order of ``ids``; UserError for unknown
        names.
        """
        return self._scores(ids, names, None)

    def pair_scores(self, ids: Sequence[EncodedResponse], other: Scorer, names: Collection[str]) -> list[Scores]:
        """Returns the same with joint statistics, in which ``other`` is the second model.

        UserError for models whose vocabularies differ in size, TypeError for a scorer that is no ``ModelScorer``.
        """
        if not isinstance(other, ModelScorer):
            raise TypeError(f"two models are compared through their heads, and {type(other).__name__} shows none")
        own, second = (len(scorer.model.head().weight) for scorer in (self, other))
        if own != second:
            raise UserError(
                f"the distributions of two scorers are compared token by token, and their heads have {own} and "
                f"{second} rows: take models with one vocabulary"
            )
        return self._scores(ids, names, other)

    def _scores(
        self, ids: Sequence[EncodedResponse], names: Collection[str], other: "ModelScorer | None"
    ) -> list[Scores]:
        found: dict[int, Scores] = {}
        for scorer in (self, *([] if other is None else [other])):
            scorer.model.eval()
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in ids]
        for batch in longest_first(lengths, lambda length: TOKENS_PER_FORWARD // length):
            stats = self._batch([ids[place] for place in batch], frozenset({"logps", *names}), other)
            by_name = {"logps": stats.logps}
            by_name |= {f"vocab:{name}": rows for name, rows in stats.vocab.items()}
            by_name |= {f"joint:{name}": rows for name, rows in stats.joint.items()}
            for row, place in enumerate(batch):
                count = len(ids[place].response_ids)
                found[place] = {name: by_name[name][row, :count].float().cpu() for name in names}
        return [found[place] for place in range(len(ids))]

    @torch.no_grad()
    def _batch(self, rows: Sequence[EncodedResponse], names: frozenset[str], other: "ModelScorer | None") -> TokenStats:
        device = next(self.model.parameters()).device
        inputs, response_ids, mask = padded([(row.prompt_ids, row.response_ids) for row in rows], self.pad_id)
        read = (inputs.to(device), response_ids.to(device), mask.to(device))
        second = None
        if other is not None:
            hidden = other.model(*read, frozenset({"logps", "hidden"})).hidden
            second = (hidden, other.model.head())
        stats: TokenStats = self.model(*read, names, second)
        return stats
