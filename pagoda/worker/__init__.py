"""One device's share of the engine: the model, the KV memory and a mirror of the scheduler's rows.

It decides nothing: a step is a SchedulerOutput, and what came of it a ModelRunnerOutput.

loaded_model.py, worker.py   load the model, measure what its steps take (dry_runs.py), make the pools, start
model_runner.py    a step: apply its events, stage its inputs, run the forward, sample, begin the copy to the host
table_mirror.py    the rows: tokens, block tables, positions, sampling columns (constraints.py: penalties, bad words)
staging.py         the inputs of a forward, in one copy to the device; batch_rows.py: its rows, and their padded sizes
forward_runner.py  a model: op by op, as a recorded program, or as graphs
encoders.py        images and audio: encoder runs, their outputs by content, and where they go in a step
sampler.py, pooler.py, grammar_rows.py   from logits to tokens, from states to vectors, masks of grammars
alignment.py       where tokens look in what the encoder read, for the times of words
launched_steps.py  steps whose results are not on the host yet
cache_engine.py, memory.py, adapters.py  KV pools, how large they can be, LoRA adapters
calls.py, grammar.py       what it is asked besides steps, and what it asks of a backend of grammars
speculation/       drafts of the next tokens, and when they pay
devices/           one class per device
"""
