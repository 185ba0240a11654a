"""What one rank does to rows by itself: permute, reorder, index, pack."""
