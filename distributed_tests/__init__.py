"""The checks: one file per chapter of the law, each check citing the requirement that it decides."""
