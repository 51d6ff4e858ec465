"""Facts of this machine about a prepared job: its parent, its memory, its proofs, cheaper methods."""
