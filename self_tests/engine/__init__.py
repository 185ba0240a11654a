"""The engine under test: ranks, ledgers, faults, launchers, GPUs, virtual ranks."""
