"""From a configuration and a corpus to a checkpoint folder.

`run.py` puts the parts together; `trainer.py` is the loop. Every random number is a function of (seed, step, row), so a
run that was killed continues bit for bit from its last whole checkpoint without any generator state.
"""
