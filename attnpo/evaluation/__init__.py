"""Benchmarks: what a model is asked, how its answers are graded, and the scores with their spreads."""
