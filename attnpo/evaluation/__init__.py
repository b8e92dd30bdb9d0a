"""Benchmarks: questions for a model, grading of the answers, and scores with their spreads."""
