"""System layer: files, locks, the store, processes, versions and the hub. Imports no other subpackage."""
