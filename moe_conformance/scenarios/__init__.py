"""What the ranks do: one run of a backend each, and the records that it returns."""
