"""What a host does for the launcher over one ssh channel: calls in, answers out."""
