"""Work of one launch.

transfers.py   collectives and messages by NCCL, or by one kernel over peer memory
fused.py       the parts of a Fused op as one persistent kernel; the sum of a reduction's slots
"""
