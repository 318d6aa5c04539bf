"""What the ranks of a model compute together: sums and gathers within a stage, activations from stage to stage.

group.py           Communicator, how a rank reaches the others; ThreadGroup, the obvious one, between threads
reference.py       the definition of the ops
shared_memory.py   SharedGroup: ranks of one machine, processes or threads, in one piece of shared memory
segment.py         makes that memory
segment.h          what is in it, and how ranks wait for each other in it; cpu.cpp: the ops and messages
stage_socket.h     messages to a stage on another machine
"""
