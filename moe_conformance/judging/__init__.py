"""Comparison, diagnosis and verdicts: everything that is decided about an outcome is decided here, on the driver."""
