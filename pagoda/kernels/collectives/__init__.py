"""What the ranks of a model compute together: sums and gathers within a stage, activations from stage to stage.

group.py       RankGroup, what a rank knows of the others; ThreadGroup, the obvious one, between threads
reference.py   the definition of all_reduce and all_gather
"""
