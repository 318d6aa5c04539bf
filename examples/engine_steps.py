"""Run an engine step by step, in the order and on the thread of your program: no thread and no process of its own.

python examples/engine_steps.py
"""

from pagoda import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams

engine = LLMEngine.from_engine_args(EngineArgs(model="smollm2-135m", max_model_len=512, max_num_seqs=4))
greedy = SamplingParams(temperature=0.0, max_tokens=16)
deltas = SamplingParams(temperature=0.0, max_tokens=16, output_kind=RequestOutputKind.DELTA)

engine.add_request("first", "The capital of France is", greedy)
engine.add_request("left", "Once upon a time", SamplingParams(max_tokens=400))
texts = {"first": "", "second": ""}
num_steps = 0
while engine.has_unfinished_requests():
    for output in engine.step():  # of the requests that have new tokens
        if output.request_id == "first":
            texts["first"] = output.outputs[0].text  # everything so far
        if output.request_id == "second":
            texts["second"] += output.outputs[0].text
        if output.finished:
            left = engine.get_num_unfinished_requests()
            print(f"step {num_steps}: {output.request_id} ended, {left} left: {texts[output.request_id]!r}")
    num_steps += 1
    if num_steps == 4:  # requests may come and go between any two steps
        engine.add_request("second", "One, two, three,", deltas)
    if num_steps == 8:
        engine.abort_request("left")
engine.shutdown()
