"""Finished folders and token weights as tables: the command ``python -m attnpo.report``."""
