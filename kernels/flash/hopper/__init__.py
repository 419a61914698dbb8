"""The kernels for Hopper GPUs (sm_90a), in Gluon: warp-specialised and persistent, fed by TMA.

forward.py, backward.py         the kernels; backward_loads.py: two of the backward's warps
wide_dkdv.py, wide_dq.py        the backward above head_dim 128
forward_output.py               the forward's epilogue: how out is stored
spec.py                         the forward's compile-time parameters (and wide_dq.py's)
forward_schedule.py, backward_schedule.py, groups.py   the tiles and work items that a program takes, their order
scheduler.py                    dynamic scheduling: programs claim them by an atomic counter
pipeline.py, split_tiles.py, descriptors.py   rings of tiles in shared memory, of one array or two; TMA descriptors
columns.py                      which columns of a tile are multiplied, and results in one part or two
primitives.py                   what Triton's releases name differently; programmatic dependent launch
softmax.py, masks.py, dropout.py, score_mods.py   on tiles in registers
bounds.py, block_masks.py, padding.py   windows and documents; block masks; key padding
dq.py                           delta; dQ up to head_dim 128: its product, its sum over work items in a fixed order
launch.py                       which tensors the kernels take, and the arguments of each launch
"""
