"""Raw rows of sources that compare two scorers: one value per training token, stored once and converted on each use."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.judge.layers import StoredRow
from attnpo.schema import SIDES, EncodedResponse, JudgeRound, PairWeights, PreferencePair, TokenWeights, UserError
from attnpo.text.ranges import as_array
from attnpo.weights.base import ScoredSource, ScorerModel
from attnpo.weights.capture import prepare_pairs

LOG_RATIO = "log_ratio"
CONTRAST = "contrast"

Rule = Callable[[Float[Tensor, " n"], Bool[Tensor, " n"], str], Float[Tensor, " n"]]
"""Maps (raw values, mask of tokens with characters, side) to the weights of a response."""


@runtime_checkable
class Scorer(Protocol):
    """Causal LM that returns statistics of training tokens; implemented in ``attnpo.data.scoring``.

    ``names`` are fields of ``TokenStats``: "logps", "vocab:NAME" for one model's distribution, "joint:NAME" for two.
    """

    def scores(
        self, ids: Sequence[EncodedResponse], names: Collection[str], other: "Scorer | None" = None
    ) -> list[Mapping[str, Float[Tensor, " m"]]]:
        """Returns the statistics ``names`` of each response's m tokens, in the order of ``ids``, on the CPU.

        ``other``: the second model of joint statistics.
        """


@runtime_checkable
class PairEncoder(Protocol):
    """Encodes pairs as training ids; implemented by ``attnpo.data.scoring.RunPairEncoder``."""

    def encode(self, pair: PreferencePair) -> Mapping[str, EncodedResponse]:
        """Returns the training ids by side; raises ``attnpo.text.chat.RefusedText`` if the pair cannot be encoded."""

    def add_instruction(
        self, pair: PreferencePair, encoded: Mapping[str, EncodedResponse], instruction: str
    ) -> tuple[Mapping[str, EncodedResponse], bool]:
        """Returns the ids with ``instruction`` added to the prompt, and whether the prompt had to be shortened."""


@dataclass(frozen=True)
class LoadedScorers:
    """Loaded models by the source's config keys, and the encoder for the pairs that these models read."""

    scorers: Mapping[str, Scorer]
    texts: PairEncoder


def check_scorers(models: Mapping[str, ScorerModel]) -> None:
    """Raises UserError if both scorers are the same model with the same instruction: all differences would be 0."""
    (first, one), (second, other) = models.items()
    if (one.path, one.revision, one.instruction) == (other.path, other.revision, other.instruction):
        what = "the run's own model" if one.path is None else one.path
        raise UserError(
            f"weights.{first} and weights.{second} are both {what} with the same instruction, so they agree on every "
            f"token: set weights.{first}.path or weights.{second}.path to a different model, or add an instruction"
        )


class ComparedSource(ScoredSource):
    """Source that compares two scorers on the training tokens; converts the stored ``statistic`` on each use."""

    @property
    def statistic(self) -> str:
        """Returns the statistic to compare.

        "log_ratio": log-probability under the first model minus that under the second; "contrast": log-probability
        under softmax(2 z - z'), where z and z' are their logits.
        """
        return LOG_RATIO

    def capture_fingerprint(self) -> dict[str, object]:
        """Returns the compared statistic and the instructions; the conversion into weights is not part of it."""
        asked = [model.fingerprint() for model in self.scorers.values()]
        return {"source": "scorers", "statistic": self.statistic, "asked": asked}

    def capture(
        self, pairs: Sequence[PreferencePair], reader: object, layers: tuple[StoredRow, ...]
    ) -> list[PairWeights]:
        """Returns one round per pair on its training tokens: a float32 row per response with the raw comparison.

        A pair whose text has no training ids, or to which an instruction cannot be added, is returned as
        ``UnreadablePair``. ``Round.cut`` indicates whether the prompt with the instruction was shortened. UserError if
        no scorers are loaded.
        """
        (first, model), (second, other) = self.scorers.items()
        if not isinstance(reader, LoadedScorers) or not self.scorers.keys() <= reader.scorers.keys():
            raise UserError(
                f"weights={self.name} compares two models: set weights.{first}.path and weights.{second}.path"
            )
        texts = reader.texts
        asked, refused = prepare_pairs(pairs, lambda pair: _prepare_inputs(pair, texts, model, other))
        rows = _compare_scorers(list(asked.values()), reader.scorers[first], reader.scorers[second], self.statistic)
        found = {pair_id: _to_pair_weights(one, rows[pair_id]) for pair_id, one in asked.items()} | refused
        return [found[pair.pair_id] for pair in pairs]


class _ScorerInputs(NamedTuple):
    """Training ids of a pair, and the ids that each of the two scorers reads."""

    pair_id: str
    encoded: Mapping[str, EncodedResponse]
    first: Mapping[str, EncodedResponse]
    second: Mapping[str, EncodedResponse]
    cut: bool


def _prepare_inputs(pair: PreferencePair, texts: PairEncoder, model: ScorerModel, other: ScorerModel) -> _ScorerInputs:
    encoded = texts.encode(pair)
    cut, read = False, []
    for scorer in (model, other):
        if scorer.instruction is None:
            read.append(encoded)
        else:
            ids, shortened = texts.add_instruction(pair, encoded, scorer.instruction)
            read.append(ids)
            cut = cut or shortened
    return _ScorerInputs(pair.pair_id, encoded, read[0], read[1], cut)


def _compare_scorers(
    asked: Sequence[_ScorerInputs], first: Scorer, second: Scorer, statistic: str
) -> dict[str, dict[str, Float[Tensor, " n"]]]:
    """Returns the rows by pair id and side."""
    places = [(one.pair_id, side) for one in asked for side in SIDES]
    read = [one.first[side] for one in asked for side in SIDES]
    if statistic == CONTRAST:
        name = "joint:contrast"
        values = [found[name] for found in first.scores(read, {name}, second)]
    else:
        ours = first.scores(read, {"logps"})
        theirs = second.scores([one.second[side] for one in asked for side in SIDES], {"logps"})
        values = [a["logps"].double() - b["logps"].double() for a, b in zip(ours, theirs, strict=True)]
    rows: dict[str, dict[str, Tensor]] = {}
    for (pair_id, side), row in zip(places, values, strict=True):
        rows.setdefault(pair_id, {})[side] = row.float()
    return rows


def _to_pair_weights(asked: _ScorerInputs, rows: Mapping[str, Float[Tensor, " n"]]) -> PairWeights:
    sides = {}
    for side in SIDES:
        encoded = asked.encoded[side]
        sides[side] = TokenWeights(
            torch.tensor(encoded.response_ids, dtype=torch.long),
            torch.from_numpy(as_array(encoded.offsets)),
            rows[side].unsqueeze(0),
        )
    return PairWeights(asked.pair_id, (JudgeRound(True, sides["chosen"], sides["rejected"], cut=asked.cut),))


def apply_rule(captured: PairWeights, rule: Rule) -> PairWeights:
    """Replaces each response's raw row in ``captured`` with the weights that ``rule`` computes from it in float64.

    UserError naming the pair and the side if a raw value is not finite.
    """

    def convert_row(item: TokenWeights, side: str) -> TokenWeights:
        raw = item.weights[0].double()
        if not bool(raw.isfinite().all()):
            bad = float(raw[~raw.isfinite()][0])
            raise UserError(
                f"pair {captured.pair_id}, {side}: expected finite scores from both scorers, got {bad}; score with "
                "dtype=float32, or drop the pair"
            )
        words = item.offsets[:, 1] > item.offsets[:, 0]
        return replace(item, weights=rule(raw, words, side).to(item.weights.dtype).unsqueeze(0))

    rounds = tuple(
        replace(item, chosen=convert_row(item.chosen, "chosen"), rejected=convert_row(item.rejected, "rejected"))
        for item in captured.rounds
    )
    return replace(captured, rounds=rounds)
