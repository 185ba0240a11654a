"""Stand-ins for libraries and devices that a machine without a GPU lacks, in plain torch.

They have the interface that the code under test calls, and prove that code: no verdict speaks of what they replace.
"""
