"""What several chapters judge alike, by surface."""
