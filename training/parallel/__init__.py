"""A run on several ranks: what each of them holds, and what they tell each other.

config.py      the settings of the group `parallel`
mesh.py        who is who: the DeviceMesh, and which part of a batch a rank takes
wrap.py        the model as it trains on that mesh: DistributedDataParallel, or FSDP2's fully_shard
"""
