"""Nodes of an FX graph as steps: what each reads, writes and orders.

Reading order: targets.py (what orders anything), tensors.py and values.py (storages, boxes, views),
naming.py (streams and groups), then walk.py with sync.py and communication.py.
"""
