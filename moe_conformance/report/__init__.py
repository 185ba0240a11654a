"""What a run tells: one record per item, gathered into a terminal matrix and result.json."""
