"""A model's answers to prompts (``attnpo.generate``)."""
