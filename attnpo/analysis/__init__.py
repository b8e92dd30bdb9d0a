"""Measurements: statistics of weights, faithfulness, freedom, intervals, prediction."""
