"""The names importable from ``attnpo``: lazy, quick, typed, listed."""

import subprocess
import sys
from pathlib import Path

import pytest

import attnpo
from attnpo.system.version import VERSION

ROOT = Path(__file__).resolve().parents[1]


def seconds_of(code: str) -> float:
    """The least of a few processes' seconds in which ``code`` runs: a busy machine makes none of them quicker."""
    timed = f"import time; a = time.process_time(); {code}; print(time.process_time() - a)"
    command = [sys.executable, "-c", timed]
    return min(
        float(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout) for _ in range(3)
    )


def test_the_import_is_quick() -> None:
    """Less than 0.3 s of the processor, which on an idle machine are those of the clock."""
    assert seconds_of("import attnpo; dir(attnpo)") < 0.3


def test_every_public_name_is_there() -> None:
    assert attnpo.__version__ == VERSION
    for name in attnpo.__all__:
        assert getattr(attnpo, name) is not None
    assert set(attnpo.__all__) <= set(dir(attnpo))
    page = (ROOT / "docs" / "python_api.md").read_text(encoding="utf-8")
    assert [name for name in attnpo.__all__ if name != "__version__" and f"`attnpo.{name}" not in page] == []


def test_a_wrong_name_is_answered_with_the_right_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'loses'; public names: .*losses"):
        attnpo.loses  # type: ignore[attr-defined]  # noqa: B018
