"""Operations on rows that need no communication: permute, reorder, index, pack."""
