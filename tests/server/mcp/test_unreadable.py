"""Lines that the protocol's parser refuses are answered, so that nobody waits for ever."""

import json
import os
import subprocess
import sys

import pytest
from mcp.types import jsonrpc_message_adapter
from toprope_server.mcp.malformed_messages import refusal


def failure(line):
    with pytest.raises(ValueError) as raised:
        jsonrpc_message_adapter.validate_json(line, by_name=False)
    return raised.value


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ('{"jsonrpc":"2.0","id":7,"method":"x","params":' + "[" * 400 + "]" * 400 + "}", 7),
        ('{"jsonrpc":"2.0","id": "a-1", "method":"x","params":{"a":"\\ud800"}}', "a-1"),
        ('{"jsonrpc":"2.0","id":-3,"method":"x","params":{"a":"\x00"}}', -3),
    ],
)
def test_unreadable_request_is_refused_under_its_id(line, number):
    answer = refusal(failure(line))
    assert answer.id == number and answer.error.code == -32700
    assert "could not be read" in answer.error.message and "nothing was changed" in answer.error.message


@pytest.mark.parametrize(
    "line", ["no JSON at all", '{"id": 1}', "[]", '{"jsonrpc":"2.0","method":"x","params":{"a":"\x00"}}']
)
def test_lines_that_are_not_requests_get_no_answer(line):
    assert refusal(failure(line)) is None
    assert refusal(RuntimeError("id")) is None


def test_server_answers_unreadable_requests_and_continues(tmp_path):
    variables = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    opening = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
    lines = [
        json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": opening}),
        '{"jsonrpc":"2.0","method":"notifications/initialized"}',
        '{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"list_runs","arguments":{"query":"\\udc00"}}}',
        "no JSON",
        '{"jsonrpc":"2.0","id":3,"method":"ping"}',
    ]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "toprope_server.cli", "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=variables,
        text=True,
    )
    try:
        process.stdin.write("\n".join(lines) + "\n")
        process.stdin.flush()
        answers = {}
        while 3 not in answers:
            message = json.loads(process.stdout.readline())
            answers[message.get("id")] = message
        assert "could not be read" in answers[2]["error"]["message"]
        assert "result" in answers[3]
        process.stdin.close()
        assert process.wait(timeout=5) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
