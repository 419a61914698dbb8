"""A run on several ranks: what each of them holds, and what they tell each other (docs/many-gpus.md).

config.py      the settings of the group `parallel`
mesh.py        who is who: the DeviceMesh, and which part of a batch a rank takes
context.py     ranks that share each sequence: what they cannot do, their attention, which part each has
replicate.py   each rank holds all: DistributedDataParallel
shard.py       in parts: FSDP2, and the update of the parts
blocks.py      activation checkpointing; torch.compile a block at a time
parts.py       checkpoints in parts, and who reads them; saving.py writes them in the background
watch.py       who is missing; rescue.py copies what is left
"""
