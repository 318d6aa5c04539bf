"""Ask a model that sees about an image, through a server: start it with such a model, then run this.

.venv/bin/pip install openai pillow
.venv/bin/pagoda serve --model HuggingFaceTB/SmolVLM-256M-Instruct
.venv/bin/python examples/images.py [http://127.0.0.1:8000/v1]
"""

import base64
import io
import sys

from openai import OpenAI
from PIL import Image, ImageDraw

QUESTION = "What shape is this, and what colour?"


def drawing() -> bytes:
    """Return a red circle on white, as a PNG file."""
    image = Image.new("RGB", (200, 160), "white")
    ImageDraw.Draw(image).ellipse((60, 40, 140, 120), fill="red")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=base_url, api_key="any; the server was started without --api-key")
    model = client.models.list().data[0].id
    url = "data:image/png;base64," + base64.b64encode(drawing()).decode()
    for attempt in ("first", "again"):
        answer = client.chat.completions.create(
            model=model,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url}},
                        {"type": "text", "text": QUESTION},
                    ],
                }
            ],
            max_tokens=24,
            temperature=0,
        )
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else None
        print(f"{attempt}: {answer.choices[0].message.content!r}")
        print(f"  {usage.prompt_tokens if usage else '?'} prompt tokens, of which the prefix cache had {cached}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
