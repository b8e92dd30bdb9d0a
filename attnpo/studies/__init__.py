"""Runs and studies: everything below put together. A study is a list of normal runs."""
