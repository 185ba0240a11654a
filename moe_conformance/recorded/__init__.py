"""Outcomes of real libraries, stored as data, so that their judgement can be repeated where no library is.

A case is two files: a JSON document and the tensors that it refers to, in safetensors. `moe-conformance record` writes
them, `moe-conformance rejudge` and a test of `self_tests/recorded` judge them again.

    pools.py       tensors as parts of one flat tensor for each dtype
    codec.py       records of a run as JSON, and back; only records that are known are made
    workloads.py   the fingerprint of a workload, which is drawn again and not stored
    judging.py     every check that reads a case, and its verdict on an outcome
    files.py       a recorded case, in its two files
    again.py       judges a recorded case with the checks of today, and says what differs
    recording.py   runs cases and records them
"""
