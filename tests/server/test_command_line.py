"""Commands that ask a running pagoda server."""

import pytest

from pagoda.cli.main import main
from tests.server.live import LiveServer


def test_ps_lists_what_a_server_has_loaded(fake_server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ps", "--url", f"{fake_server.url}/v1"])
    assert not ended.value.code
    heading, line, _, requests = capsys.readouterr().out.splitlines()
    assert heading.split() == ["name", "size", "context"]
    assert line.split()[-1] == "2,048"
    assert requests.endswith("requests run, 0 wait")


@pytest.mark.parametrize("command", [("chat",), ("launch", "codex", "--show")])
def test_a_server_of_a_base_model_is_refused_for_chats(
    command: tuple[str, ...], gemma_server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--url", gemma_server.url])
    assert ended.value.code == 2
    assert "cannot chat: the server answered 400: this model has no chat template" in capsys.readouterr().err
