"""The ways to run the cases: one file each, run as a program or by pytest, and told what to do by timeline.py."""
