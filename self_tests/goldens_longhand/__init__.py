"""What the second oracles make of the inputs of the goldens, a chapter a file, under the names that are stored.

Every module has `work_out`, from the stored inputs, and `UNANSWERED`: the stored outputs that no function of a second
oracle gives.
"""
