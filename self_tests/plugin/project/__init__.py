"""A small project judged by the plug-in in self_tests: a backend with one variant per verdict, and checks for it."""
