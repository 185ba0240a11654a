"""COST: bugs that cost calls or bytes and change no value."""
