"""CallersTokenizer: a model's tokenizer with the names of transformers' tokenizers, for programs."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pagoda.base.errors import RequestError
from pagoda.engine.inputs.chat_prompts import chat_options
from pagoda.engine.inputs.input_processor import InputProcessor

_UNSERVED = ("padding", "truncation", "max_length", "return_assistant_tokens_mask", "tokenizer_kwargs")
"""Arguments of transformers' `apply_chat_template` that would be variables of the template here."""


class Encoding(dict[str, Any]):
    """The result of a call, by key or attribute: `input_ids` and `attention_mask`, lists of integers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class CallersTokenizer:
    """What `get_tokenizer` returns. Other attributes are those of the engine's Tokenizer. Thread-safe."""

    padding_side = truncation_side = "right"
    is_fast = True

    def __init__(
        self, inputs: InputProcessor, entered: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """entered: the context of a call that may take a template's locks; see EngineThread.entered."""
        self._inputs = inputs
        self._entered = entered
        self._own = inputs.tokenizer
        facts = self._own.facts
        self.bos_token_id = facts.bos_token_id
        self.eos_token_id = facts.eos_token_ids[0] if facts.eos_token_ids else None
        self.bos_token, self.eos_token = (facts.special_names.get(name) for name in ("bos_token", "eos_token"))
        self.all_special_ids = sorted(facts.special_token_ids)
        self.vocab_size = facts.vocab_size
        self.chat_template = facts.chat_template.source if facts.chat_template is not None else None

    @property
    def model_max_length(self) -> int:
        return self._inputs.limits.max_model_len

    @functools.cached_property
    def _vocab(self) -> dict[str, int]:
        each = ((self._own.token_string(token_id), token_id) for token_id in range(self.vocab_size))
        return {token: token_id for token, token_id in each if token}

    def __len__(self) -> int:
        return self.vocab_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of Python's protocols, such as those that copy an object before it has _own
            raise AttributeError(name)
        return getattr(self._own, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises RequestError."""
        return self._own.encode(text, add_special_tokens)

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> Encoding:
        """Return the `input_ids` of a text, or of each of several, at most `max_length` from the start of each."""
        each = [text] if isinstance(text, str) else list(text)
        most = (max_length or self.model_max_length) if truncation else None
        ids = [self._own.encode(one, add_special_tokens)[:most] for one in each]
        masks = [[1] * len(one) for one in ids]
        return (
            Encoding(input_ids=ids[0], attention_mask=masks[0])
            if isinstance(text, str)
            else Encoding(input_ids=ids, attention_mask=masks)
        )

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token, as the vocabulary writes it (`Ġis`)."""
        return dict(self._vocab)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Return the id of a token, or of each of several; None for one that the vocabulary lacks."""
        if isinstance(tokens, str):
            return self._vocab.get(tokens)
        return [self._vocab.get(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        """Return a token as the vocabulary writes it, or each of several; empty for an unknown id."""
        return self._own.token_string(ids) if isinstance(ids, int) else [self._own.token_string(one) for one in ids]

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of one or several token ids."""
        return self._own.decode([token_ids] if isinstance(token_ids, int) else token_ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(token_ids, skip_special_tokens) for token_ids in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        return_dict: bool = False,
        return_tensors: None = None,
        **template_kwargs: Any,
    ) -> list[int] | str | Encoding:
        """Return a conversation as the model's prompt: token ids (with `return_dict` as a call does), or text.

        Raises RequestError, also for `return_tensors` and other arguments of transformers that are not served.
        """
        if return_tensors is not None:
            raise RequestError("return_tensors: ids are lists here; make a tensor of them", "return_tensors")
        for name in _UNSERVED:
            if template_kwargs.pop(name, None):
                raise RequestError(f"{name}: the ids come as they are; cut or pad them, and leave {name} out", name)
        options = chat_options(
            {
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "chat_template": chat_template,
                "template_kwargs": template_kwargs or None,
            }
        )
        with self._entered():
            rendered = self._inputs.chats.render(conversation, options)
        if not tokenize:
            return rendered.text
        ids = rendered.token_ids
        return Encoding(input_ids=ids, attention_mask=[1] * len(ids)) if return_dict else ids
