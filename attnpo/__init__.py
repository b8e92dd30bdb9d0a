"""attnpo: token-weighted preference optimisation on PyTorch Lightning."""

from importlib import import_module

__version__ = "0.1.0"

# Public names and the modules that have them, imported on first use: `import attnpo` stays light.
_LAZY = {"Weigher": "attnpo.weigher"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'attnpo' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
