"""Presentation of numbers: tables, report pages, figures, heat maps."""
