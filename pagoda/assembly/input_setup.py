"""Build what turns callers' prompts into requests: the tokenizer, the limits, and the adapters that they may name."""

import logging

from pagoda.assembly.engine_setup import EngineSetup
from pagoda.base.errors import ConfigError
from pagoda.engine.inputs.adapters import KnownAdapters
from pagoda.engine.inputs.image_prompts import ImagePrompts
from pagoda.engine.inputs.input_limits import InputLimits, SourceFacts, SpeechFacts
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from pagoda.engine.tokenizers.tokenizer import Tokenizer
from pagoda.engine.transcription.words import alignment_heads
from pagoda.loading.adapters.files import AdapterTargets
from pagoda.loading.generation_config import default_sampling, generation_settings
from pagoda.loading.model_config import read_architecture, read_images, read_model
from pagoda.models.base import Encoder
from pagoda.models.config_reader import ConfigReader

logger = logging.getLogger("pagoda")


def build_input_processor(setup: EngineSetup) -> InputProcessor:
    """Build a model's input processor from its tokenizer.

    Raises ConfigError if the tokenizer or its chat template cannot be used.
    """
    model, files = setup.config.model, setup.files
    tokenizer = load_tokenizer(files, model.tokenizer, model.chat_template)
    max_logprobs = model.request_limits.max_logprobs
    limits = InputLimits(
        setup.spec.vocab_size,
        setup.max_model_len,
        setup.config.scheduler.max_num_seqs,
        setup.spec.vocab_size if max_logprobs == -1 else max_logprobs,
        model.request_limits,
        setup.tasks,
        setup.spec.hidden_size if model.enable_prompt_embeds else 0,
    )
    adapters = None
    if model.lora.enable_lora:
        targets = AdapterTargets(read_architecture(files)[0], read_model(files))
        adapters = KnownAdapters(targets, model.lora.max_lora_rank, setup.embeds_size)
    start: tuple[int, ...] = ()
    images = None
    if setup.encoder is not None and setup.encoder.reads_text:
        start = _answer_start(setup, setup.encoder)
        limits.source = SourceFacts(start, setup.encoder.largest_item().length)
    if setup.encoder is not None and not setup.crosses:
        images = _image_prompts(setup, tokenizer)
    speech = None
    if setup.encoder is not None and setup.spec.architecture == "whisper":
        item = setup.encoder.largest_item()
        assert item.features is not None
        speech = SpeechFacts(len(item.features), item.length, generation_settings(files))
        if setup.config.parallel.world_size == 1:  # else no rank has all heads of all layers
            heads = setup.spec.num_layers, setup.spec.num_heads
            limits.alignment_heads = alignment_heads(speech.settings, *heads)
    own = tokenizer.facts.chat_template if model.chat_template is not None else None
    score_template = own.sources["default"] if own is not None else setup.tasks.plan.score_template
    return InputProcessor(
        tokenizer,
        limits,
        model.seed,
        model.parse_special_tokens_in_chat,
        adapters,
        score_template,
        default_sampling(model, files, len(start)),
        images=images,
        model_name=(*model.served_model_name, setup.files.name)[0],
        speech=speech,
    )


def _answer_start(setup: EngineSetup, encoder: Encoder) -> tuple[int, ...]:
    """Return the token ids with which an answer begins: of generation_config.json alone where it is, as transformers.

    Raises ConfigError for ids that the model does not have.
    """
    settings, start = ConfigReader(generation_settings(setup.files), "generation_config.json"), encoder.start
    if settings.values:
        start = (settings.ids("decoder_start_token_id") or start[:1]) + settings.ids("forced_bos_token_id")
    if max(start) >= setup.spec.vocab_size:
        raise ConfigError(f"an answer of {setup.files.name!r} begins with the tokens {start}, which it does not have")
    return start


def _image_prompts(setup: EngineSetup, tokenizer: Tokenizer) -> ImagePrompts | None:
    """Return what puts images into a vision-language model's prompts, None if its folder does not say how."""
    config = read_images(setup.files)
    if config is None:
        logger.warning(
            "%r takes text only: its folder has no preprocessor_config.json, which says how images are processed",
            setup.files.name,
        )
        return None
    model = setup.config.model
    return ImagePrompts(config, tokenizer, model.request_limits, model.allowed_media_domains)
