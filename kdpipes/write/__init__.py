"""What is written: local copies of files, and record files."""
