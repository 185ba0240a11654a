"""The suite as it is installed: from a wheel, editable, and as plain pytest finds it."""
