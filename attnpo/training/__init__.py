"""Training loop around Lightning: module, metrics, callbacks, export."""
