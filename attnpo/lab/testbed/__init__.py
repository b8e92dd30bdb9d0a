"""Controlled world with a known true reward: a grammar of reviews, a base model trained on it, pairs and scores."""
