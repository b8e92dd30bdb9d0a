"""Benchmarks that ask a model questions, grade its answers, and report scores with their spread."""
