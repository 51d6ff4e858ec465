"""Machine prices: the package's dated table, and prices that a user has read from the vendors."""
