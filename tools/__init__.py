"""What is run on the repository, and is no part of what is installed."""
