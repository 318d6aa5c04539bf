"""The scheduler: which requests run in each step, with how many tokens, in which blocks of the KV cache.

scheduler.py         the API, and the outline of a step on one screen; scheduler_options.py: SchedulerOptions;
                     scheduler_interface.py: what the engine asks of a scheduler
request.py           Request; RequestState and Sequence: what changes while it is served
state.py             SchedulerState: one attribute per owner, and what always holds; planning to lifecycle work on it
planning.py          the plan side: running, swapped, waiting requests; preemption.py when blocks run out
finishing.py         a step that is planned: forks, and the SchedulerOutput that is built from it
rules.py             what skips a request or stops its queue, what shortens a chunk; policy.py: the queues, and victims
committing.py        the commit side: tokens, ends (stops.py), failed rows; committing_beams.py: beam searches
drafts.py            draft tokens: offered, placed in a step, verified
lifecycle.py         requests are added, and move between waiting, running, swapped and ended
request_table.py     tokens and counts of all sequences, as numpy columns; running_batch.py: the rows that run
kv/                  KVCacheManager: blocks, block tables, prefix cache, host memory; encoder.py: encoder outputs
step_plan.py         StepPlan: a step while it is planned; scheduler_output.py: what workers get and return
in_flight.py         steps whose results are not back, and what depends on one that fails
events.py            what happens, as a stream; stats.py: totals of it for metrics; decision_log.py: why each step was
                     planned as it was; cost_model.py: measured costs
"""
