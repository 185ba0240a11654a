"""The plug-in, the command line, reports and waivers under test."""
