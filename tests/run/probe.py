"""An analysis that counts the training pairs of a world, and how often it was asked to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnpo.data.prepare import EncodedSet
from attnpo.display.page import Paragraph, Section, TableBlock
from attnpo.lab.studies.outcome import Outcome
from attnpo.lab.studies.study import MeasuredBy
from attnpo.run.components import Truth
from attnpo.run.resolve import Readers
from attnpo.weights.base import WeightSource

asked: list[str] = []


@dataclass(frozen=True)
class Probe:
    """Counts pairs, or fails."""

    value: float = 1.0
    fails: bool = False

    def measure(
        self,
        source: WeightSource,
        readers: Readers,
        truth: Truth | None,
        encoded: dict[str, EncodedSet],
        folder: Path,
    ) -> dict[str, Any]:
        """The number of pairs, the config's weights and ``value``."""
        asked.append(type(source).__name__)
        if self.fails:
            raise RuntimeError("nothing to see")
        assert folder.is_dir()
        return {"pairs": len(encoded["train"].pairs), "value": self.value, 1: (2, 3)}

    def sections(self, outcome: Outcome, measured: MeasuredBy) -> list[Section]:
        """A row per world and seed."""
        rows = [[world, seed, found["pairs"]] for (world, seed), found in measured.items()]
        return [Section("Probe", [Paragraph("pairs that were counted"), TableBlock(["world", "seed", "pairs"], rows)])]
