"""Notifications about jobs: the channels in a config, and delivery, once per notice, by the following process."""
