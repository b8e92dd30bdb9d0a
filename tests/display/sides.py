"""Pairs for tests of what is shown: responses put together from tokens with weights."""

from collections.abc import Sequence

import torch

from attnpo.display.pair_record import Verdict, WeightedResponse
from attnpo.display.weighted_pair import WeightedPair
from attnpo.schema import Message, PreferencePair

END = "<|eot|>"


def response(*tokens: tuple[str, float], length: float | None = None, coverage: float = 1.0, cut: str = "",
             **scores: Sequence[float]) -> WeightedResponse:  # fmt: skip
    """Returns a response of tokens in a row, ids from 7 on; ``END`` has no characters, and ``cut`` no token."""
    offsets, at = list[tuple[int, int]](), 0
    for text, _ in tokens:
        stop = at if text == END else at + len(text)
        offsets.append((at, stop))
        at = stop
    return WeightedResponse(
        "".join(text for text, _ in tokens if text != END) + cut,
        tuple(text for text, _ in tokens),
        tuple(range(7, 7 + len(tokens))),
        tuple(offsets),
        torch.tensor([weight for _, weight in tokens], dtype=torch.float64),
        float(len(tokens)) if length is None else length,
        coverage,
        scores={name: torch.tensor(row, dtype=torch.float64) for name, row in scores.items()},
    )


def pair_of(chosen: WeightedResponse, rejected: WeightedResponse | None = None, prompt: Sequence[Message] = (),
            verdicts: tuple[Verdict, ...] = (), note: str = "", pair_id: str = "pair") -> WeightedPair:  # fmt: skip
    """Returns a pair of such responses, of the same twice where only one is given."""
    other = rejected or chosen
    return WeightedPair(PreferencePair(pair_id, tuple(prompt), chosen.text, other.text), chosen, other, verdicts, note)
