"""One pair, token by token."""
