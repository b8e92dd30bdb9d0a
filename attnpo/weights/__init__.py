"""Token weights: sources, post-processing, the store of raw rows, and the way onto training tokens."""
