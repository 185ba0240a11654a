"""Stand-ins for kernel libraries and devices that a machine without a GPU lacks, as plain torch over gloo.

They prove the *caller*, never what they replace.

presenting.py  puts a stand-in under the name that a library imports, while a module of that library is loaded
events.py      events of DeepEP: what an asynchronous call returns is not there before it is waited for
rows.py        rows to the ranks of a table and back, summed: what all of them are built of
deep_ep.py     `deep_ep.Buffer`, the normal kernels of DeepEP 1.x, which 2.x keeps as its legacy buffer
elastic.py     `deep_ep.ElasticBuffer` of DeepEP 2.x
expanded.py    the layout of its dispatch that has a row for each pair
hybrid_ep.py   `deep_ep.HybridEPBuffer`, of DeepEP's branch hybrid-ep
nccl_ep.py     `transformer_engine.pytorch.ep`, NCCL's expert parallelism in Transformer Engine
streams.py     `torch.cuda`'s streams and events
delayed_weights.py  layers whose weight gradients are computed later, as Transformer Engine's

Each of the kernels is written from the public source of one commit, which it names, and does what that documents:
argument names, layouts, handles, alignment, overflow. Where the kernel leaves memory unwritten or unready, it is filled
with values that no caller may use. A stand-in refuses what the kernel's host side refuses; the classes `Wide...` take
rows of any floating type and width, so that a caller can be judged exactly.

What reports of it says "stand-in, no verdict of the kernel" (`NOTE`).
"""

from __future__ import annotations

NOTE = "stand-in, no verdict of the kernel"

__all__ = ["NOTE"]
