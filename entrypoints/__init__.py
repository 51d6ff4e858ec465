"""The code on the nodes: needs the standard library only, and torch in the trainer; sent without the launcher."""
