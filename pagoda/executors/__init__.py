"""Where steps run: executors behind one protocol (engine/executor.py), over one worker or many.

in_process.py      one rank in this process
multi_process.py   a process for each rank: what is sent to them, what they reply, what ends them all
messages.py        those messages
rank.py            a rank's process
ray.py             ranks as actors of a Ray cluster
fake.py            no model, for tests
"""
