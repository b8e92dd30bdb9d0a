"""Examples that bring the reference's log-probabilities along, and the order in which an epoch takes them."""

from dataclasses import replace

import torch

from attnpo.data.collate import TrainingExample
from attnpo.data.datamodule import PreferenceDataModule
from attnpo.data.rules import BatchPlan
from attnpo.models.layouts import padded_layout
from attnpo.models.scored import ScoredLM
from tests.training.tiny import make_data, make_examples, tiny_model


def stored_reference(examples: list[TrainingExample]) -> list[TrainingExample]:
    """The examples with the tiny model's log-probabilities of both sides."""
    model = ScoredLM(tiny_model())
    made = []
    with torch.no_grad():
        for example in examples:
            inputs, ids, mask = padded_layout([(side.prompt_ids, side.response_ids) for side in example.sides], 0)
            logps = model(inputs, ids, mask).logps
            counts = [len(side.response_ids) for side in example.sides]
            made.append(replace(example, reference_logps=(logps[0, : counts[0]], logps[1, : counts[1]])))
    return made


def spoil(example: TrainingExample, value: float) -> TrainingExample:
    """The example with a stored reference log-prob, of its rejected side's last token, that is no number."""
    assert example.reference_logps is not None
    chosen, rejected = example.reference_logps
    return replace(example, reference_logps=(chosen, torch.cat([rejected[:-1], torch.tensor([value])])))


def stored_data(train: list[TrainingExample], plan: BatchPlan, seed: int = 0) -> PreferenceDataModule:
    """The tiny data module over such examples; its validation pairs are of the same kind."""
    data = make_data(train, plan, seed=seed)
    data.val_batches.examples = stored_reference(make_examples(5, seed=99))
    return data


def epoch_order(count: int, plan: BatchPlan, seed: int = 0) -> list[int]:
    """The pairs of the first epoch in their order."""
    data = make_data(make_examples(count), plan, seed=seed)
    data.train_dataloader()
    assert data.sampler is not None
    return data.sampler.epoch_order(0)
