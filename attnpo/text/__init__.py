"""Text to token ids: training sequences, judge prompts with character spans, weights moved between tokenisations."""
