"""Weights from a Python function of the user's own, named by its import path."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.config.reader import MISSING, import_target
from attnpo.schema import SIDES, EncodedResponse, Kind, Message, PreferencePair, UserError
from attnpo.system.files import file_digest
from attnpo.weights.base import TextSource
from attnpo.weights.postprocess import normalize


@dataclass(frozen=True)
class ResponseTokens:
    """Tokens that a formula sees: the training tokens of one response, in their order, and the texts of its pair.

    ``ids``: token ids. ``offsets``: half-open character ranges in ``response``; a token without a character of it (end
    of turn) has an empty one. ``positions``: 0, 1, ... ``texts``: each token's characters. ``other``: the pair's other
    response. ``side``: "chosen" or "rejected".
    """

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    positions: tuple[int, ...]
    texts: tuple[str, ...]
    side: str
    response: str
    other: str
    prompt: tuple[Message, ...]


Weigh = Callable[[ResponseTokens], Sequence[float] | Tensor]


@dataclass(frozen=True)
class Formula(TextSource):
    """Numbers that ``function`` ("package.module.name") gives to the tokens of each response.

    It is called with a ``ResponseTokens`` and returns a number for each token, the end of turn's among them. ``kind``
    factor: used as they are, below 0 only if ``signed``. ``kind`` distribution: 0 or more, divided by their sum. Its
    package must be named in ATTNPO_ALLOW_TARGETS, as for every class outside attnpo. The digest of its module's source
    tells runs apart; those of other modules that it imports are not taken.
    """

    function: str
    kind: Kind = Kind.FACTOR  # type: ignore[misc]
    signed: bool = False  # type: ignore[misc]

    name: ClassVar[str] = "formula"

    def __post_init__(self) -> None:
        if self.signed and self.kind is Kind.DISTRIBUTION:
            raise UserError(
                "weights.signed=true: a distribution has no weights below 0: set weights.kind=factor, or signed=false"
            )
        if self.function != MISSING:  # the text that stands until the user has given one
            self._load_function()
            self._digests()

    def _load_function(self) -> Weigh:
        """Returns the function. UserError for a name that is none, or may not be imported."""
        if "." not in self.function:
            raise UserError(
                f"weights.function: expected an import path such as package.module.name, got {self.function!r}"
            )
        target, problem = import_target(self.function, "function")
        if problem:
            raise UserError(f"weights.function: {problem}")
        if not callable(target):
            raise UserError(
                f"weights.function: expected a function, and {self.function} is of type {type(target).__name__}"
            )
        return cast(Weigh, target)

    def _digests(self) -> list[str]:
        """Digests of the sources of the module that is named and of the one that holds the function's code."""
        function = inspect.unwrap(self._load_function())
        named = getattr(import_module(self.function.rpartition(".")[0]), "__file__", None)
        written = getattr(getattr(function, "__code__", None), "co_filename", None)
        files = sorted({Path(name) for name in (named, written) if name is not None and Path(name).is_file()})
        if written is None or not files:
            raise UserError(
                f"weights.function: {self.function} has no Python source whose digest could tell runs apart: name a "
                "function written in a Python file"
            )
        return [file_digest(file) for file in files]

    def capture_fingerprint(self) -> dict[str, object]:
        """Returns the function's name, what its numbers are, and the digest of its source."""
        return {
            "source": self.name,
            "function": self.function,
            "kind": self.kind.value,
            "signed": self.signed,
            "code": self._digests(),
        }

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, " m"]:
        """Returns the function's numbers for the m training tokens, float32.

        UserError naming pair, side and function when it raises, gives another number of weights, or one that is not
        finite or not of the kind.
        """
        where = f"pair {pair.pair_id}, {side}: weights.function={self.function}"
        response = pair.response(side)
        seen = ResponseTokens(
            ids=tuple(encoded.response_ids),
            offsets=tuple((int(start), int(end)) for start, end in encoded.offsets),
            positions=tuple(range(len(encoded.response_ids))),
            texts=tuple(response[start:end] for start, end in encoded.offsets),
            side=side,
            response=response,
            other=pair.response(SIDES[1 - SIDES.index(side)]),
            prompt=pair.prompt,
        )
        function = self._load_function()
        try:
            given = torch.as_tensor(function(seen), dtype=torch.float64).detach().cpu()
        except Exception as error:  # whatever a user's function raises, or gives that is no row of numbers
            raise UserError(f"{where} failed on {len(seen.ids)} tokens: {type(error).__name__}: {error}") from error
        if given.shape != (len(seen.ids),):
            raise UserError(
                f"{where}: expected {len(seen.ids)} weights, one for each token, got the shape {tuple(given.shape)}"
            )
        given = given.float()  # as training holds it: what overflows there is told here
        broken = (~given.isfinite()).nonzero()
        if len(broken):
            place = int(broken[0])
            raise UserError(f"{where}: expected finite weights, got {given[place]:g} for token {place}: correct it")
        if not self.signed and bool((given < 0).any()):
            cure = "" if self.kind is Kind.DISTRIBUTION else ", or set weights.signed=true"
            raise UserError(f"{where}: expected weights of 0 or more, got {float(given.min()):g}: correct it{cure}")
        if self.kind is Kind.DISTRIBUTION and not bool(given.any()):
            raise UserError(f"{where}: expected a distribution, got 0 for each of {len(seen.ids)} tokens")
        return normalize(given.double()).float() if self.kind is Kind.DISTRIBUTION else given
