"""`pagoda ps` of a pagoda server."""

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
