"""The oracles of reference/ and the second oracles, held against each other."""
