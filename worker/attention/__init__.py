"""Attention over the paged KV pool: one interface, one pool layout, several backends.

base.py            the interface, the metadata of a step, and the pool's layout
sdpa.py            gathers blocks, then runs torch's attention: for CPUs, and the reference
triton.py          paged attention without a gather: for CUDA
triton_kernels.py  its kernels
registry.py        backends by name
"""
