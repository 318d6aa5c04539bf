"""Requests made from the OpenAPI page: whatever is sent, the server answers, and never with an internal error."""

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.server.live import LiveServer

EXAMPLES_PER_ROUTE = settings().max_examples // 16
"""60 where there are to be many: --hypothesis-profile thorough."""


def test_no_request_is_an_internal_error(fake_server: LiveServer) -> None:
    schema = schemathesis.openapi.from_url(f"{fake_server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 17
    for operation in operations:
        if operation.path == "/restart_engines":  # which does what it says
            continue

        @given(case=operation.as_strategy())
        @settings(
            max_examples=EXAMPLES_PER_ROUTE,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),
        )
        def ask(case: schemathesis.Case) -> None:
            response = case.call(timeout=60)
            assert response.status_code < 500, (case.as_curl_command(), response.text)
            if response.status_code >= 400:
                answer = response.json()
                fields = {"message", "type"} if answer.get("type") == "error" else {"message", "type", "param", "code"}
                assert set(answer["error"]) == fields, response.text

        ask()
    assert fake_server.wait_idle()["engine_restarts"] == 0
