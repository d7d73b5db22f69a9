"""What one launch does.

transfers.py   collectives and messages by NCCL, or by one kernel (exchanges.py)
parts.py       what the parts of a Fused op do;  fused.py: as one persistent kernel
sums.py        the sum of a reduction's slots
"""
