"""What is wrong with a chain, what bounds it, and what one change would help most."""
