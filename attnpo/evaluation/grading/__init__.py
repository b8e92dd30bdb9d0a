"""Questions to graders and what they answered: asked with bounds, kept as they come, never asked twice."""
