"""Fixtures of the text room."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.text.formats import Formats


@pytest.fixture(scope="session")
def formats() -> Formats:
    return Formats()


@pytest.fixture(scope="session")
def golden(vectors: Path) -> Path:
    return vectors / "extraction"


@pytest.fixture(scope="session")
def golden_pairs(golden: Path) -> list[dict[str, Any]]:
    pairs: list[dict[str, Any]] = json.loads((golden / "pairs.json").read_text())["pairs"]
    return pairs
