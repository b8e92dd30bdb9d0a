"""Command line: entry points, help, logging, progress display and error messages."""
