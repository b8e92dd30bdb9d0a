"""Preference pairs made of several answers to each prompt: the command ``python -m attnpo.pair``."""
