"""Your own machines over ssh: no daemon, no root, the system's ssh."""
