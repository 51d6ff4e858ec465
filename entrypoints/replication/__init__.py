"""Copies of a job's saved files, from node to node over the training network."""
