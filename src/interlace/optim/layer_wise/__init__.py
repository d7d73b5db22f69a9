"""LayerWise: each rank updates whole parameters of its own, and gathers the rest.

optimizer.py            LayerWise itself: the steps, checkpoints, what a user calls
update_plan.py          who updates what; from sharded_parameters.py (how Parameters lie) and
                        ownership.py (owners and places, numbers alone)
step_runs.py            the Programs of a step, and what precedes and follows each
flat_weights.py         weights in flat buffers, and the modules that wait for them
arriving.py             Parameters that wait when they are read
bucket_update.py        updates bucket by bucket
shard_pipeline.py       shards of fully_shard, whose matrices owners make orthogonal, and
                        shard_exchange.py, how those come to owners and back
tensor_homes.py         matrices of tensor parallelism that one rank updates whole
owned_state.py          the part of the state that a rank owns
clipping.py             the norm over several LayerWise
whole_parameters.py     Parameters by name, and their hashes
"""
