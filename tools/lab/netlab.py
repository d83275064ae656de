"""Run a command once per emulated host, each behind its own rate-limited link, on this one machine.

    python tools/lab/netlab.py --nodes 8 --rate 10mbit -- \\
        python tools/lab/bench.py --config bench_netlab

Owns the emulated network: a namespace per host, a namespace for the switch (a bridge), and a veth
pair per host with a token bucket at both ends. The command finds RANK, WORLD_SIZE, MASTER_ADDR and
the other variables set as under torchrun with one rank per host. Interfaces outside the namespaces
of this run are never touched. A guardian process removes the namespaces even if netlab is killed.
Next: `bench.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# tc is often outside a user's PATH
SEARCH_PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
MASTER_PORT = 29500
# small against a message, large against a packet; the kernel segments larger packets
BUCKET_BYTES = 16 * 1024
MTU = 1500  # Ethernet's default; clusters mostly use jumbo frames, 9000
FRAME_BYTES = 14  # Ethernet's header, which the MTU does not count
QUEUE_MS = 500  # so that a switch port drops nothing while every host sends to one host
TCP_SETTINGS = {
    # one connection's bytes in the host's queue
    "tcp_limit_output_bytes": 16 * 1024,
    # strategies take turns, so connections are idle for seconds
    "tcp_slow_start_after_idle": 0,
    # a slow link's queue looks like a loss; do not send packets again to probe
    "tcp_early_retrans": 0,
}
STOP_GRACE_S = 5.0
GUARD = "--guard"
"""`netlab.py --guard PREFIX` is the guardian process of these namespaces."""


@dataclass(frozen=True)
class HostTraffic:
    """Bytes that one host sent and received through its link."""

    sent: int
    received: int


class Netlab:
    """The namespaces, bridge and links of one run. A random id in their names keeps runs apart."""

    def __init__(self, nodes: int, rate: str, mtu: int = MTU) -> None:
        if not MTU <= mtu <= BUCKET_BYTES - FRAME_BYTES:
            raise ValueError(
                f"--mtu {mtu}: choose from {MTU} to {BUCKET_BYTES - FRAME_BYTES}, so that a packet "
                "fits the token bucket"
            )
        if not 1 <= nodes <= 250:
            raise ValueError(f"--nodes {nodes}: the emulated network has from 1 to 250 hosts")
        self.rate = rate
        self.mtu = mtu
        self.prefix = f"mtlab-{os.getpid()}-{secrets.token_hex(3)}"
        self.switch = f"{self.prefix}-switch"
        self.hosts = [f"{self.prefix}-{index}" for index in range(nodes)]

    def address(self, index: int) -> str:
        return f"10.77.0.{index + 1}"

    def build(self) -> None:
        """Make the switch and a link to each host."""
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "bridge0", "up")
        for index, host in enumerate(self.hosts):
            port = f"port{index}"
            _ip("netns", "add", host)
            peer = ("type", "veth", "peer", "name", "eth0", "netns", host)
            _ip("-n", self.switch, "link", "add", port, *peer)
            _ip("-n", self.switch, "link", "set", port, "master", "bridge0")
            for namespace, device in ((host, "eth0"), (self.switch, port)):
                # no IPv6 address: the counters would count its neighbour discovery
                _ip("-n", namespace, "link", "set", device, "addrgenmode", "none")
                _ip("-n", namespace, "link", "set", device, "mtu", str(self.mtu))
            _ip("-n", host, "address", "add", f"{self.address(index)}/24", "dev", "eth0")
            self._tune_for_slow_link(host)
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", self.switch, "link", "set", port, "up")
            self._limit(host, "eth0")
            self._limit(self.switch, port)

    def _tune_for_slow_link(self, host: str) -> None:
        """Keep the host's queue short.

        With TCP's usual settings a host queues more than a slow link sends in a chunk's time. Small
        messages, such as acknowledgements and gloo's notices of posted receives, would wait behind
        that queue.
        """
        _ip("-n", host, "link", "set", "dev", "eth0", "gso_max_segs", "2")
        for setting, value in TCP_SETTINGS.items():
            write = f"echo {value} > /proc/sys/net/ipv4/{setting}"
            _ip("netns", "exec", host, "sh", "-c", write)

    def _limit(self, namespace: str, device: str) -> None:
        bucket = ("rate", self.rate, "burst", str(BUCKET_BYTES), "latency", f"{QUEUE_MS}ms")
        _checked(
            [_program("tc"), "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *bucket]
        )

    def counters(self) -> list[HostTraffic]:
        """Bytes through each host's link since the link was made, headers included."""
        links = []
        for host in self.hosts:
            text = _ip("-n", host, "-s", "-j", "link", "show", "dev", "eth0")
            stats = json.loads(text)[0]["stats64"]
            links.append(HostTraffic(stats["tx"]["bytes"], stats["rx"]["bytes"]))
        return links

    def environment(self, index: int) -> dict[str, str]:
        """The rendezvous variables of one host, as torchrun sets them."""
        return {
            "RANK": str(index),
            "LOCAL_RANK": "0",
            "GROUP_RANK": str(index),
            "WORLD_SIZE": str(len(self.hosts)),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_SOCKET_IFNAME": "eth0",
            "NETLAB_RATE": self.rate,
        }

    def start(self, index: int, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start the command on one host, in a process group of its own."""
        defaults = {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",  # a signal that ends a host prints its stack
        }
        return subprocess.Popen(
            [_program("ip"), "netns", "exec", self.hosts[index], *command],
            env={**defaults, **os.environ, **self.environment(index)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )


def remove_namespaces(prefix: str) -> list[str]:
    """Kill the processes in one run's namespaces, delete the namespaces with their links, and
    return their names."""
    names = [name for name in list_namespaces() if name.startswith(f"{prefix}-")]
    for name in names:
        for pid in _ip("netns", "pids", name).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended between the two lines
        _ip("netns", "delete", name)
    return names


def list_namespaces() -> list[str]:
    """Names of all network namespaces that iproute2 knows."""
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]


@contextmanager
def laboratory(nodes: int, rate: str, mtu: int = MTU) -> Iterator[Netlab]:
    """A built Netlab. Its namespaces are removed at the end, after errors too."""
    lab = Netlab(nodes, rate, mtu)
    with _guardian(lab.prefix):
        try:
            lab.build()
            yield lab
        finally:
            remove_namespaces(lab.prefix)


@contextmanager
def _guardian(prefix: str) -> Iterator[None]:
    """A child that removes the namespaces when this process ends, even if it is killed.

    The child waits for the end of a pipe.
    """
    guardian = subprocess.Popen(
        [sys.executable, __file__, GUARD, prefix],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C at the terminal must not reach it
    )
    assert guardian.stdin is not None
    try:
        yield
    finally:
        guardian.stdin.close()
        guardian.wait()


def run(lab: Netlab, command: Sequence[str]) -> int:
    """Run the command on every host until all end. The first failure stops the others and is
    returned."""
    processes = [lab.start(index, command) for index in range(len(lab.hosts))]
    readers = []
    for index, process in enumerate(processes):
        assert process.stdout is not None
        prefix = "" if index == 0 else f"[{index}] "
        reader = threading.Thread(target=_copy_lines, args=(process.stdout, prefix), daemon=True)
        reader.start()
        readers.append(reader)
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = [(index, code) for index, code in enumerate(codes) if code]
            if failed or None not in codes:
                break
            time.sleep(0.05)
    finally:
        _stop(processes)
        for reader in readers:
            reader.join(STOP_GRACE_S)
    for index, code in failed:
        print(f"netlab: the command failed on host {index} with exit code {code}", file=sys.stderr)
    return failed[0][1] if failed else 0


def _copy_lines(stream: IO[str], prefix: str) -> None:
    for line in stream:
        sys.stdout.write(prefix + line)
        sys.stdout.flush()


def _stop(processes: Sequence[subprocess.Popen[str]]) -> None:
    """End the process groups that still run: SIGTERM first, then SIGKILL."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        running = [process for process in processes if process.poll() is None]
        for process in running:
            os.killpg(process.pid, sign)
        deadline = time.monotonic() + STOP_GRACE_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue  # SIGKILL, or the namespace's removal, ends it


def _program(name: str) -> str:
    path = shutil.which(name, path=SEARCH_PATH)
    if path is None:
        raise RuntimeError(f"netlab needs `{name}`: install iproute2")
    return path


def _ip(*arguments: str) -> str:
    return _checked([_program("ip"), *arguments])


def _checked(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def check_requirements() -> None:
    """Raise RuntimeError if root, `ip` or `tc` is missing."""
    if os.geteuid() != 0:
        raise RuntimeError(
            "netlab needs root to make network namespaces: use sudo or a root container"
        )
    _program("ip")
    _program("tc")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, required=True, help="emulated hosts, one rank each")
    parser.add_argument(
        "--rate", required=True, help="each link's rate in each direction, as tc writes it: 10mbit"
    )
    parser.add_argument(
        "--mtu", type=int, default=MTU, help="largest packet; 9000 for jumbo frames"
    )
    parser.add_argument("--counters", type=Path, help="write each link's bytes to this JSON file")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND and its arguments")
    arguments = parser.parse_args(argv)
    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    if not arguments.command:
        parser.error("no command: put `-- COMMAND` at the end")
    return arguments


def report(before: Sequence[HostTraffic], after: Sequence[HostTraffic], path: Path | None) -> None:
    """Print the bytes of each link, and write them to `path`."""
    moved = [
        HostTraffic(a.sent - b.sent, a.received - b.received)
        for a, b in zip(after, before, strict=True)
    ]
    for index, link in enumerate(moved):
        print(
            f"netlab: host {index} sent {link.sent:,} received {link.received:,} bytes",
            file=sys.stderr,
        )
    if path is not None:
        path.write_text(
            json.dumps([{"sent": link.sent, "received": link.received} for link in moved]) + "\n"
        )


def main(argv: Sequence[str]) -> int:
    if argv[:1] == [GUARD]:
        sys.stdin.read()
        remove_namespaces(argv[1])
        return 0
    arguments = parse_arguments(argv)

    def interrupted(number: int, frame: object) -> None:
        raise KeyboardInterrupt  # clean up as after Ctrl-C

    signal.signal(signal.SIGTERM, interrupted)
    signal.signal(signal.SIGHUP, interrupted)
    try:
        check_requirements()
        with laboratory(arguments.nodes, arguments.rate, arguments.mtu) as lab:
            before = lab.counters()
            code = run(lab, arguments.command)
            report(before, lab.counters(), arguments.counters)
            return code
    except (RuntimeError, ValueError) as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("netlab: interrupted; its namespaces are removed", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
