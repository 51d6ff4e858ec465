"""What machines cost: the package's dated table, and the prices that a user has read anew from the vendors."""
