"""Configuration: composes configs with Hydra and parses their values into dataclasses."""
