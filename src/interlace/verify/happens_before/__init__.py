"""The happens-before graph of all ranks, over several runs.

source.py, lower.py   Programs with names bound in list order
frames.py             one run of one rank;  build.py: all of them, and what joins them
graph.py              nodes, edges and clocks
"""
