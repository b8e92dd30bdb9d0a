"""Measurements: statistics of weights, faithfulness, freedom, drift, intervals, prediction."""
