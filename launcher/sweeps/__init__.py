"""Sweeps: a search as many jobs within one budget, driven by any command that looks."""
