"""Persistent GEMMs that wait for the rows of others, or tell when rows are made.

support.py    what the kernels serve, and which tile shape a size gets
matmul.py     how the runtime launches them: all-gather + GEMM, GEMM + reduce-scatter
gather_kernel.py, scatter_kernel.py: in Triton;  specialized.py: in Gluon;  device.py: shared
"""
