"""Tests of attnpo; a package, so that `python -m tests.conformance` finds this one."""
