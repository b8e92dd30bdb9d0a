"""Log-probabilities of pairs under a frozen model: the stored reference of a training, rewards of unseen pairs."""

from collections.abc import Iterator, Sequence

import torch

from attnpo.data.collate import TrainingExample
from attnpo.models.layouts import Layout, padded
from attnpo.models.scored import ScoredLM
from attnpo.weights.capture import LogpPair

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
