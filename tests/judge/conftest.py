"""Tiny models and chat formats, as the rooms of models and text have them."""

from tests.models.conftest import batch_sizes, exact_llama, family, shape, tiny
from tests.text.conftest import formats, golden, golden_pairs

__all__ = ["batch_sizes", "exact_llama", "family", "formats", "golden", "golden_pairs", "shape", "tiny"]
