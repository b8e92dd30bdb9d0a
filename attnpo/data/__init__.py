"""Reads preference pairs from datasets and batches them by whole optimizer steps for a Lightning data module."""
