"""Preference objectives in response space: one file each, each a ``base.PreferenceObjective``."""
