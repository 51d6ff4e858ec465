"""Parts that the shared trainer and users' scripts have in common on each rank."""
