"""Puts ``configs/``, which stands beside the package, inside it when a wheel or an sdist is built.

Everything else is said in setup.cfg. An editable installation reads the folder where it stands.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CONFIGS = Path("configs")


class BuildWithConfigs(build_py):
    """Builds the package with the configurations that its commands compose."""

    def run(self) -> None:
        """Copies the modules, their package data and the configurations."""
        super().run()
        if self.editable_mode:
            return
        for file in config_files():
            target = Path(self.build_lib, "attnpo", file)
            self.mkpath(str(target.parent))
            self.copy_file(str(file), str(target))

    def get_source_files(self) -> list[str]:
        """What an sdist needs to build the wheel again."""
        return [*super().get_source_files(), *map(str, config_files())]


def config_files() -> list[Path]:
    """Every file of the configurations; the hidden ones of editors are left out."""
    return sorted(file for file in CONFIGS.rglob("*") if file.is_file() and not file.name.startswith("."))


setup(cmdclass={"build_py": BuildWithConfigs})
