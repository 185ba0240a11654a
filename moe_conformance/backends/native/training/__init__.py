"""Native's whole training step."""
