"""What the backends are fed: tokens, routings and expert weights, pinned or drawn."""
