"""Finished folders and token weights as tables (``attnpo.report``)."""
