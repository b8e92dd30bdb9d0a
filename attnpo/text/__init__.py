"""Applies chat templates, tokenises text, tracks character ranges and moves weights between tokenisations."""
