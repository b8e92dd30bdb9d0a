"""Raw rows of sources that compare two scorers: a number per training token, stored once, weighed on every use."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.judge.layers import Row
from attnpo.schema import SIDES, EncodedResponse, JudgeRound, PairWeights, PreferencePair, TokenWeights, UserError
from attnpo.text.ranges import as_array
from attnpo.weights.base import ScoredSource, ScorerModel
from attnpo.weights.capture import show_pairs

LOG_RATIO = "log_ratio"
CONTRAST = "contrast"

Rule = Callable[[Float[Tensor, " n"], Bool[Tensor, " n"], str], Float[Tensor, " n"]]
"""(raw numbers, which tokens hold characters, side) to the weights of a response."""


@runtime_checkable
class Scorer(Protocol):
    """Causal LM that is asked for statistics of training tokens; ``attnpo.data.scoring`` has the one in use.

    ``names`` are those of ``TokenStats``: "logps", "vocab:NAME" of one model's distribution, "joint:NAME" of two.
    """

    def scores(
        self, ids: Sequence[EncodedResponse], names: Collection[str], other: "Scorer | None" = None
    ) -> list[Mapping[str, Float[Tensor, " m"]]]:
        """Returns the statistics ``names`` of each response's m tokens, in the order of ``ids``, on the CPU.

        ``other``: the second model of joint statistics.
        """


@runtime_checkable
class TrainingTexts(Protocol):
    """Gives pairs as training ids; ``attnpo.data.scoring.RunTexts`` is the one in use."""

    def encode(self, pair: PreferencePair) -> Mapping[str, EncodedResponse]:
        """Returns the ids by side that training reads; ``attnpo.text.chat.RefusedText`` for a pair that has none."""

    def add_instruction(
        self, pair: PreferencePair, encoded: Mapping[str, EncodedResponse], instruction: str
    ) -> tuple[Mapping[str, EncodedResponse], bool]:
        """Returns the same under a prompt with ``instruction``, and whether that prompt was shortened."""


@dataclass(frozen=True)
class LoadedScorers:
    """Models in memory by the names that a source has for them, with what gives pairs as the ids that they read."""

    scorers: Mapping[str, Scorer]
    texts: TrainingTexts


def check_scorers(models: Mapping[str, ScorerModel]) -> None:
    """Raises UserError where both scorers are one model that is asked in one way: all would be 0."""
    (first, one), (second, other) = models.items()
    if (one.path, one.revision, one.instruction) == (other.path, other.revision, other.instruction):
        what = "the run's own model" if one.path is None else one.path
        raise UserError(
            f"weights.{first} and weights.{second} are both {what}, asked in the same way, so that they agree on every "
            f"token: set weights.{first}.path or weights.{second}.path to another model, or an instruction"
        )


class ComparedSource(ScoredSource):
    """Source of what two scorers make of the training tokens: ``statistic`` is stored, weights are made on each use."""

    @property
    def statistic(self) -> str:
        """Returns what is compared.

        "log_ratio": log-probability under the first model less that under the second; "contrast": log-probability under
        softmax(2 z - z'), z and z' their logits.
        """
        return LOG_RATIO

    def capture_fingerprint(self) -> dict[str, object]:
        """Returns what is compared, after which instructions; never what is made of it."""
        asked = [model.fingerprint() for model in self.scorers.values()]
        return {"source": "scorers", "statistic": self.statistic, "asked": asked}

    def capture(self, pairs: Sequence[PreferencePair], reader: object, layers: tuple[Row, ...]) -> list[PairWeights]:
        """Returns one round per pair on its training tokens, a float32 row per response with the raw comparison.

        A pair whose text has no training ids, or cannot be given an instruction, comes back ``Unreadable``.
        ``Round.cut``: an instruction's prompt had to be shortened. UserError when the scorers are missing.
        """
        (first, model), (second, other) = self.scorers.items()
        if not isinstance(reader, LoadedScorers) or not self.scorers.keys() <= reader.scorers.keys():
            raise UserError(
                f"weights={self.name} compares two models: set weights.{first}.path and weights.{second}.path"
            )
        texts = reader.texts
        asked, refused = show_pairs(pairs, lambda pair: _ask(pair, texts, model, other))
        rows = _compare(list(asked.values()), reader.scorers[first], reader.scorers[second], self.statistic)
        found = {pair_id: _to_pair_weights(one, rows[pair_id]) for pair_id, one in asked.items()} | refused
        return [found[pair.pair_id] for pair in pairs]


class _Asked(NamedTuple):
    """Pair's training ids, and the ids that each of the two scorers reads."""

    pair_id: str
    encoded: Mapping[str, EncodedResponse]
    first: Mapping[str, EncodedResponse]
    second: Mapping[str, EncodedResponse]
    cut: bool


def _ask(pair: PreferencePair, texts: TrainingTexts, model: ScorerModel, other: ScorerModel) -> _Asked:
    encoded = texts.encode(pair)
    cut, read = False, []
    for scorer in (model, other):
        if scorer.instruction is None:
            read.append(encoded)
        else:
            ids, shortened = texts.add_instruction(pair, encoded, scorer.instruction)
            read.append(ids)
            cut = cut or shortened
    return _Asked(pair.pair_id, encoded, read[0], read[1], cut)


def _compare(
    asked: Sequence[_Asked], first: Scorer, second: Scorer, statistic: str
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


def _to_pair_weights(asked: _Asked, rows: Mapping[str, Float[Tensor, " n"]]) -> PairWeights:
    sides = {}
    for side in SIDES:
        encoded = asked.encoded[side]
        sides[side] = TokenWeights(
            torch.tensor(encoded.response_ids, dtype=torch.long),
            torch.from_numpy(as_array(encoded.offsets)),
            rows[side].unsqueeze(0),
        )
    return PairWeights(asked.pair_id, (JudgeRound(True, sides["chosen"], sides["rejected"], cut=asked.cut),))


def weighed_by(captured: PairWeights, rule: Rule) -> PairWeights:
    """Returns ``captured`` with each response's raw row replaced by ``rule``'s weights, in float64.

    UserError naming the pair and the side for a raw number that is not finite.
    """

    def one(item: TokenWeights, side: str) -> TokenWeights:
        raw = item.weights[0].double()
        if not bool(raw.isfinite().all()):
            bad = float(raw[~raw.isfinite()][0])
            raise UserError(
                f"pair {captured.pair_id}, {side}: expected finite scores of both scorers, got {bad}; score with "
                "dtype=float32, or drop the pair"
            )
        words = item.offsets[:, 1] > item.offsets[:, 0]
        return replace(item, weights=rule(raw, words, side).to(item.weights.dtype).unsqueeze(0))

    rounds = tuple(
        replace(item, chosen=one(item.chosen, "chosen"), rejected=one(item.rejected, "rejected"))
        for item in captured.rounds
    )
    return replace(captured, rounds=rounds)
