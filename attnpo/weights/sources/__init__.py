"""Weight sources, one per file; a configuration names the class by its ``_target_``."""
