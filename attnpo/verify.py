"""Says, until 0.2.0, where the golden records went: recomputing them is a test, which no wheel has."""

import sys

MOVED = "golden records are recomputed by the tests: in a checkout, python -m tests.conformance PATH (CONTRIBUTING.md)"


def __getattr__(name: str) -> object:
    """Raises AttributeError that says where the names of before are."""
    raise AttributeError(f"attnpo.verify.{name}: {MOVED}")


if __name__ == "__main__":
    sys.stderr.write(f"error: {MOVED}\n")
    sys.exit(2)
