"""Token weights: sources, post-processing, the store of raw rows, and alignment with the training tokens."""
