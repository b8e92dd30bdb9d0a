"""The paper's theory on policies small enough to enumerate (``python -m attnpo.theory``)."""
