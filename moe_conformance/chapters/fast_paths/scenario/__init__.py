"""What ranks run for this chapter."""
