"""Conversations with images: their tokens are those of transformers' processors, and their items are in place."""

import base64
import io

import jinja2
import numpy as np
import pytest

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import MediaItem
from pagoda.engine.inputs.chat_prompts import ChatOptions
from pagoda.engine.inputs.input_limits import InputLimits
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.inputs.prompts import size_of
from pagoda.engine.tokenizers.byte_tokenizer import ByteTokenizer
from pagoda.engine.tokenizers.tokenizer import LONG_TEXT_CHARS
from tests.engine.images.families import FAMILIES, TEMPLATES, expected_ids, image_of, inputs_of

TEXT = {"type": "text", "text": "what the he<image>ck\n"}


def data_url(image, form="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def part(image):
    return {"type": "image_url", "image_url": {"url": data_url(image), "detail": "auto"}}


def text_of(family, messages):
    """Render as transformers does, with image parts as templates expect them."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    shown = [
        {**one, "content": [{"type": "image"} if "image" in p["type"] else p for p in one["content"]]}
        for one in messages
    ]
    return environment.from_string(TEMPLATES[family]).render(messages=shown, add_generation_prompt=True)


CONVERSATIONS = [
    lambda a, b, t: [{"role": "user", "content": [part(a), t]}],
    lambda a, b, t: [{"role": "user", "content": [t, part(a), part(b), t]}],
    lambda a, b, t: [
        {"role": "user", "content": [part(a), t]},
        {"role": "assistant", "content": [t]},
        {"role": "user", "content": [t, part(b)]},
        {"role": "assistant", "content": [t, t]},
        {"role": "user", "content": [part(b), part(a)]},
    ],
]


@pytest.mark.parametrize("make", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_transformers(family, make):
    images = image_of(70, 41), image_of(31, 90, 1)
    text = {"type": "text", "text": "what the heck\n"}
    messages = make(*images, text)
    inputs = inputs_of(family)
    rendered = inputs.chats.render(messages, is_bounded=True)
    shown = [images[0 if p == part(images[0]) else 1] for one in messages for p in one["content"] if p != text]
    assert rendered.token_ids == expected_ids(family, text_of(family, messages), shown)
    plain = inputs_of(family, parses=True)
    assert plain.chats.render(messages).token_ids == rendered.token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_every_item_stands_for_the_next_image_tokens(family):
    inputs = inputs_of(family)
    images = [image_of(70, 41), image_of(31, 90, 1)]
    rendered = inputs.chats.render([{"role": "user", "content": [part(images[0]), TEXT, part(images[1])]}])
    token_ids = inputs.tokenizer.encode("".join(inputs.chats._images.config.tokens))
    places = [at for at, one in enumerate(rendered.token_ids) if one in token_ids]
    covered = [at for item in rendered.media for at in range(item.offset, item.offset + item.length)]
    assert covered == places
    for item in rendered.media:
        assert item.features.dtype == np.float32
        assert item.features.flags.c_contiguous
        assert len(item.features) == np.prod(item.grid)
        assert item.length <= inputs.chats._images.config.max_item_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_text_of_callers_never_becomes_an_image_token(family):
    inputs = inputs_of(family)
    token_ids = set(inputs.tokenizer.encode("".join(inputs.chats._images.config.tokens)))
    text = " ".join(["<image>", "<|image_pad|>", "<image_soft_token>", "<start_of_image>", "[IMG]", "[IMG_END]"])
    spelled = [{"role": "user", "content": text}, {"role": "user", "content": [{"type": "text", "text": text}]}]
    assert token_ids.isdisjoint(inputs.chats.render(spelled).token_ids)
    image = part(image_of(40, 40))
    rendered = inputs.chats.render([*spelled, {"role": "user", "content": [image, {"type": "text", "text": text}]}])
    assert sum(map(rendered.token_ids.count, token_ids)) == sum(item.length for item in rendered.media)
    parsing = inputs_of(family, parses=True)
    with pytest.raises(RequestError, match="image token as text"):
        parsing.chats.render([*spelled, {"role": "user", "content": [image]}])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_alone_is_rendered_whatever_form_the_template_expects(family):
    inputs = inputs_of(family)
    for content in ("hello", [{"type": "text", "text": "hello"}]):
        rendered = inputs.chats.render([{"role": "user", "content": content}])
        assert "hello" in rendered.text
        assert rendered.media == ()
        continued = ChatOptions(add_generation_prompt=False, continue_final_message=True)
        assert inputs.chats.render([{"role": "user", "content": content}], continued).text.endswith("hello")


def test_equal_images_have_equal_hashes_in_every_form_and_others_do_not():
    inputs = inputs_of("gemma3")
    image = image_of(40, 40)

    def hash_of(content):
        (item,) = inputs.chats.render([{"role": "user", "content": [content]}]).media
        return item.content_hash

    forms = [
        part(image),
        {"type": "image_url", "image_url": data_url(image)},
        {"type": "input_image", "image_url": data_url(image)},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data_url(image)[22:]}},
        {"type": "image", "image": image},
        {"type": "image_pil", "image_pil": image},
    ]
    assert len({hash_of(form) for form in forms}) == 1
    assert hash_of(part(image_of(40, 40, seed=1))) != hash_of(forms[0])


def test_hashes_are_shared_with_requests_of_the_same_salt_only():
    inputs = inputs_of("gemma3")
    rendered = inputs.chats.render([{"role": "user", "content": [part(image_of(40, 40))]}])

    def hash_of(salt):
        request = inputs.process("r", rendered.prompt, SamplingParams(), arrival_time_s=0.0, cache_salt=salt)
        assert request.media[0].features is rendered.media[0].features
        return request.media[0].content_hash

    assert hash_of(None) == rendered.media[0].content_hash
    assert hash_of("a") == hash_of("a") != hash_of("b")


def test_features_that_a_program_gives_are_finite():
    """They are looked at where prompts are read, not on the engine's thread."""
    features = np.zeros((4, 3), np.float32)
    prompt = {"prompt_token_ids": [1, 2], "media": (MediaItem("a", 0, 1, features),)}
    inputs = inputs_of(FAMILIES[0])
    assert len(inputs.prompts.read(prompt).media) == 1
    assert size_of(prompt) >= LONG_TEXT_CHARS, "it would be read on the event loop"
    features[2, 1] = np.inf
    with pytest.raises(RequestError, match="finite"):
        inputs.prompts.read(prompt)


def test_a_prompt_with_images_is_not_truncated():
    inputs = inputs_of("gemma3")
    rendered = inputs.chats.render([{"role": "user", "content": [part(image_of(40, 40)), TEXT]}])
    many = SamplingParams(truncate_prompt_tokens=len(rendered.token_ids))
    assert inputs.process("r", rendered.prompt, many, arrival_time_s=0.0).num_prompt_tokens == len(rendered.token_ids)
    few = SamplingParams(truncate_prompt_tokens=len(rendered.token_ids) - 1)
    with pytest.raises(RequestError, match="a prompt with images or audio cannot be cut"):
        inputs.process("r", rendered.prompt, few, arrival_time_s=0.0)


def refused(content, inputs=None, is_bounded=True, **options):
    inputs = inputs or inputs_of("gemma3", **options)
    with pytest.raises(RequestError) as error:
        inputs.chats.render([{"role": "user", "content": [TEXT, content]}], is_bounded=is_bounded)
    assert error.value.param is not None
    return str(error.value)


def test_a_model_for_text_refuses_images_by_its_name():
    inputs = InputProcessor(ByteTokenizer(), InputLimits(258, 4096, 8), model_name="smollm2-135m")
    assert "messages[0].content[1] is an image, but smollm2-135m takes text only" in refused(
        part(image_of(4, 4)), inputs
    )


def test_a_template_without_a_place_for_images_is_refused():
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert "takes text only" in refused(part(image_of(4, 4)), template=template)
    parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert "0 places for 1 images" in refused(part(image_of(4, 4)), template=parts)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ({"type": "image_url"}, "the part has no image"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "has the form data:image/png;base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@@"}}, "not valid base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "not a PNG, JPEG, WebP or GIF"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "is not an image that this server takes"),
        ({"type": "image", "image": "/etc/passwd"}, "is not an image that this server takes"),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "fetches no images"),
        ({"type": "image", "image": 7}, "int is not an image"),
        (
            {"type": "video_url", "video_url": {"url": "x"}},
            "is a part of type 'video_url'; this model takes text and images",
        ),
    ],
)
def test_what_is_no_image_is_refused(content, error):
    message = refused(content)
    assert error in message
    assert message.startswith("messages[0].content[1]")


def test_images_are_bounded_by_number_bytes_and_pixels_before_they_are_decoded():
    limits = RequestLimits(images=1, image_bytes=3000, image_pixels=10_000)
    inputs = inputs_of("gemma3", limits)
    inputs.chats.render([{"role": "user", "content": [part(image_of(20, 20))]}], is_bounded=True)
    assert "more than the limit of 3000 (image_bytes)" in refused(part(image_of(60, 60)), inputs)
    white = image_of(2000, 2000).point(lambda value: 255)  # few bytes for its pixels
    wide = inputs_of("gemma3", RequestLimits(image_pixels=10_000))
    assert "2000 x 2000 pixels, the images of this prompt have 4000000, more than the limit of 10000" in refused(
        part(white), wide
    )
    with pytest.raises(RequestError, match="2 images in a prompt are more than the limit of 1"):
        inputs.chats.render([{"role": "user", "content": [part(image_of(4, 4))] * 2}])


def test_no_image_is_processed_beyond_the_models_context(monkeypatch):
    """Its tokens follow from its size, so that no features are made that would be refused."""
    monkeypatch.setattr("pagoda.engine.inputs.image_prompts.process_image", lambda *_: pytest.fail("it is processed"))
    for family in FAMILIES:
        message = refused(part(image_of(96, 96)), inputs_of(family, max_model_len=2))
        assert "maximum context length is 2 tokens" in message, family


def test_no_image_is_read_beyond_the_models_context():
    inputs = inputs_of("idefics3", max_model_len=16)
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [part(image_of(32, 32)), part(image_of(96, 96)), broken]
    with pytest.raises(RequestError, match="maximum context length is 16 tokens.*up to this one have") as error:
        inputs.chats.render([{"role": "user", "content": content}])
    assert error.value.param == "messages[0].content[0]"  # an image is enlarged to its whole tiles


def test_a_program_may_name_files_and_pass_bytes(tmp_path):
    inputs, image = inputs_of("gemma3"), image_of(40, 30)
    path = tmp_path / "a b.png"
    image.save(path)
    expected = inputs.chats.render([{"role": "user", "content": [part(image)]}]).media[0].content_hash
    for given in (str(path), path, path.as_uri(), path.read_bytes()):
        rendered = inputs.chats.render([{"role": "user", "content": [{"type": "image", "image": given}]}])
        assert rendered.media[0].content_hash == expected
    missing = {"type": "image", "image": str(tmp_path / "none.png")}
    assert "cannot be read: No such file" in refused(missing, inputs, is_bounded=False)
