"""Pairs of options: the options of every surface, which pairs of their values are possible, and workloads with them.

Bugs that escape tests of each option alone show where two options meet. A file `options.py` of a chapter, or of this
package, registers a tuple `SURFACES`; beside it lie the rows that `tools/cover_pairs.py` wrote, from which `cases`
makes workloads. `measure` says which pairs the workloads of a profile have.
"""
