"""A model without a chat template is refused for chats before it is loaded."""

import pytest

import pagoda.llm
from pagoda.cli.main import main
from tests.cached_models import cached_model


@pytest.mark.parametrize("command", [("run", "gemma3-270m", "Hello"), ("chat", "gemma3-270m")])
def test_a_base_model_is_refused_before_it_is_loaded(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_model("gemma3-270m")  # skips where it cannot be had

    loaded: list[object] = []

    def load(**options: object) -> None:
        loaded.append(options)
        raise SystemExit(0)

    monkeypatch.setattr(pagoda.llm, "LLM", load)
    with pytest.raises(SystemExit) as ended:
        main(list(command))
    said = capsys.readouterr().err
    assert ended.value.code
    assert "gemma3-270m has no chat template" in said
    assert "pagoda generate gemma3-270m" in said
    assert "--chat-template FILE" in said
    assert not loaded
    with pytest.raises(SystemExit):
        main([*command, "--chat-template", "{{ messages[0].content }}"])
    assert loaded
