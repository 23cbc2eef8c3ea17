"""`generate --server`: the text and the events of a run in this process, from a server with a warm model."""

import json
import socket
import threading

import pytest
import uvicorn

from tests.support.command import assert_error, refused
from triforce_cli.output.renderers import Renderer

ASKED = ("generate", "Who sat on the mat?", "--temperature", "0", "-n", "24")


@pytest.fixture
def server(served):
    """The address of the endpoint on a real socket, which takes connections from here on."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(served.app, lifespan="off", log_level="critical")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, args=([listening],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    running.should_exit = True
    thread.join()


def events(out):
    return [json.loads(line) for line in out.splitlines()]


def test_text_and_events_are_those_of_a_run_here(server, triforce_here, endless):
    here = {"TRIFORCE_MODEL": str(endless)}
    for more in ((), ("--raw",), ("--system", "Be brief."), ("--stop", "a")):
        expected = triforce_here(*ASKED, *more, "-q", env=here)
        assert triforce_here(*ASKED, *more, "-q", "--server", server) == expected
        assert expected.returncode == 0 and expected.stdout.strip()
    own, sent = (triforce_here(*ASKED, *more, "--json") for more in (("-m", endless), ("--server", f"{server}/v1")))
    (*begins, last), (*other, end) = events(own.stdout), events(sent.stdout)
    texts = [[each["text"] for each in found if each["type"] == "text"] for found in (begins, other)]
    assert "".join(texts[0]) == "".join(texts[1]) and {"prefill", "text"} == {each["type"] for each in other}
    assert other[-1]["tokens"] == end["new_tokens"]
    same = ("finish_reason", "prompt_tokens", "new_tokens", "prefilled_tokens")
    assert [end[name] for name in same] == [last[name] for name in same] and end["model"] == "tiny"


def test_ctrl_c_and_errors_have_their_exit_codes(server, triforce_here, monkeypatch):
    refused(triforce_here(*ASKED, "--memory", "1GiB", "--server", server), "--memory is not for a server")
    refused(triforce_here(*ASKED, "--regex", "a+", "--server", server), "--regex is not for a server")
    refused(triforce_here(*ASKED, "--json-schema", "{}", "--server", server), "no end-of-sequence token")
    refused(triforce_here("generate", "x" * 5000, "--server", server), "the server: ")
    refused(triforce_here(*ASKED, "--server", "ftp://x"), "is not a URL")
    assert_error(triforce_here(*ASKED, "--server", "127.0.0.1:1"), 1, "does not answer", "triforce serve")
    event = Renderer.event

    def interrupted(renderer, found):
        event(renderer, found)
        if getattr(found, "text", ""):
            raise KeyboardInterrupt

    monkeypatch.setattr(Renderer, "event", interrupted)
    code, out, err = triforce_here(*ASKED[:-1], "400", env={"TRIFORCE_SERVER": server})
    assert code == 130 and out and "interrupted" in err
