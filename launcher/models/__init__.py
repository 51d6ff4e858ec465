"""Model folders after the training: where they go."""
