"""Speculative decoding compared with none: the same engine and requests in turn, as ratios of time.

    python benchmarks/speculation.py                                  all workloads, n-gram drafts
    python benchmarks/speculation.py --rounds 5 --workload edit qa    the copy-heavy ones alone
    python benchmarks/speculation.py --speculative-config '{"method": "suffix"}'

edit and qa copy most of their output from the prompt, one request at a time (edit: a text of about 400 tokens with a
name changed; qa: passages quoted from a pasted document). single, chat and batch64 have nothing to copy: they show what
speculation costs where it does not help. Every output is compared with the one without speculation, and must be equal.
ratio is of the whole time; decode_ratio is of the time from the first token to the end, since drafts do not speed up a
prompt. An output that repeats itself is a loop of a small model and says nothing about drafting: it is marked and left
out.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pagoda import LLM, RequestOutput, SamplingParams

TEXT = """\
The harbour at Greywick was built in 1823 by the engineer Thomas Arden, who had already drained two marshes \
further north. He found a muddy creek, eleven fishing boats and a chapel without a roof. Within six years there \
was a stone pier of four hundred feet, a lighthouse with a brass lamp, and a market square where herring, rope \
and salted butter were sold on Tuesdays and Fridays. The lamp burned whale oil until 1861, when the town council \
voted to replace it with paraffin, which was cheaper and smelled less.

Arden kept a diary in a green notebook, and it survives in the county archive. On the twelfth of March 1824 he \
wrote that the divers refused to go down because of an eel as long as a cart. In May he complained that the \
granite from the southern quarry was too soft, and that the foreman, a man called Pell, had sold the good blocks \
to a brewer. By autumn the first ship could be unloaded at low water, and the harbour master charged her captain \
two shillings for the privilege.

The railway came in 1848 and changed everything. Fish that was landed before dawn could be eaten in the capital \
the same evening, and the price of a barrel of herring doubled in one winter. New streets were laid out on the \
hill, with names taken from admirals. A school for sixty children opened in 1852; its bell was cast from the \
propeller of a wrecked steamer and can still be heard on windy mornings. When Arden died in 1859, the fishermen \
rowed his coffin once around the pier, and every boat lowered its flag."""

QUESTIONS = (
    "Quote the whole paragraph about the railway, word for word.",
    "Copy the first paragraph of the document exactly.",
    "Copy the last paragraph of the document exactly.",
)

CHATS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Give me three tips for learning a new language.",
    "What is the difference between a virus and a bacterium?",
    "Describe a good breakfast for a long day of walking.",
    "Why do cats purr?",
    "Write a polite email asking for a day off.",
    "How does a bicycle stay upright?",
)

_GRAM = 12  # tokens: a run that occurs more than twice in an output is a loop


@dataclass(frozen=True, slots=True)
class Workload:
    """messages: one conversation per request.   together: all at once, else one after the other."""

    messages: Sequence[str]
    max_tokens: int
    together: bool = False
    temperature: float = 0.0


WORKLOADS = {
    "edit": Workload(
        [
            f"Rewrite the following text. Change the name Arden to Holt everywhere, and nothing else.\n\n{TEXT}",
            f"Repeat the following text exactly, but write Whitwick instead of Greywick.\n\n{TEXT}",
        ],
        512,
    ),
    "qa": Workload([f"Document:\n\n{TEXT}\n\n{question}" for question in QUESTIONS], 256),
    "single": Workload(CHATS[:3], 192),
    "chat": Workload(CHATS, 128, together=True, temperature=0.7),
    "batch64": Workload([f"{CHATS[i % len(CHATS)]} (Answer {i + 1}.)" for i in range(64)], 96, together=True),
}


def loops(token_ids: Sequence[int]) -> bool:
    """Return whether an output repeats itself."""
    grams = Counter(tuple(token_ids[i : i + _GRAM]) for i in range(len(token_ids) - _GRAM))
    return bool(grams) and max(grams.values()) > 2


def run(llm: LLM, workload: Workload) -> tuple[list[RequestOutput], list[float]]:
    """Return the outputs and seconds, per request if they run one after the other, else one for all."""
    conversations = [[{"role": "user", "content": text}] for text in workload.messages]
    params = [
        SamplingParams(temperature=workload.temperature, max_tokens=workload.max_tokens, seed=i)
        for i in range(len(conversations))
    ]
    outputs: list[RequestOutput] = []
    seconds: list[float] = []
    batches = [range(len(conversations))] if workload.together else [[i] for i in range(len(conversations))]
    for batch in batches:
        begin_s = time.perf_counter()
        outputs += llm.chat([conversations[i] for i in batch], [params[i] for i in batch], use_tqdm=False)
        seconds.append(time.perf_counter() - begin_s)
    return outputs, seconds


def decode_s(output: RequestOutput) -> float:
    """Return the seconds from the first token to the end."""
    metrics = output.metrics
    assert metrics is not None
    assert metrics.finished_time is not None
    assert metrics.first_token_time is not None
    return metrics.finished_time - metrics.first_token_time


def compare(name: str, workload: Workload, plain: LLM, drafting: LLM, rounds: int) -> dict[str, object]:
    """Run both in turn; print what came out; return the ratio of times (above 1: faster with drafts)."""
    ratios: dict[int, list[float]] = {}
    decode_ratios: dict[int, list[float]] = {}
    expected, _ = run(plain, workload)
    for _ in range(rounds):
        plain_outputs, plain_s = run(plain, workload)
        got, drafting_s = run(drafting, workload)
        for each, other in zip(expected, got, strict=True):
            assert each.outputs[0].token_ids == other.outputs[0].token_ids, "speculation changed an output"
        for i, (before, after) in enumerate(zip(plain_s, drafting_s, strict=True)):
            ratios.setdefault(i, []).append(before / after)
        for i, (before, after) in enumerate(zip(plain_outputs, got, strict=True)):
            decode_ratios.setdefault(i, []).append(decode_s(before) / decode_s(after))
    counted: list[float] = []
    decode_counted: list[float] = []
    drafted = accepted = emitted = 0
    for i, output in enumerate(got):
        metrics, tokens = output.metrics, output.outputs[0].token_ids
        assert metrics is not None
        is_loop = loops(tokens)
        drafted, accepted = drafted + metrics.num_draft_tokens, accepted + metrics.num_accepted_tokens
        emitted += len(tokens)
        if not workload.together:
            steps = max(1, len(tokens) - metrics.num_accepted_tokens)
            note = " LOOP, left out" if is_loop else ""
            print(
                f"  {name} {i}: {statistics.median(ratios[i]):.2f} x, {len(tokens)} tokens, "
                f"{len(tokens) / steps:.2f} per step, "
                f"accepted {metrics.num_accepted_tokens} of {metrics.num_draft_tokens}{note}"
            )
            print(f"    {output.outputs[0].text[:160]!r}")
            if is_loop and name in ("edit", "qa"):
                continue
            counted += ratios[i]
            decode_counted += decode_ratios[i]
    if workload.together:
        counted = ratios[0]
        print(f"    {got[0].outputs[0].text[:160]!r}")
    ratio = statistics.median(counted) if counted else None
    return {
        "workload": name,
        "ratio": ratio and round(ratio, 3),
        "rounds": [round(each, 3) for each in counted],
        **({"decode_ratio": round(statistics.median(decode_counted), 3)} if decode_counted else {}),
        "tokens": emitted,
        "drafted": drafted,
        "accepted": accepted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--speculative-config", type=json.loads, default={"method": "ngram"})
    args = parser.parse_args()
    options = {
        "model": args.model,
        "dtype": args.dtype,
        "quantization": args.quantization,
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "kv_cache_memory": "1GiB",
        "enable_prefix_caching": False,  # a later round must not find the prompts of an earlier one
    }
    with LLM(**options) as plain, LLM(**options, speculative_config=args.speculative_config) as drafting:
        for name in args.workload:
            print(json.dumps(compare(name, WORKLOADS[name], plain, drafting, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
