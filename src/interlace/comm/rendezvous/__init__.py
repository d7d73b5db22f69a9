"""Rendezvous: ranks find one another, agree in bounded time, and notice who is gone.

board.py      notes, meetings and verdicts in the store of torch.distributed
liveness.py   is the process of a peer still there
patience.py   time-outs in time that was seen to pass, and calls that may not come back
"""
