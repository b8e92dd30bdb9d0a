"""Looking at weights and results: statistics of weights, heat maps, figures, tables and report pages."""
