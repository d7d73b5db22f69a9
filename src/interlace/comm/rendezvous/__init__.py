"""How ranks find one another and agree, in bounded time, and notice who is gone.

board.py      notes and verdicts in the store of torch.distributed
greeting.py   ranks that are there now find a name that no rank of before knows
liveness.py   is the process of a peer still there
patience.py   time-outs in time that was seen to pass, and calls that may not come back
"""
