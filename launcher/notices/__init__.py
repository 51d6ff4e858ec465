"""Telling people about their jobs: which channels a config names, and the delivery, once each, behind who follows."""
