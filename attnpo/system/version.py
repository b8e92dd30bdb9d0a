"""Package's version: read by the build, by ``attnpo.__version__`` and by what a run says of itself."""

VERSION = "0.1.0"
