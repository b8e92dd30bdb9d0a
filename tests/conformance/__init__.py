"""Golden records and the families of models, recomputed: `python -m tests.conformance PATH` (CONTRIBUTING.md)."""
