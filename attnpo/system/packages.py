"""Optional packages: detects a missing one and suggests the command that installs it."""

import re
import shlex
import sys
from importlib import metadata
from pathlib import Path


def describe_missing_package(error: BaseException) -> str | None:
    """Explains how to install the package whose absence caused ``error``; None for other errors."""
    if not isinstance(error, ImportError):  # PackageNotFoundError is one too
        return None
    named = [str(error.name).partition(".")[0]] if error.name else re.findall(r"[A-Za-z][\w-]*", str(error))
    for package, extras in _requirements().items():
        if package not in named or _is_installed(package):
            continue
        if not extras:
            return f"the package {package} is not installed: pip install {package}"
        extra = extras[0]
        return f"the package {package} is not installed; it is part of the extra `{extra}`: {install_command(extra)}"
    return None


def install_command(extra: str) -> str:
    """Returns the command that installs an extra, for a checkout or an installed wheel."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "setup.cfg").is_file():
        return f"pip install 'attnpo[{extra}]'"
    place = "." if checkout == Path.cwd() else checkout
    return f"pip install -e {shlex.quote(f'{place}[{extra}]')}"


def _is_installed(package: str) -> bool:
    """Returns whether a package is installed and not blocked by a None in ``sys.modules``."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return sys.modules.get(package, package) is not None


def _requirements() -> dict[str, list[str]]:
    """Returns attnpo's requirements, mapped to the extras they belong to (none if always required)."""
    try:
        listed = metadata.requires("attnpo") or []
    except metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return {}
    packages: dict[str, list[str]] = {}
    for line in listed:
        package = re.match(r"[A-Za-z0-9_.-]+", line)
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", line)
        if package is not None:
            packages.setdefault(package[0], []).extend([extra[1]] if extra else [])
    return packages
