"""Judging: compares what the ranks did with the oracles, explains differences and raises verdicts, on the driver."""
