"""The judges under test, on outcomes of simulated ranks that are right or broken."""
