"""Preference objectives in response space: one per file, each implementing ``base.PreferenceObjective``."""
