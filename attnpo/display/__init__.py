"""Presentation of results: tables, report pages, figures, heat maps."""
