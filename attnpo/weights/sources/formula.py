"""Weights from your own Python function, specified by its import path."""

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
    """Argument passed to a formula: the training tokens of one response, in order, and the text of its pair.

    ``ids``: token ids. ``offsets``: half-open character ranges in ``response``; empty for a token that contains no
    response text (end of turn). ``positions``: 0, 1, ... ``texts``: each token's characters. ``other``: the pair's
    other response. ``side``: "chosen" or "rejected".
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
    """Weights that ``function`` ("package.module.name") assigns to the tokens of each response.

    The function is called with a ``ResponseTokens`` and returns a weight for each token, including the end of turn. If
    ``kind`` is factor, the weights are used unchanged and may be negative only if ``signed``. If it is distribution,
    they must be at least 0 and are divided by their sum. The function's package must be listed in ATTNPO_ALLOW_TARGETS,
    like that of any class outside attnpo. The fingerprint includes a digest of the function's source file, but not of
    other modules that this file imports.
    """

    function: str
    kind: Kind = Kind.FACTOR  # type: ignore[misc]
    signed: bool = False  # type: ignore[misc]

    name: ClassVar[str] = "formula"

    def __post_init__(self) -> None:
        if self.signed and self.kind is Kind.DISTRIBUTION:
            raise UserError(
                "weights.signed=true: a distribution cannot have negative weights: set weights.kind=factor, or "
                "weights.signed=false"
            )
        if self.function != MISSING:  # the placeholder until the user gives a function
            self._load_function()
            self._source_digests()

    def _load_function(self) -> Weigh:
        """Imports the function. UserError if the name does not refer to a function or importing it is not allowed."""
        if "." not in self.function:
            raise UserError(
                f"weights.function: expected an import path, e.g. package.module.name, got {self.function!r}"
            )
        target, problem = import_target(self.function, "function")
        if problem:
            raise UserError(f"weights.function: {problem}")
        if not callable(target):
            raise UserError(
                f"weights.function: expected a function, but {self.function} is of type {type(target).__name__}"
            )
        return cast(Weigh, target)

    def _source_digests(self) -> list[str]:
        """Returns the source digests of the named module and the module that defines the function."""
        function = inspect.unwrap(self._load_function())
        named = getattr(import_module(self.function.rpartition(".")[0]), "__file__", None)
        written = getattr(getattr(function, "__code__", None), "co_filename", None)
        files = sorted({Path(name) for name in (named, written) if name is not None and Path(name).is_file()})
        if written is None or not files:
            raise UserError(
                f"weights.function: {self.function} has no Python source file, so changes to it could not be detected: "
                "choose a function that is defined in a Python file"
            )
        return [file_digest(file) for file in files]

    def capture_fingerprint(self) -> dict[str, object]:
        """Returns the function's name, the kind of the returned weights, and the digests of the source files."""
        return {
            "source": self.name,
            "function": self.function,
            "kind": self.kind.value,
            "signed": self.signed,
            "code": self._source_digests(),
        }

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, " m"]:
        """Returns the function's weights for the m training tokens, float32.

        UserError naming pair, side and function if the function raises, returns the wrong number of weights, or returns
        weights that are not finite or do not match the kind.
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
        except Exception as error:  # raised by the user's function, or by a result that is not a row of numbers
            raise UserError(f"{where} failed on {len(seen.ids)} tokens: {type(error).__name__}: {error}") from error
        if given.shape != (len(seen.ids),):
            raise UserError(
                f"{where}: expected {len(seen.ids)} weights, one for each token, got shape {tuple(given.shape)}"
            )
        given = given.float()  # the dtype of training, so that an overflow is reported here
        broken = (~given.isfinite()).nonzero()
        if len(broken):
            place = int(broken[0])
            raise UserError(
                f"{where}: expected finite weights, got {given[place]:g} for token {place}: correct the function"
            )
        if not self.signed and bool((given < 0).any()):
            cure = "" if self.kind is Kind.DISTRIBUTION else ", or set weights.signed=true"
            raise UserError(
                f"{where}: expected weights of at least 0, got {float(given.min()):g}: correct the function{cure}"
            )
        if self.kind is Kind.DISTRIBUTION and not bool(given.any()):
            raise UserError(
                f"{where}: expected a distribution, got 0 for all {len(seen.ids)} tokens: correct the function"
            )
        return normalize(given.double()).float() if self.kind is Kind.DISTRIBUTION else given
