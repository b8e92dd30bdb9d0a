"""Overlap of training data with validation data and benchmarks, counted by digests of pairs and prompts."""

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

FILE = "training_prompts.txt"  # of a run's folder: the digest of a prompt on each line
SEEN = "prompts that the model was trained on"


@dataclass(frozen=True)
class Overlap:
    """Counts of validation's pairs and different prompts, and of those that are trained on as well.

    Pairs are the same where their token ids are, after truncation; prompts where their messages are.
    """

    pairs: int
    prompts: int
    trained_pairs: int
    trained_prompts: int

    def text(self) -> str:
        """Returns both counts in words."""
        return (
            f"{self.trained_pairs} of {self.pairs} validation pairs and {self.trained_prompts} of {self.prompts} "
            "validation prompts are trained on as well"
        )

    def warning(self) -> str | None:
        """Returns a remark for every validation figure; None where nothing is shared."""
        shared = self.trained_pairs or self.trained_prompts
        return f"{self.text()}, so validation results are not on unseen pairs only" if shared else None


class Overlaps:
    """Counts what is in both splits, from pairs that are added one by one: those of training first."""

    def __init__(self) -> None:
        self._ids: set[bytes] = set()
        self._prompts: tuple[set[str], set[str]] = set(), set()
        self._pairs = self._shared = 0

    def add(self, split: str, prompt: str, sides: Mapping[str, EncodedResponse]) -> None:
        """Counts a pair of a split, by the digest of its ``prompt`` and its token ids."""
        self._prompts[split == "val"].add(prompt)
        if split == "train":
            self._ids.add(key_of_ids(sides))
        else:
            self._pairs += 1
            self._shared += key_of_ids(sides) in self._ids

    def count(self) -> Overlap:
        """Returns the counts."""
        trained, validated = self._prompts
        return Overlap(self._pairs, len(validated), self._shared, len(validated & trained))


def count_overlap(train: EncodedSet, val: EncodedSet) -> Overlap:
    """Counts pairs and prompts of ``val``, and those that ``train`` has too."""
    found = Overlaps()
    for split, one in (("train", train), ("val", val)):
        for pair, sides in zip(one.pairs, one.encoded, strict=True):
            found.add(split, key_of_prompt(pair.prompt), sides)
    return found.count()


def key_of_ids(sides: Mapping[str, EncodedResponse]) -> bytes:
    """Returns a digest of a pair's token ids as they are trained on."""
    found = hashlib.blake2b(digest_size=16)
    for ids in (ids for side in SIDES for ids in (sides[side].prompt_ids, sides[side].response_ids)):
        found.update(array("q", [len(ids)]))
        found.update(array("q", ids))
    return found.digest()


def key_of_prompt(prompt: Sequence[Message]) -> str:
    """Returns a digest of a prompt's messages."""
    return digest(prompt_identity(prompt))[:16]


# ------------------------------------------------------------------------------------------------ a run's prompts


def write_prompts(folder: Path, prompts: Iterable[str]) -> None:
    """Writes the digests of a run's training prompts into its folder, for evaluations of its models."""
    write_atomically(folder / FILE, "".join(f"{key}\n" for key in sorted(set(prompts))))


def count_seen(model: str, prompts: Iterable[Sequence[Message]]) -> dict[str, int]:
    """Counts and logs the distinct prompts that were in the training data of the run that wrote ``model``.

    Empty where there are none. Says as well where no run's prompts are at hand.
    """
    file, asked = Path(model).expanduser().parent / FILE, set(map(key_of_prompt, prompts))
    if not file.is_file():
        log.info("%s: has no %s beside it, so prompts from its training data cannot be counted", model, FILE)
        return {}
    seen = len(asked.intersection(file.read_text(encoding="utf-8").split()))
    log.log(logging.WARNING if seen else logging.INFO, "%d of %d different prompts are in %s", seen, len(asked), file)
    return {SEEN: seen} if seen else {}
