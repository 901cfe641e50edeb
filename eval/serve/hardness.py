"""Clients that are slow, rude, half there or very many, against `nuthatch serve`.

    python3 eval/serve/hardness.py target/release/nuthatch [--connections 10000]

Needs nothing but Python and, for the certificate, `openssl`. Every check is an assertion; the last lines
say what was measured. `cargo xtask clients` runs it.
"""

import argparse
import json
import os
import pathlib
import re
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from server import Serve, check, n_checks  # noqa: E402


class Server(Serve):
    def __init__(self, binary, *words):
        super().__init__(binary, "-c", "2K", *words)

    def connect(self, timeout=60):
        return socket.create_connection(self.place, timeout)

    def ask(self, method, path, body=None, stream=None):
        """One request on a connection that ends after it: status and body."""
        with stream or self.connect() as stream:
            stream.sendall(request(method, path, body, close=True))
            data = b"".join(iter(lambda: stream.recv(65536), b""))
        head, _, rest = data.partition(b"\r\n\r\n")
        return int(head.split()[1]), rest

    def metric(self, name):
        _, page = self.ask("GET", "/metrics")
        found = re.search(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)", page.decode(), re.M)
        return float(found.group(1))

    def rss(self):
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as file:
            return int(re.search(r"VmRSS:\s+(\d+) kB", file.read()).group(1)) * 1024

    def wait_for(self, name, value, seconds):
        end = time.time() + seconds
        while self.metric(name) != value:
            check(time.time() < end, f"{name} is {self.metric(name)}, not {value}")
            time.sleep(0.1)


def request(method, path, body=None, close=False):
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    if close:
        head += "connection: close\r\n"
    return head.encode() + b"\r\n" + data


CHAT = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4, "temperature": 0}


def encrypted(binary):
    """A certificate made now; a client that trusts it, one that does not, and one that does not encrypt."""
    with tempfile.TemporaryDirectory() as folder:
        cert, key = os.path.join(folder, "cert.pem"), os.path.join(folder, "key.pem")
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                        "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-keyout", key,
                        "-out", cert, "-subj", "/CN=localhost", "-addext",
                        "subjectAltName=DNS:localhost,IP:127.0.0.1"],
                       check=True, capture_output=True)
        server = Server(binary, "--ssl-certfile", cert, "--ssl-keyfile", key)
        trusting = ssl.create_default_context(cafile=cert)
        stream = trusting.wrap_socket(server.connect(), server_hostname="localhost")
        print("tls:", stream.version(), stream.cipher()[0])
        status, body = server.ask("POST", "/v1/chat/completions", CHAT, stream)
        check(status == 200 and b"chat.completion" in body, body)
        try:
            ssl.create_default_context().wrap_socket(server.connect(), server_hostname="localhost")
            check(False, "a stranger's certificate was trusted")
        except ssl.SSLCertVerificationError:
            pass
        with server.connect() as plain:
            plain.sendall(request("GET", "/health"))
            answer = plain.recv(1000)
            check(not answer.startswith(b"HTTP"), answer)
        stream = trusting.wrap_socket(server.connect(), server_hostname="localhost")
        check(server.ask("GET", "/health", stream=stream)[0] == 200, "after strangers")
        server.end()


def slow(binary):
    """Clients that send slowly, or stop half way, or take nothing: all are let go in time."""
    server = Server(binary, "--client-timeout", "2", "--max-num-seqs", "32")
    begun = {
        "nothing": b"",
        "half a head": b"POST /v1/chat/completions HTTP/1.1\r\nhost:",
        "half a body": request("POST", "/v1/chat/completions", CHAT)[:-10],
    }
    streams = {name: server.connect(timeout=20) for name in begun}
    for name, stream in streams.items():
        stream.sendall(begun[name])
    for name, stream in streams.items():
        start = time.time()
        data = b"".join(iter(lambda: stream.recv(65536), b""))
        print(f"{name}: let go after {time.time() - start:.1f} s, told {data[9:12] or b'nothing'}")
        check(time.time() - start < 15, name)
        if name == "half a body":
            check(b"408" in data and b"request_timeout" in data, data)
    # A drop a second does not keep a connection: the whole head has its time.
    drip = server.connect()
    start, is_gone = time.time(), False
    for byte in b"GET /health HTTP/1.1\r\n":
        try:
            drip.sendall(bytes([byte]))
            drip.settimeout(0.5)
            is_gone = drip.recv(100) == b""
        except TimeoutError:
            continue
        except OSError:
            is_gone = True
        if is_gone:
            break
    check(is_gone and time.time() - start < 10, "a client that drips was kept")

    # Nobody reads the answer: long chunks for many answers fill what the system holds.
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect(server.place)
    body = dict(CHAT, max_tokens=1500, n=16, stream=True, logprobs=True, top_logprobs=20,
                temperature=1.0, ignore_eos=True)
    deaf.sendall(request("POST", "/v1/chat/completions", body))
    start = time.time()
    while server.metric("nuthatch:clients_left_total") < 1:
        check(time.time() - start < 120, "a client that takes nothing was kept")
        time.sleep(0.2)
    print(f"takes nothing: let go after {time.time() - start:.1f} s")
    server.wait_for("vllm:num_requests_running", 0, 10)

    # One that vanishes: its work stops.
    gone = server.connect()
    gone.sendall(request("POST", "/v1/chat/completions",
                         dict(CHAT, max_tokens=1500, stream=True, ignore_eos=True)))
    gone.recv(1000)
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    gone.close()
    server.wait_for("vllm:num_requests_running", 0, 10)
    check(server.ask("POST", "/v1/chat/completions", CHAT)[0] == 200, "afterwards")
    server.end()


def crowd(binary, n):
    """Many connections at once: all are kept, and some of them are used."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = n + 1000
    if hard != resource.RLIM_INFINITY and hard < wanted:
        n = hard - 1000
        print(f"crowd: only {hard} files are allowed, so {n} connections")
        wanted = hard
    # The server inherits it.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    server = Server(binary, "--max-connections", str(n + 500))
    before = server.rss()
    start = time.time()
    streams = []
    for _ in range(n):
        streams.append(server.connect())
    took = time.time() - start
    check(server.ask("GET", "/health")[0] == 200, "health beside a crowd")
    # Every one of them asks something, all before anybody is answered.
    start = time.time()
    for stream in streams:
        stream.sendall(request("GET", "/version"))
    for stream in streams:
        check(stream.recv(1000).startswith(b"HTTP/1.1 200"), "one of the crowd")
    asked = time.time() - start
    after = server.rss()
    start = time.time()
    status, body = server.ask("POST", "/v1/chat/completions", CHAT)
    chat = time.time() - start
    check(status == 200, body)
    for stream in streams:
        stream.close()
    check(server.ask("GET", "/health")[0] == 200, "health after a crowd")
    print(f"crowd: {n} connections open in {took:.1f} s; each asked once, all answered in {asked:.1f} s; "
          f"a chat beside them took {chat:.2f} s; memory {before >> 20} -> {after >> 20} MiB, "
          f"{(after - before) / n / 1024:.1f} KiB a connection")
    server.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("binary")
    parser.add_argument("--connections", type=int, default=10_000)
    args = parser.parse_args()
    encrypted(args.binary)
    slow(args.binary)
    crowd(args.binary, args.connections)
    print(f"{n_checks()} checks: all fine")


if __name__ == "__main__":
    main()
