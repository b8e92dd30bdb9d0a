"""Studies: many runs compared."""
