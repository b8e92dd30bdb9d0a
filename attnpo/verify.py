"""Placeholder until 0.2.0: points to the tests that recompute the golden records, which are not in the wheel."""

import sys

MOVED = "the tests recompute golden records: from a checkout, run python -m tests.conformance PATH (CONTRIBUTING.md)"


def __getattr__(name: str) -> object:
    """Raises an AttributeError that names the new location."""
    raise AttributeError(f"attnpo.verify.{name}: {MOVED}")


if __name__ == "__main__":
    sys.stderr.write(f"error: {MOVED}\n")
    sys.exit(2)
