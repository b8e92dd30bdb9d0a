"""Counts validation pairs, and validation and benchmark prompts, that also occur in the training data."""

import hashlib
import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnpo.data.prepare import EncodedSet
from attnpo.schema import SIDES, EncodedResponse, Message, digest, prompt_identity
from attnpo.system.files import write_atomically

log = logging.getLogger(__name__)

FILE = "training_prompts.txt"  # in a run's folder: one prompt digest per line
SEEN = "prompts that the model was trained on"


@dataclass(frozen=True)
class Overlap:
    """Numbers of validation pairs and distinct prompts, and how many of each are also in the training data.

    Two pairs are equal if their token ids are equal after truncation. Two prompts are equal if their messages are
    equal.
    """

    pairs: int
    prompts: int
    trained_pairs: int
    trained_prompts: int

    def summary(self) -> str:
        """Returns both counts as a sentence."""
        return (
            f"{self.trained_pairs} of {self.pairs} validation pairs and {self.trained_prompts} of {self.prompts} "
            "validation prompts are also in the training data"
        )

    def warning(self) -> str | None:
        """Returns a warning that applies to all validation results, or None if nothing overlaps."""
        shared = self.trained_pairs or self.trained_prompts
        return f"{self.summary()}, so validation results are not based only on unseen pairs" if shared else None


class OverlapCounter:
    """Counts validation pairs and prompts that also occur in training; all training pairs must be added first."""

    def __init__(self) -> None:
        self._ids: set[bytes] = set()
        self._prompts: tuple[set[str], set[str]] = set(), set()
        self._pairs = self._shared = 0

    def add(self, split: str, prompt: str, sides: Mapping[str, EncodedResponse]) -> None:
        """Adds a pair from a split, given its prompt digest and token ids."""
        self._prompts[split == "val"].add(prompt)
        if split == "train":
            self._ids.add(digest_token_ids(sides))
        else:
            self._pairs += 1
            self._shared += digest_token_ids(sides) in self._ids

    def count(self) -> Overlap:
        """Returns the counts so far."""
        trained, validated = self._prompts
        return Overlap(self._pairs, len(validated), self._shared, len(validated & trained))


def count_overlap(train: EncodedSet, val: EncodedSet) -> Overlap:
    """Counts the pairs and prompts of ``val``, and how many of each are also in ``train``."""
    found = OverlapCounter()
    for split, one in (("train", train), ("val", val)):
        for pair, sides in zip(one.pairs, one.encoded, strict=True):
            found.add(split, digest_prompt(pair.prompt), sides)
    return found.count()


def digest_token_ids(sides: Mapping[str, EncodedResponse]) -> bytes:
    """Returns a digest of a pair's training token ids."""
    found = hashlib.blake2b(digest_size=16)
    for ids in (ids for side in SIDES for ids in (sides[side].prompt_ids, sides[side].response_ids)):
        found.update(array("q", [len(ids)]))
        found.update(array("q", ids))
    return found.digest()


def digest_prompt(prompt: Sequence[Message]) -> str:
    """Returns a digest of a prompt's messages."""
    return digest(prompt_identity(prompt))[:16]


# ------------------------------------------------------------------------------------------ training prompts of a run


def write_prompt_digests(folder: Path, prompts: Iterable[str]) -> None:
    """Writes the digests of the training prompts to a run's folder, for later evaluations of the run's models."""
    write_atomically(folder / FILE, "".join(f"{key}\n" for key in sorted(set(prompts))))


def count_seen_prompts(model: str, prompts: Iterable[Sequence[Message]]) -> dict[str, int]:
    """Counts and logs the distinct prompts that were in the training data of the run that saved ``model``.

    Returns an empty mapping if no prompt was seen in training. If the run's prompt digests are not available, logs this
    and also returns an empty mapping.
    """
    file, asked = Path(model).expanduser().parent / FILE, set(map(digest_prompt, prompts))
    if not file.is_file():
        log.info("%s has no %s next to it, so prompts from its training data cannot be counted", model, FILE)
        return {}
    seen = len(asked.intersection(file.read_text(encoding="utf-8").split()))
    log.log(
        logging.WARNING if seen else logging.INFO,
        "%d of %d distinct prompts are in the training data (%s)",
        seen,
        len(asked),
        file,
    )
    return {SEEN: seen} if seen else {}
