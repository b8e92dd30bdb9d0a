"""Version of the package, used by the build, ``attnpo.__version__`` and the records of runs."""

VERSION = "0.1.0"
