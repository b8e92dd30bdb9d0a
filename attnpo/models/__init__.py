"""Language models: loading, per-token statistics, attention rows of a judge, generation."""
