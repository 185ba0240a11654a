"""Each chapter: its second oracle, pairs, planted bugs and tests of its judge."""
