"""One run: from a composed config to a result."""
