"""What the checks of this chapter call."""
