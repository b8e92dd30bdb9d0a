"""Measurements: statistics of weights, where a policy moved, how a judge is calibrated."""
