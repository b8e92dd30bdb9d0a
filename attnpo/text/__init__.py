"""Converts text to token ids with chat templates and character ranges; moves weights between tokenisations."""
