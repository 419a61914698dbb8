"""Whether a rank's process is alive, as its operating system tells, even while a long call blocks its Python.

Every rank holds a connection to rank 0. When a process dies, its system closes the connection; a host that is gone no
longer acknowledges the probes of the other end (TCP's keepalive). Nothing else is sent over it.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import sys
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

# Seconds without traffic, seconds between probes, and how many probes go unanswered: 20 s in all.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_CONNECT = 5.0


class Links:
    """Rank 0's connections to all others, or another rank's to rank 0. `store`: where rank 0 puts its address."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        self._rank, self._store = rank, store
        self._links: dict[int, socket.socket] = {}
        self._listener: socket.socket | None = None
        if rank == 0:
            family = socket.AF_INET6 if (both := socket.has_dualstack_ipv6()) else socket.AF_INET
            self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
            self._listener.setblocking(False)
            self._key = secrets.token_bytes(16)
            store.set("link", f"{_own_address()}|{self._listener.getsockname()[1]}|{self._key.hex()}")

    def connect(self) -> None:
        """Connect to rank 0, whose Links have been made."""
        address, port, key = self._store.get("link").decode().split("|")
        try:
            link = socket.create_connection((address or os.environ["MASTER_ADDR"], int(port)), _CONNECT)
            link.sendall(bytes.fromhex(key) + self._rank.to_bytes(4, "big"))
            self._links[0] = _asking(link)
        except OSError as error:
            why = f"rank {self._rank} cannot connect to rank 0 ({error}): its silence will be taken for its death"
            print(f"warning: {why}", file=sys.stderr, flush=True)

    def lives(self, rank: int) -> bool | None:
        """Whether the rank's process lives; None without a connection to it."""
        self._accept()
        if not (link := self._links.get(rank)):
            return None
        try:
            return bool(link.recv(1))
        except BlockingIOError:  # open, and nothing to read
            return True
        except OSError:
            return False

    def _accept(self) -> None:
        while self._listener:
            try:
                link, _ = self._listener.accept()
            except OSError:  # none waits, as a rule
                return
            link.settimeout(1.0)
            try:
                said = link.recv(20, socket.MSG_WAITALL)
            except OSError:
                said = b""
            if len(said) == 20 and said[:16] == self._key:
                self._links[int.from_bytes(said[16:], "big")] = _asking(link)
            else:  # somebody else's
                link.close()


def is_stopped(process: int) -> bool:
    """Whether a process of this host is stopped, by SIGSTOP or a debugger."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _asking(link: socket.socket) -> socket.socket:
    """The socket, set to probe the other end (keepalive) and to read without waiting."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not all on every system
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    link.setblocking(False)
    return link


def _own_address() -> str:
    """This host's address on the way to the store; empty where the store is here, and its address will do."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    for family, kind, protocol, _, where in socket.getaddrinfo(*address, type=socket.SOCK_DGRAM):
        # A name may have an IPv6 address, and this host none.
        with suppress(OSError), socket.socket(family, kind, protocol) as way:
            way.connect(where)  # sends nothing
            own = ipaddress.ip_address(way.getsockname()[0].partition("%")[0])
            return "" if own.is_loopback or own.is_link_local else str(own)
    return ""
