"""Notifications about a job: the message, and the channels that send a message; standard library only."""
