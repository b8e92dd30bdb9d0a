"""How numbers are shown: tables, report pages, figures, heat maps."""
