"""How well the answers about importance could be read: the account of verbalised weights."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnpo.schema import SIDES, PairWeights, PreferencePair
from attnpo.text.traces import judged_text
from attnpo.weights.score_parser import read_answer


@dataclass(frozen=True)
class AnswerStatistics:
    """What became of the answers about the responses of ``pairs`` pairs.

    ``parsed``: answers with at least one usable part, of ``answers``. ``parts``: usable parts in all. ``coverage``:
    mean share of a response's tokens with a score. ``problems``: what could not be used, by reason. ``unasked``: pairs
    that the model could not be asked about. ``lost``: answers whose text is no longer in the store (their rows are).
    """

    pairs: int
    answers: int
    parsed: int
    parts: int
    coverage: float
    problems: Mapping[str, int]
    unasked: int = 0
    lost: int = 0

    @property
    def parse_rate(self) -> float:
        """Share of the answers with at least one usable part; 0 without answers."""
        return self.parsed / max(1, self.answers)

    def numbers(self) -> dict[str, object]:
        """Returns the statistics as plain data."""
        return {
            "pairs": self.pairs,
            "answers": self.answers,
            "parsed": self.parsed,
            "parse_rate": round(self.parse_rate, 5),
            "parts": self.parts,
            "coverage": round(self.coverage, 5),
            "problems": dict(self.problems),
            "unasked": self.unasked,
            "lost": self.lost,
        }


def answer_statistics(
    pairs: Sequence[PreferencePair],
    captured: Mapping[str, PairWeights],
    answers: Mapping[tuple[str, str], str],
) -> AnswerStatistics:
    """Returns the statistics of ``pairs``: their rows in ``captured``, the texts of their ``answers`` by (pair id,
    side).
    """
    problems: Counter[str] = Counter()
    shares, parsed, parts, read, lost, unasked = [], 0, 0, 0, 0, 0
    unique = {pair.pair_id: pair for pair in pairs if pair.pair_id in captured}
    for pair_id, pair in unique.items():
        rounds = captured[pair_id].rounds
        if not rounds:
            unasked += 1
            continue
        for side in SIDES:
            row = rounds[0].side(side).weights[0]
            shares.append(float((row != 0).double().mean()) if row.numel() else 0.0)
            text = answers.get((pair_id, side))
            if text is None:
                lost += 1
                continue
            reading = read_answer(text, judged_text(pair, side))
            read += 1
            parsed += bool(reading.spans)
            parts += len(reading.spans)
            problems.update(reading.problems)
    coverage = sum(shares) / len(shares) if shares else 0.0
    return AnswerStatistics(len(unique), read, parsed, parts, coverage, dict(sorted(problems.items())), unasked, lost)
