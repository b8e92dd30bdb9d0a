"""Judge, whole: its prompts and labels, rows of attention, verdicts and traces."""
