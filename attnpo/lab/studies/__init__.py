"""Studies: comparisons of many runs."""
