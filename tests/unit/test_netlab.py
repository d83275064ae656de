"""The emulated network: links have the given rate, bytes are counted, nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import netlab

NETLAB = Path(netlab.__file__)
MESSAGE_BYTES = 400_000

EXCHANGE = f"""
import os, socket, time
rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    server = socket.create_server(address)
    connection, _ = server.accept()
    begin, count = time.monotonic(), 0
    while count < {MESSAGE_BYTES}:
        count += len(connection.recv(65536))
    connection.sendall(b"done")
    print("seconds", time.monotonic() - begin)
elif rank == 1:
    while True:
        try:
            client = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    client.sendall(bytes({MESSAGE_BYTES}))
    client.recv(4)
"""


PING_BESIDE_BULK = """
import os, socket, threading, time
rank = int(os.environ["RANK"])
if rank == 0:
    server = socket.create_server((os.environ["MASTER_ADDR"], 4000))
    bulk, _ = server.accept()
    small, _ = server.accept()
    threading.Thread(target=lambda: [bulk.recv(1 << 16) for _ in iter(int, 1)], daemon=True).start()
    for _ in range(9):
        small.sendall(small.recv(1))
    os._exit(0)
while True:
    try:
        bulk = socket.create_connection((os.environ["MASTER_ADDR"], 4000))
        break
    except OSError:
        time.sleep(0.05)
small = socket.create_connection((os.environ["MASTER_ADDR"], 4000))
small.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
threading.Thread(target=lambda: bulk.sendall(bytes(8 << 20)), daemon=True).start()
time.sleep(1)
times = []
for _ in range(9):
    began = time.monotonic()
    small.sendall(b"x")
    small.recv(1)
    times.append(time.monotonic() - began)
print("milliseconds", 1000 * min(times), flush=True)
os._exit(0)
"""


def network_works() -> bool:
    try:
        netlab.check_requirements()
        with netlab.laboratory(1, "10mbit"):
            return True
    except RuntimeError:
        return False


needs_network = pytest.mark.skipif(
    not network_works(), reason="needs root, iproute2 and the right to make namespaces"
)


def run_netlab(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(NETLAB), *arguments],
        env={**os.environ, "PYTHONPATH": str(NETLAB.parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def namespaces_of(pid: int) -> list[str]:
    return [name for name in netlab.list_namespaces() if name.startswith(f"mtlab-{pid}-")]


def wait_for(condition: Callable[[], object], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)


@needs_network
def test_link_has_its_rate_and_counts_its_bytes(tmp_path: Path) -> None:
    counters = tmp_path / "counters.json"
    done = run_netlab(
        "--nodes",
        "3",
        "--rate",
        "10mbit",
        "--counters",
        str(counters),
        "--",
        sys.executable,
        "-c",
        EXCHANGE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = float(done.stdout.split("seconds")[1].split()[0])
    ideal = MESSAGE_BYTES * 8 / 10e6
    assert 0.85 * ideal < seconds < 1.5 * ideal
    links = json.loads(counters.read_text())
    assert MESSAGE_BYTES < links[1]["sent"] < 1.06 * MESSAGE_BYTES  # packet headers
    assert abs(links[0]["received"] - links[1]["sent"]) < 2000  # ARP and the like
    assert links[2]["sent"] < 1000


@needs_network
def test_small_messages_do_not_wait_behind_a_long_queue() -> None:
    """A round trip beside a transfer that fills the link. TCP's usual segments take longer."""
    done = run_netlab(
        "--nodes", "2", "--rate", "10mbit", "--", sys.executable, "-c", PING_BESIDE_BULK
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(done.stdout.split("milliseconds")[1].split()[0]) < 8


@needs_network
def test_ring_sends_what_ranks_lack_and_little_more() -> None:
    """Of a unit and of a step, by the interfaces' counters with headers, with jumbo frames."""
    lab = str(NETLAB.with_name("transport_lab.py"))
    done = run_netlab(
        *("--nodes", "3", "--rate", "400mbit", "--mtu", "9000", "--"),
        *(sys.executable, lab, "--rounds", "3", "--check"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"the worst rank are (\S+) of its due", done.stdout)
    assert found and 1 <= float(found.group(1)) <= 1.05, done.stdout


@needs_network
def test_every_host_finds_its_rendezvous_variables() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    show = f"import os; print(*(os.environ[name] for name in {names}))"
    done = run_netlab("--nodes", "3", "--rate", "100mbit", "--", sys.executable, "-c", show)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 3 0 10.77.0.1",
        "[1] 1 3 0 10.77.0.1",
        "[2] 2 3 0 10.77.0.1",
    ]


@needs_network
def test_a_host_that_a_signal_ends_says_where_it_was() -> None:
    code = "import os, time; os.abort() if os.environ['RANK'] == '1' else time.sleep(60)"
    done = run_netlab("--nodes", "2", "--rate", "100mbit", "--", sys.executable, "-c", code)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "Fatal Python error: Aborted" in output and "most recent call first" in output, output


@needs_network
def test_a_failing_host_stops_the_others() -> None:
    code = "import os, time; os._exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    process = subprocess.Popen(
        [
            sys.executable,
            str(NETLAB),
            "--nodes",
            "2",
            "--rate",
            "10mbit",
            "--",
            sys.executable,
            "-c",
            code,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 7
    assert "host 1 with exit code 7" in errors
    assert not namespaces_of(process.pid)


@needs_network
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(sign: signal.Signals, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    code = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    process = subprocess.Popen(
        [
            sys.executable,
            str(NETLAB),
            "--nodes",
            "1",
            "--rate",
            "10mbit",
            "--",
            sys.executable,
            "-c",
            code,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_for(lambda: marker.exists() and marker.read_text())
    assert len(namespaces_of(process.pid)) == 2
    process.send_signal(sign)
    process.communicate(timeout=30)
    wait_for(lambda: not namespaces_of(process.pid))
    wait_for(lambda: not Path(f"/proc/{marker.read_text()}").exists())
    assert process.returncode == (-signal.SIGKILL if sign == signal.SIGKILL else 130)


@needs_network
def test_a_bad_rate_is_reported_and_cleaned_up() -> None:
    before = set(netlab.list_namespaces())
    with pytest.raises(RuntimeError, match="fast"), netlab.laboratory(2, "fast") as lab:
        pytest.fail(f"built {lab.prefix}")
    made = {name for name in netlab.list_namespaces() if name.startswith(f"mtlab-{os.getpid()}-")}
    assert not made - before


def test_root_and_programs_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match="root"):
        netlab.check_requirements()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(netlab, "SEARCH_PATH", "/nonexistent")
    with pytest.raises(RuntimeError, match="iproute2"):
        netlab.check_requirements()


@pytest.mark.parametrize(
    "argv", [["--nodes", "2", "--rate", "1mbit"], ["--nodes", "2", "--", "true"]]
)
def test_incomplete_command_lines_are_refused(
    argv: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        netlab.parse_arguments(argv)
    assert "usage" in capsys.readouterr().err


def test_too_many_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="--nodes 251"):
        netlab.Netlab(251, "10mbit")
