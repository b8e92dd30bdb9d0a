"""Preference data: pairs read from datasets, batches for whole optimizer steps, and the Lightning data module."""
