"""The stored values, held against the second oracles."""
