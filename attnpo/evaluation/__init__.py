"""Benchmarks: questions for a model, grading of its answers, and scores with their spread."""
