"""LayerWise: each rank updates whole parameters of its own, and gathers the rest.

optimizer.py            LayerWise itself: the steps and their Programs, what a user calls
update_plan.py          who updates what: Parameters as they lie, with the owners and places of
                        ownership.py (numbers alone)
flat_weights.py         weights in flat buffers, and the modules that wait for them
arriving.py             Parameters that wait when they are read
bucket_update.py        updates bucket by bucket
tensor_homes.py         matrices of tensor parallelism that one rank updates whole
shard_pipeline.py       shards of fully_shard, whose matrices owners make orthogonal
owned_state.py          the part of the state that a rank owns
"""
