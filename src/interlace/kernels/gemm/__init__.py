"""Persistent GEMMs that wait for the rows of others, or tell when rows are made.

support.py, configs.py   what the kernels serve, and which tile shape a size gets
gather_matmul.py         all-gather + GEMM in one kernel;  scatter_matmul.py: GEMM + reduce-scatter
gather_kernel.py, scatter_kernel.py: in Triton;  specialized*.py: in Gluon;  device.py: shared
"""
