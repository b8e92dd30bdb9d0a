"""From words to typed components: Hydra composes, values are checked against dataclasses."""
