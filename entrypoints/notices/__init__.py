"""Telling people about a job: a message, and the ways to send one; standard library only."""
