"""The scenario of overlapped steps, which runs on every rank, and its records."""
