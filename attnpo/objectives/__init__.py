"""Preference objectives in response space: one file each, all behind ``base.PreferenceObjective``."""
