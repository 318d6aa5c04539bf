"""Whisper's special tokens: the prompt that asks for a language and a task, and the rules of the output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.sampling_params import SpeechRules
from pagoda.engine.tokenizers.tokenizer import Tokenizer

Task = Literal["transcribe", "translate"]
"""translate: into English."""

STEP_S = 0.02
"""Seconds between two timestamps."""
FRAMES_PER_STEP = 2

_MULTILINGUAL_SIZE = 51_865  # tokens: English-only models have one less


@dataclass(frozen=True, slots=True)
class WhisperTokens:
    """The ids of one model's special tokens.

    previous: begins the text before a window.   languages: by code; () for a model of English alone, which has no tasks
    either.   suppressed, suppressed_first: see SpeechRules.
    """

    start: int
    end: int
    previous: int
    no_timestamps: int
    tasks: Mapping[Task, int] = field(default_factory=dict[Task, int])
    languages: Mapping[str, int] = field(default_factory=dict[str, int])
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, settings: Mapping[str, object], vocab_size: int) -> "WhisperTokens":
        """Find the tokens.   settings: of generation_config.json. Raises ConfigError for one that is not there."""

        def find(text: str) -> int | None:
            ids = tokenizer.encode(text, False)
            return ids[0] if len(ids) == 1 else None

        def require(text: str) -> int:
            found = find(text)
            if found is None:
                raise ConfigError(f"the tokenizer has no token {text}, which Whisper models need")
            return found

        multilingual = settings.get("is_multilingual")
        is_multilingual = multilingual if isinstance(multilingual, bool) else vocab_size >= _MULTILINGUAL_SIZE
        codes = {code: find(f"<|{code}|>") for code in LANGUAGES} if is_multilingual else {}
        return cls(
            start=require("<|startoftranscript|>"),
            end=require("<|endoftext|>"),
            previous=require("<|startofprev|>"),
            no_timestamps=require("<|notimestamps|>"),
            tasks={name: require(f"<|{name}|>") for name in _TASKS} if is_multilingual else {},
            languages={code: token for code, token in codes.items() if token is not None},
            suppressed=_ids(settings, "suppress_tokens"),
            suppressed_first=_ids(settings, "begin_suppress_tokens"),
        )

    @property
    def first_timestamp(self) -> int:
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int:
        return self.no_timestamps - 1

    def language_code(self, language: str | None) -> str | None:
        """Return the code of a language given by code or English name; None if it is to be detected.

        Raises RequestError for one that the model does not know.
        """
        if language is None:
            return None if self.languages else "en"
        lower = language.strip().lower()
        code = lower if lower in LANGUAGES else _CODES.get(lower, "")
        if code not in (self.languages or ("en",)):
            known = "a code such as 'en', or an English name" if self.languages else "'en': this model knows English"
            raise RequestError(
                f"language={abbreviate(language)} is not one of the model's; expected {known}", "language"
            )
        return code

    def check_task(self, task: str) -> Task:
        """Return the task. Raises RequestError for an unknown one, and for a translation by a model of English."""
        if task not in _TASKS:
            raise RequestError(f"task={task!r:.80} is not supported; expected one of {', '.join(_TASKS)}", "task")
        if task == "translate" and not self.tasks:
            raise RequestError("task='translate': this model knows English alone; use a multilingual one", "task")
        return task

    def prompt(self, language: str, task: Task, timestamps: bool, before: Sequence[int] = ()) -> list[int]:
        """Return what the decoder continues.   before: ids of the text in front of the window."""
        asked = [self.languages[language], self.tasks[task]] if self.languages else []
        previous = [self.previous, *before] if before else []
        return [*previous, self.start, *asked, *([] if timestamps else [self.no_timestamps])]

    def rules(self, timestamps: bool) -> SpeechRules:
        first = self.first_timestamp if timestamps else None
        return SpeechRules(self.suppressed, self.suppressed_first, self.end, first)


_TASKS: tuple[Task, ...] = ("transcribe", "translate")


def _ids(settings: Mapping[str, object], name: str) -> tuple[int, ...]:
    value = settings.get(name) or []
    if not isinstance(value, list) or not all(isinstance(token, int) for token in value):
        raise ConfigError(f"generation_config.json: {name} = {abbreviate(value)}, expected a list of token ids")
    return tuple(token for token in value if token >= 0)


_TABLE = """
en english zh chinese de german es spanish ru russian ko korean fr french ja japanese pt portuguese tr turkish
pl polish ca catalan nl dutch ar arabic sv swedish it italian id indonesian hi hindi fi finnish vi vietnamese
he hebrew uk ukrainian el greek ms malay cs czech ro romanian da danish hu hungarian ta tamil no norwegian
th thai ur urdu hr croatian bg bulgarian lt lithuanian la latin mi maori ml malayalam cy welsh sk slovak
te telugu fa persian lv latvian bn bengali sr serbian az azerbaijani sl slovenian kn kannada et estonian
mk macedonian br breton eu basque is icelandic hy armenian ne nepali mn mongolian bs bosnian kk kazakh
sq albanian sw swahili gl galician mr marathi pa punjabi si sinhala km khmer sn shona yo yoruba so somali
af afrikaans oc occitan ka georgian be belarusian tg tajik sd sindhi gu gujarati am amharic yi yiddish lo lao
uz uzbek fo faroese ht haitian_creole ps pashto tk turkmen nn nynorsk mt maltese sa sanskrit lb luxembourgish
my myanmar bo tibetan tl tagalog mg malagasy as assamese tt tatar haw hawaiian ln lingala ha hausa ba bashkir
jw javanese su sundanese yue cantonese
"""
_NAMES = _TABLE.split()
LANGUAGES: Mapping[str, str] = {
    code: name.replace("_", " ") for code, name in zip(_NAMES[::2], _NAMES[1::2], strict=True)
}
"""Code -> English name, of all languages of Whisper's models."""
_CODES = {name: code for code, name in LANGUAGES.items()} | {"burmese": "my", "mandarin": "zh", "castilian": "es"}
