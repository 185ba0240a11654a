"""What the ranks did, in the form that judges read: runs, scripts, ledgers and traffic."""
