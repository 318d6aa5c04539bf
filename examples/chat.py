"""A conversation of several turns. The prefix cache keeps earlier turns, so only the new text is computed."""

from pagoda import LLM, SamplingParams

QUESTIONS = ["What is the capital of Italy?", "And of Japan?"]


def main() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=32)
    messages = [{"role": "system", "content": "You answer in one short sentence."}]
    with LLM("smollm2-135m", max_model_len=512) as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            print(f"you: {question}\nmodel: ", end="")
            answer = ""
            num_cached = None
            for delta in llm.stream_chat(messages, params):
                answer += delta.outputs[0].text
                num_cached = delta.num_cached_tokens
                print(delta.outputs[0].text, end="", flush=True)
            print(f"\n(tokens found in the prefix cache: {num_cached})")
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
