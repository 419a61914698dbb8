"""The portable kernels, in Triton: every feature, any GPU that Triton compiles for, and the interpreter.

forward.py, backward.py   the kernels; their shared parts:
spec.py                   what they know of a call, at compile time and at run time
masks.py, score_mods.py   which keys a query sees; softcap and ALiBi
memory.py                 loads and stores of row tiles
tiles.py, measured/       tile sizes, and the timings that selected them
launch.py                 tile, grid and arguments of a launch
"""
