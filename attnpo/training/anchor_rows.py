"""Row group "anchor": each pair's prompt with a response sampled from the policy as it stands (TI-DPO).

What is sampled follows from the seed, the optimiser step, the pair and the policy alone. How pairs are cut into
micro-batches and ranks, and a resumption in between, move the logits by rounding and change no random number.
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
    """Objective that reads the group "anchor" and says how it is sampled."""

    @property
    def anchor(self) -> Sampling:
        """Returns decoding settings, the seed included."""


@dataclass(frozen=True)
class Anchors:
    """Makes the anchor rows of a batch: one per pair, in the order of the pairs, in the padded layout.

    ``end_ids``: what ends a response, as its last token. ``limit``: tokens of the longest row (None: the model's
    positions); a prompt that leaves no room has an anchor without tokens.
    """

    sampling: Sampling
    end_ids: tuple[int, ...]
    pad_id: int = 0
    limit: int | None = None

    def __call__(self, policy: ScoredLM, batch: PreferenceBatch, step: int) -> RowGroup:
        """Returns the rows, sampled in eval mode without gradient; UserError for shards and rows not padded."""
        if not is_materialised(policy.model):
            raise UserError(
                "the triplet's anchors are sampled by each process for itself, and the policy's weights are sharded: "
                "set trainer.strategy=auto, or objective.gamma_triplet=0"
            )
        prompts = prompts_of(batch)
        requests = [
            GenerationRequest(prompt, _draw(step, pair_id))
            for prompt, pair_id in zip(prompts, batch.pair_ids, strict=True)
        ]
        responses: list[list[int]] = [[] for _ in requests]
        for room, indices in self._by_room(policy, prompts).items():
            alike = [requests[index] for index in indices]
            sampled = generate_tokens(policy.model, alike, self.sampling, room, self.end_ids, self.pad_id)
            for index, response in zip(indices, sampled, strict=True):
                responses[index] = response
        rows = replace(
            make_unweighted_rows(list(zip(prompts, responses, strict=True)), padded_layout, self.pad_id), factors=True
        )
        return replace(batch, groups={"anchor": rows}).to(batch.main.response_mask.device).groups["anchor"]

    def _by_room(self, policy: ScoredLM, prompts: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Returns indices of the prompts by the new tokens that each may get; those without room are left out."""
        limits = [limit for limit in (self.limit, context_length(policy.model.config)) if limit is not None]
        by_room: dict[int, list[int]] = {}
        for index, prompt in enumerate(prompts):
            room = min([self.sampling.max_new_tokens, *(limit - len(prompt) for limit in limits)])
            if room > 0:
                by_room.setdefault(room, []).append(index)
        return by_room


def prompts_of(batch: PreferenceBatch) -> list[list[int]]:
    """Returns the prompt ids of each pair, off its chosen row; UserError for another layout than the padded one."""
    lengths = prompt_lengths(batch.main).tolist()
    assert batch.main.inputs is not None
    ids = batch.main.inputs.input_ids[: batch.pairs].tolist()
    return [row[:length] for row, length in zip(ids, lengths[: batch.pairs], strict=True)]


def _draw(step: int, pair_id: str) -> int:
    """Returns a number that differs between steps and between pairs, for the random draws of one response."""
    return int(digest([step, pair_id])[:15], 16)
