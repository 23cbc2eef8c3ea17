"""The command on several ranks: started by itself, by torchrun's agents, and what happens when one of them fails."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.rank_pool import free_port
from triforce_cli.distributed.rank import FOLDER

GENERATE = [sys.executable, "-m", "triforce_cli", "generate", "--temperature", "0", "--seed", "1"]
LONG = ["-n", "1500", "--json", "hello"]


@pytest.fixture
def environment(tiny_model_dir, tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRIFORCE")}
    chosen = {"HOME": tmp_path / "home", "MODEL": tiny_model_dir, "DEVICE": "cpu", "DTYPE": "float32"}
    kept["GLOO_SOCKET_IFNAME"] = "lo"  # where two nodes on this machine meet
    return kept | {f"TRIFORCE_{name}": str(value) for name, value in chosen.items()}


@pytest.fixture
def start(environment):
    """Start a command; all its processes are killed when the test ends."""
    started = []

    def begin(command, stdin=subprocess.DEVNULL, **more):
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # A small pipe, where that can be chosen, holds a long answer up until it is read.
        process = subprocess.Popen(command, env=environment | more, text=True, pipesize=4096, **pipes)
        started.append(process)
        return process

    yield begin
    for process in started:
        for each in [*family(process), process]:
            each.kill()


def family(process):
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def rank_of(process, rank):
    """The rank of that number among what a process has started."""
    return next(each for each in family(process) if each.environ().get("RANK") == str(rank))


def wait_for(stream, kind):
    """Read JSON lines up to the first of a type."""
    for line in stream:
        if json.loads(line)["type"] == kind:
            return
    raise AssertionError(f"no {kind}")


def ended(processes, seconds=60):
    return not psutil.wait_procs(processes, seconds)[1]


@pytest.mark.long
def test_two_ranks_give_the_output_of_one_and_read_stdin_once(start, environment):
    alone = start([*GENERATE, "-n", "20"], stdin=subprocess.PIPE).communicate("a text from a pipe")
    both = start([*GENERATE, "-n", "20", "--tensor-parallel", "2"], stdin=subprocess.PIPE)
    out, err = both.communicate("a text from a pipe")
    assert both.returncode == 0
    assert out == alone[0]
    assert len(err.splitlines()) == 1, err
    assert " · 20 written at " in err


@pytest.mark.long
def test_a_batch_runs_on_ranks(start, tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(b'{"prompt": "Who?"}\nno request\n{"prompt": "\xc3\xa9", "temperature": 1}\n')
    command = [*GENERATE, "-n", "8", "--batch", str(lines)]
    alone, both = (start([*command, *more]).communicate()[0] for more in ((), ("--tensor-parallel", "2")))
    results = [[json.loads(line) for line in out.splitlines()] for out in (alone, both)]  # in the order of their ends
    texts = [{result["line"]: result.get("text") for result in each} for each in results]
    assert texts[0] == texts[1]
    assert [texts[0][line] is None for line in (1, 2, 3)] == [False, True, False]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_with_a_message(start, rank):
    process = start([*GENERATE, *LONG, "--tensor-parallel", "2"])
    wait_for(process.stdout, "text")
    ranks = family(process)
    rank_of(process, rank).kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith(f"error: rank {rank} was killed by SIGKILL\nhint: "), err
    assert ended(ranks)


def listening(processes):
    """Return the addresses on which processes accept connections."""
    found = [connection for each in processes for connection in each.net_connections("inet")]
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


@pytest.mark.long
def test_ranks_listen_on_loopback_alone_and_ctrl_c_ends_them_with_the_statistics(start):
    other = next(iter(psutil.net_if_addrs().keys() - {"lo"}), "lo")  # what is set for several machines does not count
    process = start([*GENERATE, *LONG, "--tensor-parallel", "2"], GLOO_SOCKET_IFNAME=other)
    wait_for(process.stdout, "text")
    ranks = family(process)
    assert listening([psutil.Process(process.pid), *ranks]) == {"127.0.0.1"}
    folder = Path(rank_of(process, 0).environ()[FOLDER])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert json.loads(out.splitlines()[-1])["finish_reason"] == "interrupted"
    assert "interrupted" in err
    assert ended(ranks)
    assert not folder.exists()


@pytest.mark.long
def test_ranks_do_not_outlive_a_killed_launcher(start):
    process = start([*GENERATE, *LONG, "--tensor-parallel", "2"])
    wait_for(process.stdout, "text")
    ranks = family(process)
    process.kill()
    assert ended(ranks)


@pytest.mark.long
def test_nodes_with_different_commands_are_refused(start):
    port = str(free_port())
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    nodes = [start([*GENERATE, "-n", str(20 + rank), "hello"], RANK=str(rank), **where) for rank in range(2)]
    errors = [node.communicate()[1] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2]
    assert all("max_new_tokens: 20 and 21" in error for error in errors), errors
    assert "error: rank 1: " in errors[1]


@pytest.mark.long
def test_waiting_for_a_missing_rank_times_out(start):
    where = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    process = start([*GENERATE, "--set", "join_timeout=2", "hello"], **where)
    _, err = process.communicate()
    assert process.returncode == 1
    assert "did not come together within 2 s" in err
    assert "hint: start the same command on every node" in err


def agent(node, port, command):
    """The command line of one of torchrun's two agents, as on two nodes."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    run += ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [*run, *command[1:]]


@pytest.mark.long
def test_two_agents_of_torchrun_are_one_group_and_only_the_first_needs_the_prompt(start, tmp_path):
    if sys.platform != "linux":
        pytest.skip("two agents on one machine meet over its loopback device, lo")
    (tmp_path / "book.txt").write_text("It was a dark and stormy night.", "utf-8")
    command = [*GENERATE, "-n", "6"]
    with_book = [*command, "-f", str(tmp_path / "book.txt")]
    alone, _ = start(with_book).communicate()
    port = free_port()
    nodes = [start(agent(node, port, each)) for node, each in enumerate((with_book, command))]
    said = [node.communicate() for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert [out for out, _ in said] == [alone, ""]


@pytest.mark.long
def test_ranks_share_a_prompt_cache(start, tmp_path):
    """Each rank caches its own heads; blocks from a damaged one on are used on no rank, and it is written again."""
    book = tmp_path / "book.txt"
    book.write_text("It was on a dreary night of November. " * 20)
    command = [sys.executable, "-m", "triforce_cli", "summarize", str(book), "--cache", "--json", "--temperature", "0"]
    command += ["-n", "8", "--seed", "1", "--tensor-parallel", "2"]

    warned = []

    def answers(*questions):
        asked = [word for question in questions for word in ("--question", question)]
        out, err = start([*command, *asked]).communicate()
        assert not err.startswith("error"), err
        warned.append("a file of the prompt cache is damaged" in err)
        events = [json.loads(line) for line in out.splitlines()]
        texts = "".join(event["text"] for event in events if event["type"] == "text")
        return texts, [event["cached_tokens"] for event in events if event["type"] == "done"]

    first, cached = answers("Who?", "When?")
    assert cached[0] == 0 < cached[1]
    blocks = sorted((tmp_path / "home" / "prompts").glob("*/*.safetensors"))
    assert {block.stem.rpartition("-")[2] for block in blocks} == {"1of2", "2of2"}
    assert len({block.parent for block in blocks}) == 1
    assert blocks[-1].stem.endswith("2of2")
    blocks[-1].write_bytes(b"damaged")  # of the last block, the other rank's
    again, cached = answers("Who?", "When?")
    assert again == first
    assert cached[0] == 128 * (len(blocks) // 2 - 1) >= 128
    again, cached = answers("Who?", "When?")
    assert again == first
    assert cached[0] == 128 * (len(blocks) // 2) >= 384
    assert warned == [False, True, False]
