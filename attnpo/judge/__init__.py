"""Judge: prompts and labels, attention rows, verdicts and traces."""
