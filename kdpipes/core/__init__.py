"""What every pipe is made of."""
