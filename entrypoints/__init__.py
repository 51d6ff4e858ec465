"""The code that runs on the nodes: standard library, and torch in the trainer. Shipped without the other packages."""
