"""Says, until 0.2.0, where the paper's theory went: it is no part of the package."""

import sys

MOVED = "the paper's theory stands beside the package: in a checkout, python -m experiments.theory (docs/theory.md)"


def __getattr__(name: str) -> object:
    """Raises AttributeError that says where the names of before are."""
    raise AttributeError(f"attnpo.theory.{name}: {MOVED}")


if __name__ == "__main__":
    sys.stderr.write(f"error: {MOVED}\n")
    sys.exit(2)
