"""Copies of what a job saves, from node to node over the training network."""
