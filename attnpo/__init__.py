"""attnpo: token-weighted preference optimisation on PyTorch Lightning."""

__version__ = "0.1.0"
