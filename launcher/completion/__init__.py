"""What a shell is told after TAB: quick, silent, from this machine's own files alone."""
