"""Conversion of text to token ids: chat templates, character ranges, and weights moved between tokenisations."""
