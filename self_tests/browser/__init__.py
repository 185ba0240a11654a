"""report.html in a real browser: `tox run -e browser`."""
