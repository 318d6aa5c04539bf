"""Embeddings: texts become vectors, and texts of similar meaning get similar ones. One engine embeds and generates."""

from pagoda import LLM, SamplingParams

FACTS = [
    "Paris is the capital of France.",
    "Bread is baked from flour and water.",
    "Python is a programming language.",
]
QUESTION = "What is the capital of France?"


def main() -> None:
    # A model for text, whose embeddings are the mean of its hidden states. An embedding model needs no pooling_type.
    with LLM("smollm2-135m", max_model_len=512, pooling_type="mean") as llm:
        vector = llm.embed(FACTS[0])[0].outputs
        print(f"{vector.hidden_size} dimensions, length {sum(x * x for x in vector.embedding) ** 0.5:.3f}")

        scores = [output.outputs.score for output in llm.score(QUESTION, FACTS)]
        for score, fact in sorted(zip(scores, FACTS, strict=True), reverse=True):
            print(f"{score:.3f} {fact}")

        best = FACTS[scores.index(max(scores))]
        messages = [{"role": "user", "content": f"{best} {QUESTION} Answer in one sentence."}]
        print(llm.chat(messages, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text)


if __name__ == "__main__":
    main()
