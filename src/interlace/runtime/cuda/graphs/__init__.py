"""The ops of a Program captured in CUDA graphs.

graphs.py           the graphs of an engine, a pair for each set of Parameters
captured.py         one pair of graphs: what is copied in and out, and where its results lie
spent.py            memory of what forward saved, for the results of its backward
warm_up.py          the run before the first capture, and the thread of both
"""
