"""The inputs of backends: tokens, routings and parameters, pinned or drawn at random."""
