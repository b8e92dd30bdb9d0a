"""attnpo: token-weighted preference optimisation on PyTorch Lightning.

Pairs -> judge -> token weights -> objective -> training: ``PreferenceDataModule`` weights pairs with a judge's
attention (``attnpo.judge``, ``attnpo.weights``), ``PreferenceModule`` trains on them with an objective
(``attnpo.objectives``).

Exports the Python API (docs/python_api.md); each name loads its module on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from attnpo.system.version import VERSION as __version__

if TYPE_CHECKING:
    from attnpo import losses as losses
    from attnpo.data.datamodule import PreferenceDataModule as PreferenceDataModule
    from attnpo.lab.api import run_study as run_study
    from attnpo.lab.api import train as train
    from attnpo.lab.results import load_run as load_run
    from attnpo.lab.results import load_study as load_study
    from attnpo.run.weight_export import export_weights as export_weights
    from attnpo.training.module import PreferenceModule as PreferenceModule
    from attnpo.weigher import Weigher as Weigher

# Public name -> the module that defines it; `losses` is a module itself.
_HOLDS = {
    "PreferenceDataModule": "attnpo.data.datamodule",
    "PreferenceModule": "attnpo.training.module",
    "Weigher": "attnpo.weigher",
    "export_weights": "attnpo.run.weight_export",
    "load_run": "attnpo.lab.results",
    "load_study": "attnpo.lab.results",
    "losses": "attnpo.losses",
    "run_study": "attnpo.lab.api",
    "train": "attnpo.lab.api",
}

__all__ = ["__version__", *_HOLDS]


def __getattr__(name: str) -> object:
    """Loads the module of a public name.

    Raises:
        AttributeError: ``name`` is not public; the message lists the public names.
    """
    if name not in _HOLDS:
        raise AttributeError(f"module 'attnpo' has no attribute {name!r}; public names: {', '.join(_HOLDS)}")
    module = import_module(_HOLDS[name])
    value: object = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names and the names already loaded."""
    return sorted({*globals(), *_HOLDS})
