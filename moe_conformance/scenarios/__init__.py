"""The code that every rank executes for a run of a backend, and the records that it returns."""
