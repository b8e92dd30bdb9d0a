"""Steps that ``step.py`` times in a process of their own: as in our training, and in a plain implementation."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnpo.data.collate import TrainingExample, collate
from attnpo.models.layouts import LAYOUTS, padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.models.trial import select_layout
from attnpo.objectives.twdpo import TwDPO
from attnpo.schema import EncodedResponse, PreferenceBatch
from attnpo.training.module import PreferenceModule, freeze
from attnpo.training.optimizer import Optimizer
from experiments.benchmarks.shapes import PAD, Pair

# The least of the paper's search. TRL sums log-probabilities of thousands of nats in float32 before it takes their
# difference; with a larger beta that rounding alone can exceed 1e-6 of the loss.
BETA = 1e-3
Batches = Sequence[Sequence[TrainingExample]]


# ------------------------------------------------------------------------------------------------ ours


def examples(pairs: Sequence[Pair], weighted: int | None = None) -> list[TrainingExample]:
    """Returns the pairs as training examples with uniform weights, or random ones that sum to 1 (seed ``weighted``)."""
    made = []
    generator = torch.Generator().manual_seed(weighted or 0)
    for number, pair in enumerate(pairs):
        drawn = [torch.rand(len(row), generator=generator) for row in pair.rows]
        chosen, rejected = (
            row / row.sum() if weighted is not None else torch.full_like(row, 1 / len(row)) for row in drawn
        )
        sides = [EncodedResponse(pair.prompt, row, [(i, i + 1) for i in range(len(row))]) for row in pair.rows]
        lengths = (float(len(pair.chosen)), float(len(pair.rejected)))
        made.append(TrainingExample(f"pair{number}", sides[0], sides[1], (chosen, rejected), lengths, (1.0, 1.0)))
    return made


def with_reference(made: Sequence[TrainingExample], reference: ScoredLM) -> list[TrainingExample]:
    """Adds the reference's log-probabilities of every token to the examples, as a store would."""
    out = []
    for example in made:
        laid = padded_layout([(side.prompt_ids, side.response_ids) for side in example.sides], PAD)
        with torch.no_grad():
            rows = reference(*laid).logps
        chosen, rejected = (row[: len(side.response_ids)] for row, side in zip(rows, example.sides, strict=True))
        out.append(replace(example, reference_logps=(chosen.clone(), rejected.clone())))
    return out


class Ours:
    """Training on micro-batches as in a run: Lightning module, objective and metrics, in one layout.

    If ``reference`` is None, the examples hold its log-probabilities. Raises ``SystemExit`` if the model does not
    support the layout.
    """

    def __init__(
        self, policy: PreTrainedModel, reference: PreTrainedModel | None, layout: str, batches: Batches
    ) -> None:
        scored, live = ScoredLM(policy), None if reference is None else ScoredLM(reference)
        if live is not None:
            freeze(live)
        if select_layout(layout, [scored, *([] if live is None else [live])]) is not LAYOUTS[layout]:
            raise SystemExit(f"layout {layout}: the model does not support it; see the log above")
        self.batches = [collate(batch, LAYOUTS[layout], PAD, len(batch)) for batch in batches]
        self.module = PreferenceModule(scored, live, TwDPO(beta=BETA), Optimizer(), 1)
        self.module.trainer = L.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
        )

    def losses(self) -> list[float]:
        """Returns the loss of every micro-batch."""
        self.module.on_fit_start()
        with torch.no_grad():
            return [float(self.module.training_step(batch, 0)) for batch in self.batches]

    def step(self) -> None:
        """Runs forward and backward over all micro-batches."""
        self.module.on_fit_start()  # starts an empty optimizer step
        for batch in self.batches:
            self.module.training_step(batch, 0).backward()

    def tokens(self) -> int:
        """Counts the tokens that the policy's embedding receives in all micro-batches."""
        return counted(self.module.policy.model, self.losses)


def counted(model: PreTrainedModel, work: Callable[[], object]) -> int:
    """Counts the tokens that a model's embedding receives during ``work``."""
    seen = 0

    def see(_: object, inputs: tuple[Tensor, ...]) -> None:
        nonlocal seen
        seen += inputs[0].numel()

    handle = model.get_input_embeddings().register_forward_pre_hook(see)
    try:
        work()
    finally:
        handle.remove()
    return seen


# ------------------------------------------------------------------------------------------------ the plain way


class Plain:
    """Simple implementation of the step: padded rows, all logits in float32, and the reference run in every step."""

    def __init__(self, policy: PreTrainedModel, reference: PreTrainedModel, batches: list[list[TrainingExample]]):
        self.policy, self.reference = policy.train(), reference.eval().requires_grad_(False)
        self.batches = [collate(batch, padded_layout, PAD, len(batch)) for batch in batches]

    def losses(self) -> list[float]:
        """Returns the loss of every micro-batch."""
        with torch.no_grad():
            return [float(self._loss(batch)) for batch in self.batches]

    def step(self) -> None:
        """Runs forward and backward over all micro-batches."""
        for batch in self.batches:
            self._loss(batch).backward()

    def tokens(self) -> int:
        """Counts the tokens that the policy's embedding receives in all micro-batches."""
        return counted(self.policy, self.losses)

    def _loss(self, batch: PreferenceBatch) -> Tensor:
        rows = batch.main
        policy = self._logps(self.policy, batch)
        with torch.no_grad():
            reference = self._logps(self.reference, batch)
        factors = rows.token_weights["reward"] * rows.source_lengths[:, None] * rows.response_mask
        chosen, rejected = (factors * (policy - reference)).sum(-1).chunk(2)
        return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean()

    @staticmethod
    def _logps(model: PreTrainedModel, batch: PreferenceBatch) -> Tensor:
        """Returns the log-probabilities of the response tokens, from the logits over the whole vocabulary."""
        inputs = batch.main.inputs
        assert inputs is not None
        logits = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, use_cache=False).logits
        every = torch.log_softmax(logits.float(), -1)
        return every.flatten(0, 1)[inputs.predict_index].gather(-1, batch.main.response_ids[..., None])[..., 0]
