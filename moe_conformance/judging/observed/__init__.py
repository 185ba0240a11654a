"""What the ranks did, made readable for the judges: runs, scripts, ledgers, traffic."""
