"""The happens-before graph of all ranks, over several runs.

source.py   Programs with names bound in list order
graph.py    nodes, edges and clocks;  build.py: the runs of all ranks, and what joins them
"""
