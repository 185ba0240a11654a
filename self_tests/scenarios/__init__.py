"""The scenarios under test: the probe, windows on parameters, scripts."""
