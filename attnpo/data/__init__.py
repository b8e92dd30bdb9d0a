"""Preference data: rows of a dataset to pairs, batches that plan whole optimiser steps, what the trainer loads."""
