"""All that a user types and sees: the life of an entry point, help, log lines, progress, errors."""
