"""Executes one run, from a typed config to a result folder."""
