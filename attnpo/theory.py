"""Placeholder until 0.2.0: points to the new location of the paper's theory, outside the package."""

import sys

MOVED = "the package no longer contains the theory: from a checkout, run python -m experiments.theory (docs/theory.md)"


def __getattr__(name: str) -> object:
    """Raises an AttributeError that names the new location."""
    raise AttributeError(f"attnpo.theory.{name}: {MOVED}")


if __name__ == "__main__":
    sys.stderr.write(f"error: {MOVED}\n")
    sys.exit(2)
