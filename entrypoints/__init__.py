"""What runs on the nodes: the standard library, and torch in the trainer. Shipped alone: nothing else of ours."""
