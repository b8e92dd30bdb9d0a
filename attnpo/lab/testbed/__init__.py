"""Controlled world with known truth: a grammar of reviews, a base model trained on it, pairs and scores."""
