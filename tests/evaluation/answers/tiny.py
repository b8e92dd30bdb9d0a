"""Requests to a tiny model on this machine, and ways to stop it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from attnpo.models.generate import HFGenerator
from attnpo.schema import Sampling


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@contextmanager
def batches(stop_after: int | None = None) -> Iterator[list[tuple[int, Sampling]]]:
    """Yields size and sampling of every batch that a model answers; a KeyboardInterrupt comes after so many."""
    made: list[tuple[int, Sampling]] = []
    original = HFGenerator.generate_batch

    def answer(self: HFGenerator, requests: Any, sampling: Any) -> Any:
        if len(made) == stop_after:
            raise KeyboardInterrupt
        made.append((len(requests), sampling))
        return original(self, requests, sampling)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFGenerator, "generate_batch", answer)
        yield made
