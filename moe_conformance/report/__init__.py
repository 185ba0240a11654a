"""The report of a run: one record per item, shown as a matrix in the terminal and written to result.json."""
