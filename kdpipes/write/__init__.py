"""What is written: local copies of files."""
