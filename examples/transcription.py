"""The text of sound files, with times: `examples/transcription.py FILE...` (needs the extra "audio": PyAV)."""

import sys

from pagoda import LLM


def main() -> None:
    with LLM("whisper-tiny.en") as llm:
        for output in llm.transcribe(sys.argv[1:], prompt="A talk."):
            print(f"{output.name}: {output.duration:.1f} s, {output.language}")
            for segment in output.segments:
                print(f"{segment.start:7.2f} {segment.end:7.2f} {segment.text}")


if __name__ == "__main__":
    main()
