"""A model's answers to prompts: the command ``python -m attnpo.generate``."""
