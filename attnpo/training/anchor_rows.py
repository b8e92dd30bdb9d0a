"""Row group "anchor": each pair's prompt with a response sampled from the current policy (TI-DPO).

The samples depend only on the seed, the optimiser step, the pair and the policy. Splitting the pairs differently over
micro-batches and ranks, or resuming the run, changes the logits only by rounding error and leaves all random numbers
unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from attnpo.data.collate import make_unweighted_rows
from attnpo.models.backbone import is_materialised
from attnpo.models.generate import GenerationRequest, context_length, generate_tokens
from attnpo.models.input_gradient import prompt_lengths
from attnpo.models.layouts import padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.schema import PreferenceBatch, RowGroup, Sampling, UserError, digest


@runtime_checkable
class AnchoredObjective(Protocol):
    """Objective that reads the row group "anchor" and defines how to sample it."""

    @property
    def anchor(self) -> Sampling:
        """Returns the decoding settings, including the seed."""


@dataclass(frozen=True)
class AnchorSampler:
    """Samples the anchor rows of a batch: one per pair, in the order of the pairs, in the padded layout.

    ``end_ids``: tokens that end a response; the response includes its end token. ``limit``: maximum length of a row in
    tokens (None: the model's maximum). A prompt that leaves no room for a response gets an empty anchor.
    """

    sampling: Sampling
    end_ids: tuple[int, ...]
    pad_id: int = 0
    limit: int | None = None

    def __call__(self, policy: ScoredLM, batch: PreferenceBatch, step: int) -> RowGroup:
        """Samples the rows in eval mode without gradients. Raises UserError for sharded weights and unpadded rows."""
        if not is_materialised(policy.model):
            raise UserError(
                "each process needs the whole policy to sample its anchors for the triplet loss, but the policy's "
                "weights are sharded: set trainer.strategy=auto, or objective.gamma_triplet=0"
            )
        prompts = pair_prompt_ids(batch)
        requests = [
            GenerationRequest(prompt, _response_seed(step, pair_id))
            for prompt, pair_id in zip(prompts, batch.pair_ids, strict=True)
        ]
        responses: list[list[int]] = [[] for _ in requests]
        for room, indices in self._group_by_room(policy, prompts).items():
            alike = [requests[index] for index in indices]
            sampled = generate_tokens(policy.model, alike, self.sampling, room, self.end_ids, self.pad_id)
            for index, response in zip(indices, sampled, strict=True):
                responses[index] = response
        rows = replace(
            make_unweighted_rows(list(zip(prompts, responses, strict=True)), padded_layout, self.pad_id), factors=True
        )
        return replace(batch, groups={"anchor": rows}).to(batch.main.response_mask.device).groups["anchor"]

    def _group_by_room(self, policy: ScoredLM, prompts: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Groups prompt indices by how many new tokens they have room for; drops prompts without room."""
        limits = [limit for limit in (self.limit, context_length(policy.model.config)) if limit is not None]
        by_room: dict[int, list[int]] = {}
        for index, prompt in enumerate(prompts):
            room = min([self.sampling.max_new_tokens, *(limit - len(prompt) for limit in limits)])
            if room > 0:
                by_room.setdefault(room, []).append(index)
        return by_room


def pair_prompt_ids(batch: PreferenceBatch) -> list[list[int]]:
    """Returns each pair's prompt ids, read from its chosen row. Raises UserError unless the layout is padded."""
    lengths = prompt_lengths(batch.main).tolist()
    assert batch.main.inputs is not None
    ids = batch.main.inputs.input_ids[: batch.pairs].tolist()
    return [row[:length] for row, length in zip(ids, lengths[: batch.pairs], strict=True)]


def _response_seed(step: int, pair_id: str) -> int:
    """Returns the random seed for one response, which differs between steps and between pairs."""
    return int(digest([step, pair_id])[:15], 16)
