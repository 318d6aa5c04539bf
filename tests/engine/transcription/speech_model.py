"""A tiny random Whisper of transformers, and answers to a transcriber's questions that it computes token by token."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)
from transformers.models.whisper.generation_whisper import _median_filter

from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.base.pooling import PoolingParams
from pagoda.engine.inputs.input_limits import InputLimits, SpeechFacts
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.tokenizers.tokenizer import TokenizerFacts
from pagoda.engine.transcription.piece import Job, Question

MELS, MAX_LEN, END = 8, 24, 100
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>")
SPECIAL += ("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
FIRST = END + len(SPECIAL)
VOCAB = FIRST + 1501
SUPPRESSED, SUPPRESSED_FIRST = [1, 2, *range(95, END), FIRST - 3], [5, END]  # from 95 on, letters are not ASCII
HEADS = ((0, 0), (0, 1))


class LetterTokenizer:
    """Token i below 100 is the character chr(32 + i)."""

    facts = TokenizerFacts(FIRST, eos_token_ids=(END,))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if text in SPECIAL:
            return [END + SPECIAL.index(text)]
        return [ord(letter) - 32 for letter in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(32 + token_id) for token_id in token_ids if token_id < END)

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id]).encode()

    def __getattr__(self, name: str) -> object:
        raise AttributeError(name)


def inputs_of(is_multilingual: bool = True) -> InputProcessor:
    settings = {
        "is_multilingual": is_multilingual,
        "suppress_tokens": SUPPRESSED,
        "begin_suppress_tokens": SUPPRESSED_FIRST,
    }
    speech = SpeechFacts(MELS, 1500, settings)
    return InputProcessor(LetterTokenizer(), InputLimits(VOCAB, MAX_LEN, 8, alignment_heads=HEADS), speech=speech)  # type: ignore[arg-type]


def make_model(seed: int = 0) -> WhisperForConditionalGeneration:
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=MELS,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_target_positions=MAX_LEN,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=END + 1,
    )
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.7)
        weight = model.get_decoder().embed_tokens.weight  # so that there is text between timestamps
        weight[:END] *= 1.3
        weight[FIRST:] *= 0.7
        cross = model.get_decoder().layers[0].encoder_attn
        cross.q_proj.weight *= 0.2  # so that several places of the sound are looked at
        cross.v_proj.weight *= 3
    model.generation_config = GenerationConfig(
        max_length=MAX_LEN,
        eos_token_id=END,
        pad_token_id=END,
        bos_token_id=END,
        decoder_start_token_id=END + 1,
        no_timestamps_token_id=FIRST - 1,
        max_initial_timestamp_index=50,
        prev_sot_token_id=END + SPECIAL.index("<|startofprev|>"),
        is_multilingual=True,
        lang_to_id={"<|en|>": END + 2, "<|de|>": END + 3},
        task_to_id={"translate": END + 4, "transcribe": END + 5},
        suppress_tokens=SUPPRESSED,
        begin_suppress_tokens=SUPPRESSED_FIRST,
        alignment_heads=[list(pair) for pair in HEADS],
    )
    return model


def answers_of(model: WhisperForConditionalGeneration) -> Callable[[Question], CompletionOutput | RequestOutput]:
    """Return what answers questions greedily, one forward for each token."""

    @torch.no_grad()
    def answer(question: Question) -> CompletionOutput | RequestOutput:
        params, prompt = question.params, list(question.prompt.token_ids)
        (item,) = question.prompt.media
        assert item.features is not None
        encoded = model.get_encoder()(torch.from_numpy(item.features)[None])
        if isinstance(params, PoolingParams):
            return RequestOutput("", pooled=aligned(model, encoded, prompt, params), finished=True)
        ids, total = list(prompt), 0.0
        for _ in range(min(params.max_tokens or MAX_LEN, MAX_LEN - len(prompt))):
            logits = model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([ids])).logits[:, -1].float()
            raw, rules = logits.clone(), params.speech
            if rules is not None:
                processors = LogitsProcessorList(
                    [
                        SuppressTokensAtBeginLogitsProcessor(rules.suppressed_first, len(prompt)),
                        SuppressTokensLogitsProcessor(rules.suppressed),
                    ]
                )
                if rules.first_timestamp is not None:
                    processors.append(WhisperTimeStampLogitsProcessor(model.generation_config, len(prompt)))
                raw = logits = processors(torch.tensor([ids]), logits)
            if params.allowed_token_ids is not None:
                allowed = list(params.allowed_token_ids)
                logits = torch.full_like(logits, -torch.inf).index_copy(1, torch.tensor(allowed), logits[:, allowed])
            token = int(logits.argmax())
            total += float(raw.log_softmax(-1)[0, token])
            ids.append(token)
            if token == END:
                break
        return CompletionOutput(0, token_ids=ids[len(prompt) :], cumulative_logprob=total, finish_reason="stop")

    return answer


def aligned(
    model: WhisperForConditionalGeneration, encoded: object, token_ids: list[int], params: PoolingParams
) -> np.ndarray:
    """What the tokens look at, by transformers' own attention, at once."""
    alignment = params.alignment
    assert alignment is not None
    model.set_attn_implementation("eager")
    ids = torch.tensor([token_ids])
    layers = model(encoder_outputs=encoded, decoder_input_ids=ids, output_attentions=True).cross_attentions
    weights = torch.stack([layers[layer][0, head] for layer, head in alignment.heads])
    weights = weights[:, alignment.first :, : alignment.num_frames]
    std, mean = torch.std_mean(weights, dim=1, correction=0, keepdim=True)
    return _median_filter((weights - mean) / std, 7).mean(0).numpy()


def run(job: Job, answer: Callable[[Question], CompletionOutput | RequestOutput]) -> list[Question]:
    """Run a job to its end, one question after the other; return the questions."""
    questions: list[Question] = []
    try:
        asked = next(job)
        while True:
            if isinstance(asked, list):
                for one in asked:
                    questions += run(one, answer)
                asked = next(job)
            else:
                questions.append(asked)
                found = answer(asked)
                asked = job.send(found if isinstance(found, RequestOutput) else RequestOutput("", outputs=[found]))
    except StopIteration:
        return questions


def write_checkpoint(folder: Path, seed: int = 0) -> WhisperForConditionalGeneration:
    """Write such a model with a tokenizer like LetterTokenizer; return it."""
    model = make_model(seed)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer like LetterTokenizer."""
    letters = ["Ġ", *map(chr, range(33, 127)), *"ĀāĂăĄ"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
