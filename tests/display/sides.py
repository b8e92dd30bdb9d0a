"""Pairs for tests of what is shown: responses put together from tokens with weights."""

from collections.abc import Sequence

import torch

from attnpo.display.pair_record import Verdict, WeighedResponse
from attnpo.display.weighed_pair import WeighedPair
from attnpo.schema import Message, PreferencePair

END = "<|eot|>"


def response(*tokens: tuple[str, float], length: float | None = None, coverage: float = 1.0, cut: str = "",
             **scores: Sequence[float]) -> WeighedResponse:  # fmt: skip
    """Returns a response of tokens in a row, ids from 7 on; ``END`` has no characters, and ``cut`` no token."""
    offsets, at = list[tuple[int, int]](), 0
    for text, _ in tokens:
        stop = at if text == END else at + len(text)
        offsets.append((at, stop))
        at = stop
    return WeighedResponse(
        "".join(text for text, _ in tokens if text != END) + cut,
        tuple(text for text, _ in tokens),
        tuple(range(7, 7 + len(tokens))),
        tuple(offsets),
        torch.tensor([weight for _, weight in tokens], dtype=torch.float64),
        float(len(tokens)) if length is None else length,
        coverage,
        scores={name: torch.tensor(row, dtype=torch.float64) for name, row in scores.items()},
    )


def pair_of(chosen: WeighedResponse, rejected: WeighedResponse | None = None, prompt: Sequence[Message] = (),
            verdicts: tuple[Verdict, ...] = (), note: str = "", pair_id: str = "pair") -> WeighedPair:  # fmt: skip
    """Returns a pair of such responses, of the same twice where only one is given."""
    other = rejected or chosen
    return WeighedPair(PreferencePair(pair_id, tuple(prompt), chosen.text, other.text), chosen, other, verdicts, note)
