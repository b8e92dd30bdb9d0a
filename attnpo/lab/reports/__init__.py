"""Tables of finished runs, studies and token weights (``python -m attnpo.report``)."""
