"""Tables of finished runs and studies, and of token weights: the command ``python -m attnpo.report``."""
