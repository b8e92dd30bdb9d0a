"""Machine and files below: files, locks, the store, processes, versions, the hub. Imports no other room."""
