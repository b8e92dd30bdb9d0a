"""Reward-model attention as token weights. ABC (Chan et al. 2024) proposed it for RL; here it is applied to pairs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.judge.base import JudgeModel
from attnpo.judge.layers import HeadRow, StoredRow
from attnpo.schema import (
    BOOKKEEPING,
    SIDES,
    EncodedResponse,
    JudgeRound,
    PairWeights,
    PreferencePair,
    TokenWeights,
    UserError,
    check_at_least,
)
from attnpo.text.chat import ChatFormat, RefusedText
from attnpo.text.traces import judged_text, weighted_start
from attnpo.weights.capture import prepare_pairs
from attnpo.weights.postprocess import Postprocess
from attnpo.weights.sources.attention import Attention, select_rows


@dataclass(frozen=True)
class LoadedRewardModel:
    """Loaded reward model and the chat format of its conversations."""

    model: JudgeModel
    conversations: ChatFormat


@dataclass(frozen=True)
class RewardAttention(Attention):
    """Attention from the last token, where a reward model computes its reward, to the response tokens before it.

    As in ABC, the prompt is excluded and the rest is normalised. Layers and heads work as in ``weights=attention``.
    ``path``, ``revision``, ``dtype``, ``chat_template``: the model, a causal LM with a sequence classification head. A
    pair is dropped and counted if a conversation has more than ``max_length`` tokens or a response is empty. Unlike in
    ABC, the end-of-turn token at the last position gets no weight.
    """

    path: str | None = None
    revision: str | None = None
    dtype: str = "float32"
    chat_template: str | None = None
    max_length: int = 2048
    token_budget: int = field(default=16384, metadata=BOOKKEEPING)
    postprocess: Postprocess = field(default_factory=lambda: Postprocess(sink_tokens=0))

    requires: ClassVar[frozenset[str]] = frozenset({"reward"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("weights", 1, max_length=self.max_length, token_budget=self.token_budget)
        if isinstance(self.layer, str) and self.layer.strip().lower() == "auto":
            raise UserError(
                "weights.layer=auto needs a judge, but weights=reward_attention has none: set weights.layer=last or "
                "weights.layer=NUMBER"
            )

    def capture_fingerprint(self) -> dict[str, object]:
        """Returns the position and heads that are read, and the maximum length of a conversation."""
        heads = "each" if self.heads else "mean"
        return {"source": "reward_attention", "position": "last", "heads": heads, "max_length": self.max_length}

    def capture(
        self, pairs: Sequence[PreferencePair], reader: object, layers: tuple[StoredRow, ...]
    ) -> list[PairWeights]:
        """Returns one round per pair, with float32 rows of ``layers``, from a single reward-model call.

        A pair that cannot be read is returned as ``UnreadablePair``.
        """
        if not isinstance(reader, LoadedRewardModel):
            raise UserError("weights=reward_attention needs a reward model: set weights.path=FOLDER_OR_HUB_NAME")
        conversations = reader.conversations
        shown, refused = prepare_pairs(pairs, lambda pair: self._encode_conversations(pair, conversations))
        numbers = tuple(dict.fromkeys(row.layer if isinstance(row, HeadRow) else row for row in layers))
        readings = reader.model.read(
            [one.prompt_ids + one.response_ids for both in shown.values() for one in both],
            layers=numbers,
            per_head=any(isinstance(row, HeadRow) for row in layers),
            verdict=False,
        )
        rows = [select_rows(reading, numbers, layers) for reading in readings]
        captured: dict[str, PairWeights] = {**refused}
        for place, (pair_id, both) in enumerate(shown.items()):
            chosen, rejected = (response_attention(rows[2 * place + side].float(), both[side]) for side in (0, 1))
            captured[pair_id] = PairWeights(pair_id, (JudgeRound(True, chosen, rejected),))
        return [captured[pair.pair_id] for pair in pairs]

    def _encode_conversations(self, pair: PreferencePair, conversations: ChatFormat) -> list[EncodedResponse]:
        """Encodes both conversations; raises RefusedText, with a generic reason, if they cannot be read."""
        both = [_encode_conversation(pair, side, conversations) for side in SIDES]
        reason = ""
        if max(len(one.prompt_ids) + len(one.response_ids) for one in both) > self.max_length:
            reason = f"a conversation is longer than weights.max_length {self.max_length}"
        elif any(all(start == end for start, end in one.offsets) for one in both):
            reason = "a response is empty"
        if reason:
            raise RefusedText(reason, reason)
        return both


def _encode_conversation(pair: PreferencePair, side: str, conversations: ChatFormat) -> EncodedResponse:
    """Encodes the conversation that the model reads; character ranges refer to the response as given in the pair."""
    encoded, begins = conversations.encode(pair.prompt, judged_text(pair, side)), weighted_start(pair, side)
    return encoded._replace(offsets=[(start + begins, end + begins) for start, end in encoded.offsets])


def response_attention(rows: Float[Tensor, "layers T"], encoded: EncodedResponse) -> TokenWeights:
    """Returns the attention to the tokens of a conversation that contain characters of the response."""
    kept = [place for place, (start, end) in enumerate(encoded.offsets) if end > start]
    start = len(encoded.prompt_ids)
    return TokenWeights(
        torch.tensor([encoded.response_ids[place] for place in kept], dtype=torch.long),
        torch.tensor([encoded.offsets[place] for place in kept], dtype=torch.long).reshape(-1, 2),
        rows[:, [start + place for place in kept]].detach().cpu().contiguous(),
    )
