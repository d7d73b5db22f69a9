"""The happens-before graph of all ranks, of a run.

source.py   Programs with names bound in list order
graph.py    nodes, edges and clocks;  build.py: all ranks, and what joins them
"""
