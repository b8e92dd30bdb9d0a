"""The training loop around Lightning: module, metrics, callbacks, export."""
