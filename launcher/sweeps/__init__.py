"""Sweeps: the trials of a job that searches within one budget: their costs and their part of the screens."""
