"""What stands in the way of a job: of this installation itself, and of each backend."""
